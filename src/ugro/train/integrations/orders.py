"""The order in which a library's loader would use the samples, the same on every rank and when a run resumes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ugro.core.errors import UsageError
from ugro.train.sampler import Order

_LARGEST_SEED = 2**63

Agree = Callable[[str], bool]  # whether all ranks have the same text


@dataclass(frozen=True, slots=True)
class Sampled(Order):
    """What a sampler of the script returns, drawn with a seed of the epoch."""

    sampler: Any = field(default=None, compare=False)
    agree: Agree | None = field(default=None, compare=False)

    def of(self, seed: int, epoch: int) -> Any:
        import torch

        found = torch.tensor(_drawn(self.sampler, seed, epoch), dtype=torch.int64)
        if len(found) != self.samples:
            raise UsageError(
                f"{_name(self.sampler)} returned {len(found)} samples instead of {self.samples}",
                hint="a sampler must return as many as its len() says",
            )
        if self.agree is not None and not self.agree(hashlib.sha256(found.numpy().tobytes()).hexdigest()):
            raise UsageError(
                f"{_name(self.sampler)} returns another order on each rank",
                hint="draw with torch's or Python's random numbers, or with the sampler's `generator`",
            )
        return found


def order_of(sampler: Any, global_batch: int, *, drops_last: bool, agree: Agree | None = None) -> Order:
    from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

    if isinstance(sampler, DistributedSampler):  # a library's part for this rank; we deal the whole
        if (whole := getattr(sampler.dataset, "_sampler", None)) is not None:  # of a sampler, which Lightning wraps
            return order_of(whole, global_batch, drops_last=drops_last, agree=agree)
        return Order(len(sampler.dataset), global_batch, sampler.shuffle, drops_last)
    samples = _length(sampler)
    if type(sampler) is SequentialSampler:
        return Order(samples, global_batch, False, drops_last)
    if type(sampler) is RandomSampler and not sampler.replacement and samples == len(sampler.data_source):
        return Order(samples, global_batch, True, drops_last)
    return Sampled(samples, global_batch, True, drops_last, sampler=sampler, agree=agree)


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        raise UsageError(
            f"{_name(sampler)} does not know how many samples there are, so they cannot be shared by speed",
            hint="use a dataset with a length",
        ) from None


def _drawn(sampler: Any, seed: int, epoch: int) -> list[int]:
    """Leaves the random numbers of the script as they were."""
    import torch

    number = (seed * 1_000_003 + epoch) % _LARGEST_SEED
    before, pythons = torch.get_rng_state(), random.getstate()
    try:
        torch.default_generator.manual_seed(number)  # torch.manual_seed would change the GPUs' as well
        random.seed(number)
        if (own := getattr(sampler, "generator", None)) is not None:
            own.manual_seed(number)
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        return [int(index) for index in sampler]
    except TypeError as error:
        raise UsageError(
            f"{_name(sampler)} does not return indices of samples",
            hint="a sampler of batches cannot be shared by speed",
        ) from error
    finally:
        torch.set_rng_state(before)
        random.setstate(pythons)


def _name(sampler: Any) -> str:
    return type(sampler).__name__

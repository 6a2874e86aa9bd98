"""Compresses gradients on their way: half precision, low rank, or what measurements say pays.

The difference that a compression makes is measured now and then, with one bucket that is also exchanged as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from ugro.core.errors import UsageError
from ugro.policy.local.compression import AUTO, Measured, Method, choose, wished
from ugro.train.low_rank import LowRank
from ugro.train.stepping import Stepping
from ugro.train.telemetry import Word

_FIRST_STEPS = 3  # DDP arranges its buckets in them
_MEASURED_STEPS = 8
_COMPARED_EVERY = 64
_FIRST_COMPARED = 2  # steps after a change of the method


def hook(name: str | None, other: Any, stepping: Stepping) -> Any:
    """A hook for DDP; ``other`` is the script's own."""
    if name is None:
        return other
    if other is not None:
        raise UsageError("there are two ways to compress", hint="give compress or comm_hook, not both")
    name = wished(name)
    if stepping.elastic is not None:
        raise UsageError("an elastic job does not compress gradients", hint="leave out elastic.min_ranks, or compress=")
    return None if name == Method.NONE or stepping.group.ranks == 1 else Compression(name, stepping)


class Compression:
    def __init__(self, name: str, stepping: Stepping) -> None:
        self.__name__ = name
        self._stepping = stepping
        self._is_open = name == AUTO
        self.method = Method.NONE if self._is_open else Method(name)
        self._low_rank = LowRank(stepping.group.ranks)
        self._since = 0  # exchanges with this method
        self._words: list[Sequence[Word]] = []
        self._parameters: list[Any] = []
        self.error: float | None = None
        stepping.compression = self

    # --- DDP's hook ---------------------------------------------------------------------------------------------

    def __call__(self, state: Any, bucket: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

        is_last = bucket.is_last()
        if self._is_open:
            self._parameters += bucket.parameters() if len(self._words) == 0 else []
        is_compared = is_last and self.method is not Method.NONE and self._is_due()
        self._since += is_last
        exact = self._exact(bucket) if is_compared else None
        if self.method is Method.POWERSGD:
            found = self._low_rank.reduce(bucket)
        else:
            found = (fp16_compress_hook if self.method is Method.FP16 else allreduce_hook)(None, bucket)
        if exact is not None:
            self._compare(exact, found)
        return found

    def _is_due(self) -> bool:
        return self._since == _FIRST_COMPARED or (self._since > 0 and self._since % _COMPARED_EVERY == 0)

    def _exact(self, bucket: Any) -> Any:
        from torch import distributed

        exact = bucket.buffer().float() / self._stepping.group.ranks
        distributed.all_reduce(exact)
        return exact

    def _compare(self, exact: Any, found: Any) -> None:
        """No thread of the exchange waits here: this is the one that computes gradients."""
        value = found.wait()
        value = value[0] if isinstance(value, list | tuple) else value
        norm = float(exact.norm())
        self.error = float((value.float() - exact).norm()) / norm if norm > 0 else 0.0
        self._record("")

    # --- after a step -------------------------------------------------------------------------------------------

    def observe(self, words: Sequence[Word], *, repeats: bool) -> None:
        """The same words on all ranks."""
        if repeats:  # the exchange had meaningless gradients
            self._low_rank.forget()
        elif self._is_open and all(word.step >= _FIRST_STEPS for word in words):
            self._words.append(words)
            if len(self._words) >= _MEASURED_STEPS:
                self._choose()

    def _choose(self) -> None:
        self._is_open = False
        own_s = median(max(word.own_s for word in words) for words in self._words)
        # The rank that is ready last waits for nobody.
        exchange_s = median(min(word.tail_s for word in words) for words in self._words)
        trained = {id(one): one for one in self._parameters}.values()
        sent = sum(one.numel() * one.element_size() for one in trained)
        ranks = self._stepping.group.ranks
        choice = choose(Measured(ranks, sent, self._low_rank.bytes_of(trained), own_s, exchange_s))
        self.method, self._since = choice.method, 0
        self._words, self._parameters = [], []
        self._record(choice.reason)

    def _record(self, reason: str) -> None:
        self._stepping.balance.put(
            {
                "kind": "compression",
                "step": self._stepping.progress.step,
                "method": str(self.method),
                "reason": reason,
                "error": self.error,
            }
        )

"""Adds up the weighted changes of all ranks, in the background: half precision where that is enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ugro.train.clock import Clock
from ugro.train.local.values import scale_of


@dataclass(frozen=True, slots=True)
class Format:
    """How the changes travel, the same on all ranks."""

    largest: float  # on any rank
    exact: frozenset[int]  # tensors that travel in full precision


@dataclass(slots=True)
class Flight:
    """An exchange that is under way."""

    like: Sequence[Any]  # tensors of the shapes and types of the sum
    format: Format
    sent: Sequence[Any] | None  # this rank's own changes, unweighted; None: it has sent nothing
    clock: Clock  # on a GPU, waiting for an exchange stops the device and not the host
    bytes: int = 0
    seconds: float = 0.0  # it took
    exposed_s: float = 0.0  # of these, the device waited
    _begun: Any = None
    _parts: list[tuple[list[int], Any, Any]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(work.is_completed() for _, _, work in self._parts)

    def __post_init__(self) -> None:
        self._begun = self.clock.now()

    def add(self, numbers: list[int], flat: Any, work: Any) -> None:
        self._parts.append((numbers, flat, work))
        self.bytes += flat.numel() * flat.element_size()

    def wait(self) -> list[Any]:
        """The sum over all ranks."""
        import torch

        found: list[Any] = [None] * len(self.like)
        scale = scale_of(self.format.largest)
        waiting = self.clock.now()
        for _, _, work in self._parts:
            work.wait()
        arrived = self.clock.now()
        for numbers, flat, _ in self._parts:
            pieces = flat.split([self.like[number].numel() for number in numbers])
            for number, piece in zip(numbers, pieces, strict=True):
                value = piece.view_as(self.like[number])
                found[number] = value.float().div_(scale) if flat.dtype is torch.float16 else value
        self.exposed_s = self.clock.between(waiting, arrived)
        self.seconds = self.clock.between(self._begun, arrived)
        return found


def begin(flight: Flight, weight: float, group: Any) -> None:
    """Without changes of this rank, or with a weight of zero, it has nothing to add."""
    import torch
    from torch import distributed

    like, change, format_ = flight.like, flight.sent, flight.format
    is_empty = change is None or weight == 0
    for numbers, kind in _kinds(like, format_.exact):
        factor = weight * (scale_of(format_.largest) if kind is torch.float16 else 1.0)
        if is_empty:
            count = sum(like[number].numel() for number in numbers)
            flat = torch.zeros(count, dtype=kind, device=like[numbers[0]].device)
        else:
            assert change is not None
            flat = torch.cat([(change[number] * factor).reshape(-1).to(kind) for number in numbers])
        flight.add(numbers, flat, distributed.all_reduce(flat, group=group, async_op=True))


def _kinds(like: Sequence[Any], exact: frozenset[int]) -> Iterable[tuple[list[int], Any]]:
    """Tensors that travel together, with their type on the way."""
    import torch

    found: dict[Any, list[int]] = {}
    for number, one in enumerate(like):
        found.setdefault(one.dtype if number in exact else torch.float16, []).append(number)
    return [(numbers, kind) for kind, numbers in found.items()]

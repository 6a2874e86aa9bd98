"""The measurements that ranks exchange in every step, together with the last gradients.

No rank waits for them additionally, and after each step all ranks have the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ugro.policy.training.nan import Wrong
from ugro.train.clock import Clock, Moments, after_ready, phases

_STOP, _OUT_OF_MEMORY, _UNCLEAN, _REGROUPS, _HARMLESS, _CAP_ESTIMATED = 1, 2, 4, 8, 16, 32
_WRONG = (None, Wrong.LOSS, Wrong.GRADIENTS)


@dataclass(frozen=True, slots=True)
class Word:
    """The numbers of one rank. Times after a step are sent with the next one; on a GPU, all times a step later."""

    stops: bool = False
    is_out_of_memory: bool = False
    is_clean: bool = True
    cap: int | None = None
    step: int = -1  # the measured step; -1 for none
    share: int = 0
    micro_batches: int = 1
    own_s: float = 0.0
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    loss: float = math.nan
    tail_s: float = 0.0  # of the previous step: from ready to synchronised
    optimizer_s: float = 0.0  # the same
    trace_steps: int = 0  # steps to record from the next one on, as requested from the main rank
    part: float = 1.0  # of an equal share, the most that this rank is to take
    regroups: bool = False  # a rank waits to join
    is_cap_estimated: bool = False  # and not found out by running out of memory
    position: tuple[int, int] = (-1, -1)  # the epoch and the step in which it is sent
    not_finite: Wrong | None = None
    wrong_step: int = -1  # in which that was
    is_harmless: bool = False  # nothing of it comes into the model

    def numbers(self) -> list[float]:
        flags = _STOP * self.stops + _OUT_OF_MEMORY * self.is_out_of_memory + _UNCLEAN * (not self.is_clean)
        flags += _REGROUPS * self.regroups + _HARMLESS * self.is_harmless + _CAP_ESTIMATED * self.is_cap_estimated
        return [
            *(float(flags), float(self.cap or 0), float(self.step), float(self.share), float(self.micro_batches)),
            *(self.own_s, self.data_s, self.forward_s, self.backward_s, self.loss, self.tail_s, self.optimizer_s),
            *(float(self.trace_steps), self.part, *map(float, self.position)),
            *(float(_WRONG.index(self.not_finite)), float(self.wrong_step)),
        ]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Word:
        flags, cap, step, share, micro_batches = (int(number) for number in numbers[:5])
        own_s, data_s, forward_s, backward_s, loss, tail_s, optimizer_s, trace_steps, part = numbers[5:14]
        epoch, at, wrong, wrong_step = (int(number) for number in numbers[14:])
        return cls(
            bool(flags & _STOP), bool(flags & _OUT_OF_MEMORY), not flags & _UNCLEAN, cap or None, step, share,
            micro_batches, own_s, data_s, forward_s, backward_s, loss, tail_s, optimizer_s, int(trace_steps), part,
            bool(flags & _REGROUPS), bool(flags & _CAP_ESTIMATED), (epoch, at), _WRONG[wrong], wrong_step,
            bool(flags & _HARMLESS),
        )  # fmt: skip


def of_units(words: Sequence[Word], units: Sequence[int]) -> list[Word]:
    """One for each unit. Its ranks have the same samples, and it is as slow as the slowest of them."""
    if len(set(units)) == len(words):
        return list(words)
    return [
        _together([word for word, one in zip(words, units, strict=True) if one == unit])
        for unit in range(max(units) + 1)
    ]


def _together(words: Sequence[Word]) -> Word:
    slowest = max(words, key=lambda word: word.own_s)
    smallest = min(words, key=lambda word: math.inf if word.cap is None else word.cap)
    return replace(
        slowest,
        stops=any(word.stops for word in words),
        is_out_of_memory=any(word.is_out_of_memory for word in words),
        is_clean=all(word.is_clean for word in words),
        cap=smallest.cap,
        is_cap_estimated=smallest.is_cap_estimated,
        step=min(word.step for word in words),
        data_s=max(word.data_s for word in words),
        trace_steps=words[0].trace_steps,
        part=min(word.part for word in words),
        **_wrong(words),
    )


def _wrong(words: Sequence[Word]) -> dict[str, Any]:
    one = next((word for word in words if word.not_finite is not None), words[0])
    return {"not_finite": one.not_finite, "wrong_step": one.wrong_step, "is_harmless": one.is_harmless}


class History:
    """The newest steps of this rank."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._steps: list[Moments] = []

    def begin(self, moments: Moments) -> Moments:
        before = self.latest
        if before is not None:
            self.end()
            moments.since = before.synced
        moments.begun = self.clock.now()
        self._steps = [*self._steps, moments][-3:]
        return moments

    @property
    def latest(self) -> Moments | None:
        return self._steps[-1] if self._steps else None

    @property
    def before_latest(self) -> Moments | None:
        return self._at(-2)

    def end(self) -> None:
        """Ends the newest step, if it has not ended."""
        latest = self.latest
        if latest is not None and latest.ended is None and latest.synced is not None:
            latest.ended = self.clock.now()

    def forget(self) -> Any:
        """Of a step that came to nothing, and of those before it; returns its loss, if that was known."""
        latest, self._steps = self.latest, []
        return latest.loss if latest is not None else None

    def word(
        self, *, stops: bool, is_out_of_memory: bool, cap: int | None, trace_steps: int = 0, part: float = 1.0
    ) -> Word:
        """The numbers of the newest step whose moments can be read, and of the one before it."""
        measured, finished = self._at(-1 - self.clock.lag), self._at(-2 - self.clock.lag)
        if measured is None or measured.ready is None or is_out_of_memory:
            return Word(stops, is_out_of_memory, False, cap, trace_steps=trace_steps, part=part)
        found = phases(self.clock, measured)
        tail_s, optimizer_s = after_ready(self.clock, finished) if finished is not None else (0.0, 0.0)
        return Word(
            stops, is_out_of_memory, measured.is_clean, cap, measured.step, measured.share, measured.micro_batches,
            found.own_s, found.data_s, found.forward_s, found.backward_s, _value(measured.loss), tail_s, optimizer_s,
            trace_steps, part,
        )  # fmt: skip

    def _at(self, place: int) -> Moments | None:
        return self._steps[place] if len(self._steps) >= -place else None


def _value(loss: Any) -> float:
    return math.nan if loss is None else float(loss)

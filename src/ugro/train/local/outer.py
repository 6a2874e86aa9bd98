"""What becomes of the average change of a round: it is taken as it is, or as a step of an outer optimizer (DiLoCo)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ugro.policy.local.sync import Outer

_RATE, _MOMENTUM = 0.7, 0.9


class OuterStep:
    def __init__(self, kind: Outer, trained: int) -> None:
        """``trained``: so many of the tensors are parameters; the others, such as statistics, are averaged."""
        self._kind = kind
        self._trained = trained
        self._momentum: list[Any] = []

    def update(self, mean: Sequence[Any]) -> Sequence[Any]:
        if self._kind is Outer.AVERAGE:
            return mean
        if not self._momentum:
            self._momentum = [one.clone() for one in mean[: self._trained]]
        else:
            for held, one in zip(self._momentum, mean[: self._trained], strict=True):
                held.mul_(_MOMENTUM).add_(one)
        steps = [
            (one + _MOMENTUM * held).mul_(_RATE)
            for one, held in zip(mean[: self._trained], self._momentum, strict=True)
        ]
        return [*steps, *mean[self._trained :]]

    def state(self) -> list[Any]:
        return [one.cpu() for one in self._momentum]

    def restore(self, state: Sequence[Any], device: Any) -> None:
        if self._kind is Outer.NESTEROV:
            self._momentum = [one.to(device).clone() for one in state]

"""What becomes of the average change of a round: it is taken as it is, or as a step of an outer optimizer (DiLoCo)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ugro.policy.local.sync import Outer

_RATE, _MOMENTUM = 0.7, 0.9


class OuterStep:
    def __init__(self, kind: Outer) -> None:
        self._kind = kind
        self._momentum: dict[str, Any] = {}  # by parameter

    def update(self, mean: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
        """``names``: of the parameters, which come first; the others, such as statistics, are averaged."""
        if self._kind is Outer.AVERAGE:
            return mean
        self._momentum = {name: held for name, held in self._momentum.items() if name in set(names)}
        steps = [self._step(name, one) for name, one in zip(names, mean, strict=False)]
        return [*steps, *mean[len(names) :]]

    def _step(self, name: str, change: Any) -> Any:
        """As torch's SGD with Nesterov momentum, whose gradient is the change, with the other sign."""
        held = self._momentum.get(name)
        if held is None:
            held = self._momentum[name] = change.clone()
        else:
            held.mul_(_MOMENTUM).add_(change)
        return (change + _MOMENTUM * held).mul_(_RATE)

    def state(self) -> dict[str, Any]:
        return {name: one.cpu() for name, one in self._momentum.items()}

    def restore(self, state: Mapping[str, Any], device: Any) -> None:
        if self._kind is Outer.NESTEROV:
            self._momentum = {name: one.to(device).clone() for name, one in state.items()}

"""How the values of a sweep's parameters are placed on an axis. Pure."""

from __future__ import annotations

from typing import Any

from ugro.core.sweep import Scale
from ugro.policy.sweep.space import Kind, Parameter, dumps
from ugro.policy.sweep.spec import SweepSpec


def scales(spec: SweepSpec) -> tuple[Scale, ...]:
    """Of the parameters that vary, in their order."""
    varying = set(spec.varying)
    return tuple(_scale(one) for one in spec.parameters if one.name in varying)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scale(one: Parameter) -> Scale:
    kind = one.distribution.removeprefix("q_")
    if one.axis.kind is Kind.CHOICE:
        # Numbers in their order, all else as it was written.
        values = sorted(one.values) if all(is_number(value) for value in one.values) else one.values
        return Scale(one.name, Kind.CHOICE, values=tuple(dict.fromkeys(dumps(value) for value in values)))
    if one.axis.kind is Kind.WHOLE:
        return Scale(one.name, Kind.WHOLE, low=one.low, high=one.high)
    if kind in ("normal", "log_normal"):  # without ends
        return Scale(one.name, Kind.NUMBER, is_log=kind == "log_normal")
    if kind == "beta":
        return Scale(one.name, Kind.NUMBER, low=0.0, high=1.0)
    return Scale(one.name, Kind.NUMBER, one.axis.is_log, one.low, one.high)

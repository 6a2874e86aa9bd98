"""Which compression of gradients pays: the ladder from none over half precision to low rank. Pure.

The least that is lost for a speed near the best: half precision costs next to nothing, low rank (PowerSGD) changes the
gradient of each step and makes up for it in later ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.core.errors import UsageError
from ugro.core.support.quantity import format_duration, format_size

_WORTH_IT = 0.1  # of a step that the exchange takes
_NEARLY_AS_FAST = 1.25
_LEAST_PART = 0.1  # of an exchange that low rank still takes: it computes, and exchanges twice


class Method(StrEnum):
    NONE = "none"
    FP16 = "fp16"
    POWERSGD = "powersgd"


AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a step without compression."""

    ranks: int
    gradient_bytes: int
    low_rank_bytes: int  # that PowerSGD would send instead
    own_s: float  # of the slowest rank
    exchange_s: float  # that it waits for the exchange


@dataclass(frozen=True, slots=True)
class Choice:
    method: Method
    reason: str
    step_s: float  # predicted


def wished(name: str) -> str:
    if name not in (*Method, AUTO):
        raise UsageError(f"unknown compression {name!r}", hint=f"one of {', '.join((*Method, AUTO))}")
    return name


def choose(measured: Measured) -> Choice:
    whole_s = measured.own_s + measured.exchange_s
    share = measured.exchange_s / max(1e-12, whole_s)
    about = f"exchanging {format_size(measured.gradient_bytes)} takes {100 * share:.0f} % of a step"
    if share < _WORTH_IT:
        return Choice(Method.NONE, f"{about}: not worth compressing", whole_s)
    half_s = measured.own_s + measured.exchange_s / 2
    part = max(_LEAST_PART, measured.low_rank_bytes / max(1, measured.gradient_bytes))
    low_s = measured.own_s + measured.exchange_s * part
    about += f" ({format_size(_rate(measured))}/s)"
    if half_s <= _NEARLY_AS_FAST * low_s:
        return Choice(Method.FP16, f"{about}; in half precision a step should take {format_duration(half_s)}", half_s)
    sent = format_size(measured.low_rank_bytes)
    return Choice(Method.POWERSGD, f"{about}; as {sent} of low rank it should take {format_duration(low_s)}", low_s)


def _rate(measured: Measured) -> float:
    """What a ring sends, over the time that was waited for it."""
    return 2 * (measured.ranks - 1) / measured.ranks * measured.gradient_bytes / max(1e-12, measured.exchange_s)

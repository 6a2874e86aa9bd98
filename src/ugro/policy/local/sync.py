"""How often ranks synchronise: in every step, or in rounds of their own steps (local SGD)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypedDict

from ugro.core.errors import UsageError

_ROUND_S = 20.0
_MOST_ROUND_S = 3600.0
_MOST_STALENESS = 64


class SyncMode(StrEnum):
    STEP = "step"  # gradients are exchanged in every step
    LOCAL = "local"  # models are averaged after each round


class Outer(StrEnum):
    """What becomes of the average of a round's changes."""

    AVERAGE = "average"  # it is taken as it is
    NESTEROV = "nesterov"  # a step of SGD with Nesterov momentum (DiLoCo)


@dataclass(frozen=True, slots=True)
class Sync:
    mode: SyncMode = SyncMode.STEP
    round_s: float = _ROUND_S
    max_staleness: int = 0  # rounds that a rank may be late; 0: all wait for each other
    outer: Outer = Outer.AVERAGE

    def __post_init__(self) -> None:
        if not (math.isfinite(self.round_s) and 0 < self.round_s <= _MOST_ROUND_S):
            raise UsageError(
                f"a round cannot take {self.round_s} seconds", hint=f"up to {_MOST_ROUND_S:.0f}, such as 20"
            )
        if not 0 <= self.max_staleness <= _MOST_STALENESS:
            raise UsageError(
                f"max_staleness cannot be {self.max_staleness}", hint=f"a whole number from 0 to {_MOST_STALENESS}"
            )

    @property
    def is_local(self) -> bool:
        return self.mode is SyncMode.LOCAL


class SyncOptions(TypedDict, total=False):
    """Keywords of ``ugro.train.init``; None is as if not given."""

    sync: str | None  # step or local
    round_s: float | None
    max_staleness: int | None
    outer: str | None  # average or nesterov
    nan: str | None  # stop, skip or ignore: of losses and gradients that are not finite


def chosen(sync: Sync, options: SyncOptions) -> Sync:
    """What a script says overrides its surroundings."""
    if (mode := options.get("sync")) is not None:
        sync = replace(sync, mode=sync_mode(mode))
    if (round_s := options.get("round_s")) is not None:
        sync = replace(sync, round_s=float(round_s))
    if (staleness := options.get("max_staleness")) is not None:
        sync = replace(sync, max_staleness=int(staleness))
    kind = options.get("outer")
    return sync if kind is None else replace(sync, outer=outer(kind))


def sync_mode(name: str) -> SyncMode:
    try:
        return SyncMode(name)
    except ValueError:
        raise UsageError(f"unknown sync mode {name!r}", hint=f"one of {', '.join(SyncMode)}") from None


def outer(name: str) -> Outer:
    try:
        return Outer(name)
    except ValueError:
        raise UsageError(f"unknown outer optimizer {name!r}", hint=f"one of {', '.join(Outer)}") from None

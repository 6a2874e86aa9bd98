"""What a sweep does: its space, method, metric and rule for early ends; made by ``reading``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ugro.policy.sweep.options import Options
from ugro.policy.sweep.space import Parameter

Goal = Literal["minimize", "maximize"]


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    goal: Goal = "minimize"
    target: float | None = None
    is_mean: bool = False  # a trial counts by the mean of its values, and not by the best of them

    @property
    def sign(self) -> int:
        """Times this, smaller is better."""
        return -1 if self.goal == "maximize" else 1


@dataclass(frozen=True, slots=True)
class Pruning:
    """When trials end early. Bands of ``hyperband`` count values, as W&B does; the other rules count steps."""

    kind: str
    bands: tuple[int, ...] = ()
    eta: float = 3.0
    is_strict: bool = False
    startup: int = 5  # trials that ``median`` lets run before it compares, steps of ``wilcoxon``
    brackets: int = 1  # of ``asha``: trials of each begin at another band, and are compared among themselves
    p: float = 0.1  # of ``wilcoxon``: how likely it may be that chance alone makes a trial look so bad


@dataclass(frozen=True, slots=True)
class SweepSpec:
    parameters: tuple[Parameter, ...]
    method: str = "grid"
    metric: Metric | None = None
    pruning: Pruning | None = None
    name: str | None = None
    program: str | None = None
    command: tuple[str, ...] = ()  # with W&B's macros; empty: the script with flags
    run_cap: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its jobs
    limits: Mapping[str, Any] = field(default_factory=dict)  # of its budget
    options: Options = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what is read and not used

    @property
    def varying(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.parameters if not one.is_constant and len(one.grid() or (1, 2)) > 1)

    @property
    def goal(self) -> Goal:
        return self.metric.goal if self.metric else "minimize"

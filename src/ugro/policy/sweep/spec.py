"""What a sweep does: its space, method, metric and rule for early ends; made by ``reading``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ugro.policy.sweep.space import Parameter

Goal = Literal["minimize", "maximize"]
METHODS = ("grid", "random", "bayes", "tpe", "gp")
PRUNERS = ("hyperband", "asha", "median")


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    goal: Goal = "minimize"
    target: float | None = None

    @property
    def sign(self) -> int:
        """Times this, smaller is better."""
        return -1 if self.goal == "maximize" else 1


@dataclass(frozen=True, slots=True)
class Pruning:
    """When trials end early. Bands of ``hyperband`` count values, as W&B does; ``asha`` and ``median`` count steps."""

    kind: str
    bands: tuple[int, ...] = ()
    eta: float = 3.0
    is_strict: bool = False
    startup: int = 5  # trials that ``median`` lets run before it compares


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
    notes: tuple[str, ...] = ()  # what is read and not used

    @property
    def varying(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.parameters if not one.is_constant and len(one.grid() or (1, 2)) > 1)

    @property
    def goal(self) -> Goal:
        return self.metric.goal if self.metric else "minimize"

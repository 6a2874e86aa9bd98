"""The shape of a lab: its nodes, their speeds, and how they are slowed down. No side effects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from ugro.core.errors import UsageError

MOST_NODES = 64
MOST_GPUS = 16
DEFAULT_SPEEDS = (1.0, 0.5, 0.25)
# Below this, starting a node program takes longer than the agent waits.
LEAST_SPEED = 0.02


class Throttle(StrEnum):
    CGROUP = "cgroup"
    DUTY_CYCLE = "duty-cycle"


@dataclass(frozen=True, slots=True)
class LabNode:
    name: str
    speed: float
    home: str
    throttle: Throttle
    cgroup: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """A lab as created, and as recorded in its file."""

    nodes: tuple[LabNode, ...]
    gpus: int = 0  # simulated GPUs per node

    @property
    def speeds(self) -> tuple[float, ...]:
        return tuple(node.speed for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user requested. ``None`` keeps the existing value, or the default."""

    nodes: int | None = None
    speeds: tuple[float, ...] | None = None
    gpus: int | None = None
    without_cgroups: bool = False
    takes_precedence: bool = False  # over other programs on this machine, for a short-lived lab

    def wanted_speeds(self) -> tuple[float, ...]:
        """One speed per node; missing ones repeat the last."""
        count = self._count()
        if not 1 <= count <= MOST_NODES:
            raise UsageError(f"a lab has 1 to {MOST_NODES} nodes, not {count}")
        if self.speeds is None:
            return _filled(DEFAULT_SPEEDS[:count], count)
        if len(self.speeds) > count:
            raise UsageError(
                f"{len(self.speeds)} speeds for {_nodes(count)}", hint=f"give fewer, or --nodes {len(self.speeds)}"
            )
        return _filled(self.speeds, count)

    def wanted_gpus(self) -> int:
        gpus = self.gpus or 0
        if not 0 <= gpus <= MOST_GPUS:
            raise UsageError(f"a lab node has 0 to {MOST_GPUS} simulated GPUs, not {gpus}")
        return gpus

    def is_granted_by(self, shape: Shape) -> bool:
        has_speeds = (self.nodes is None and self.speeds is None) or self.wanted_speeds() == shape.speeds
        has_gpus = self.gpus is None or self.gpus == shape.gpus
        is_slowed_so = not self.without_cgroups or all(
            node.throttle is Throttle.DUTY_CYCLE for node in shape.nodes
        )
        return has_speeds and has_gpus and is_slowed_so

    def _count(self) -> int:
        if self.nodes is not None:
            return self.nodes
        return len(DEFAULT_SPEEDS if self.speeds is None else self.speeds)


def parse_speeds(text: str) -> tuple[float, ...]:
    return tuple(_speed(part.strip()) for part in text.split(","))


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not LEAST_SPEED <= speed <= 1:
        raise UsageError(
            f"{text!r} is not a speed: a number from {LEAST_SPEED:g} to 1",
            hint="1 is a whole core, 0.25 a quarter of one: --speeds 1,0.5,0.25",
        )
    return speed


def _filled(speeds: tuple[float, ...], count: int) -> tuple[float, ...]:
    return (*speeds, *[speeds[-1]] * (count - len(speeds)))


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"

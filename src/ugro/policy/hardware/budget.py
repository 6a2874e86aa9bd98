"""How the time of a measurement is divided: what each phase aims at, and when it is cut off."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ugro.core.figures import Mode, Part

STORAGE_BYTES = {Mode.QUICK: 64 << 20, Mode.FULL: 1 << 30}
SIZES_BYTES = (10**6, 16 * 10**6, 128 * 10**6)  # of the all-reduces
OF_MACHINE = (Part.CPU, Part.MEMORY, Part.STORAGE)

# Together 13.5 s; asking nodes and storing figures takes some time, too. PyTorch takes seconds to load: twice.
_QUICK_S = {"machine": 3.0, "devices": 4.5, "network": 2.0, "allreduce": 4.0}
_OVERHEAD_S = 1.5
_TIMES = {Mode.QUICK: 1.0, Mode.FULL: 8.0}
_ON_SINGLE_NODES = ("machine", "devices")


def phases(parts: Collection[Part], nodes: int) -> list[str]:
    """In the order in which they run."""
    wanted = {"machine"} if any(part in parts for part in OF_MACHINE) else set()
    wanted |= {"devices"} if Part.DEVICES in parts else set()
    if nodes > 1:
        wanted |= {"network"} if Part.NETWORK in parts else set()
        wanted |= {"allreduce"} if Part.ALLREDUCE in parts else set()
    return [phase for phase in _QUICK_S if phase in wanted]


@dataclass(slots=True)
class Budget:
    """``turns``: how often the phases on single nodes run one after another, because nodes share a machine."""

    mode: Mode
    phases: list[str]
    turns: int = 1
    spent_s: float = field(default=0.0, init=False)

    @property
    def bound_s(self) -> float:
        """When all is over at the latest: 15 s or two minutes, and more only where nodes share a machine."""
        whole = sum(_QUICK_S.values()) + _OVERHEAD_S
        again = sum(_QUICK_S[phase] for phase in self.phases if phase in _ON_SINGLE_NODES)
        return (whole + again * (self.turns - 1)) * _TIMES[self.mode]

    def aim_s(self, phase: str) -> float:
        """How long one turn of this phase should take."""
        return _QUICK_S[phase] * _TIMES[self.mode]

    def limit_s(self, phase: str, turn: int = 0) -> float:
        """When it is cut off: what is left but for the turns and phases after it."""
        turns = self.turns if phase in _ON_SINGLE_NODES else 1
        later = self.aim_s(phase) * (turns - turn - 1)
        for one in self.phases[self.phases.index(phase) + 1 :]:
            later += self.aim_s(one) * (self.turns if one in _ON_SINGLE_NODES else 1)
        return max(0.0, self.bound_s - self.spent_s - later)

"""A node that is measured: its link, what a probe found, and the figures as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ugro.agent.hardware.lines import Lines
from ugro.core.figures import CPU, DeviceFigures, Mode, NodeFigures, Part, Skipped, Surroundings
from ugro.core.node import Facts, Gpu, Machine
from ugro.nodes.link import Link
from ugro.policy.hardware.budget import OF_MACHINE

T = TypeVar("T")


class Taken(Exception):
    """Its owner needs a node that is measured; the text says which and why."""


@dataclass(slots=True)
class Subject:
    name: str
    link: Link
    facts: Facts
    python: str | None = None  # the path of the one that has PyTorch; None: the one that runs the ranks
    found: list[Lines] = field(default_factory=list)
    asked: list[Lines] = field(default_factory=list)  # what is no figure of its own
    seen: dict[str, Surroundings] = field(default_factory=dict)  # by uuid, while it was measured
    is_busy: bool = False  # and measured all the same
    is_lost: bool = False
    taken: str | None = None  # why it is measured no longer, though it can be reached
    was_taken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_out(self) -> bool:
        return self.is_lost or self.taken is not None

    def make_way(self, sign: str | None) -> None:
        """Its owner has come. What was measured until then may be too low."""
        self.taken = f"its owner came ({sign})"
        self.is_busy = True
        self.was_taken.set()

    def lock(self, about: About, gpus: Collection[int]) -> dict[str, Any]:
        """For a process that uses these GPUs: that it must have their locks."""
        devices = [[gpu.index, gpu.uuid] for gpu in self.facts.gpus if gpu.index in gpus]
        return {"gpus": devices, "agent": about.agent, "node": self.name, "is_forced": about.is_forced}

    @property
    def machine(self) -> Machine:
        assert self.link.machine is not None  # the link is open
        return self.link.machine

    @property
    def torch(self) -> str | None:
        return next((lines.torch for lines in self.found if lines.torch), None)

    @property
    def cuda_devices(self) -> range | None:
        """The GPUs that PyTorch can use; None: nobody has asked it."""
        if not self.facts.gpus:
            return range(0)
        return next((range(one.gpus) for one in (*self.found, *self.asked) if one.gpus is not None), None)

    def note(self, gpus: tuple[Gpu, ...]) -> None:
        """What a probe has seen of its GPUs meanwhile."""
        for gpu in gpus:
            before = self.seen.get(gpu.uuid, Surroundings())
            hottest = max((t for t in (before.temperature_c, gpu.temperature_c) if t is not None), default=None)
            throttle = tuple(dict.fromkeys((*before.throttle, *(gpu.throttle or ()))))
            self.seen[gpu.uuid] = replace(before, temperature_c=hottest, throttle=throttle)

    def figures(self, about: About) -> NodeFigures:
        last: dict[str, Any] = {}
        for lines in self.found:
            last |= {
                name: value
                for name in ("cpu", "memory_bytes_per_s", "storage", "torch")
                if (value := getattr(lines, name)) is not None
            }
        devices = [self._device(device) for lines in self.found for device in lines.devices]
        return NodeFigures(
            node=self.name,
            measured_at=about.measured_at,
            mode=about.mode,
            driver=self.facts.gpu_driver,
            devices=tuple(device for device in devices if device is not None),
            skipped=(*(one for lines in self.found for one in lines.skipped), *self._silent(about)),
            is_forced=self.is_busy,
            **last,
        )

    def _device(self, device: DeviceFigures) -> DeviceFigures | None:
        """With its name, and what was seen of it meanwhile; None if the machine has no such device."""
        if device.index is None:
            return replace(device, uuid=CPU, name=self.machine.cpu_model)
        gpu = next((gpu for gpu in self.facts.gpus if gpu.index == device.index), None)
        if gpu is None:
            return None
        before = self.seen.get(gpu.uuid, Surroundings())
        seen = replace(before, pcie_width=device.seen.pcie_width, pcie_width_max=device.seen.pcie_width_max)
        return replace(device, uuid=gpu.uuid, name=gpu.name, seen=seen)

    def _silent(self, about: About) -> list[Skipped]:
        """What was lost with the link, or left out when its owner came."""
        if not self.is_out:
            return []
        parts = [part for part in (*OF_MACHINE, Part.DEVICES) if part in about.parts]
        return [Skipped(str(part), self.taken or "the node could not be reached any more") for part in parts]


@dataclass(frozen=True, slots=True)
class About:
    measured_at: str
    mode: Mode
    parts: frozenset[Part]
    agent: str = ""  # who measures
    is_forced: bool = False  # busy nodes, too


async def unless_taken(subjects: Sequence[Subject], work: Coroutine[Any, Any, T]) -> T:
    """Ends the work, and raises ``Taken``, when the owner of one of these nodes comes."""
    task = asyncio.create_task(work, name="measure")
    news = [asyncio.create_task(one.was_taken.wait(), name=f"owner of {one.name}") for one in subjects]
    try:
        await asyncio.wait([task, *news], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Taken("; ".join(f"{one.name}: {one.taken}" for one in subjects if one.taken))
    finally:
        for one in (task, *news):
            one.cancel()
        await asyncio.gather(task, *news, return_exceptions=True)

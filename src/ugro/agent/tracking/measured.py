"""What was measured of the nodes' hardware, in memory: scheduling, plans and alerts ask for it all the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ugro.core.figures import BestFigure, Measurement, NodeFigures
from ugro.core.finding import Finding
from ugro.policy.hardware.decline import all_series, judge_figures
from ugro.policy.hardware.speed import node_speeds
from ugro.store.hardware import HardwareStore


class MeasuredHardware:
    def __init__(self, store: HardwareStore) -> None:
        self._store = store
        self.latest: Mapping[str, NodeFigures] = {}
        self._findings: dict[str, list[Finding]] = {}
        self._speeds: tuple[object, dict[str, float]] = (None, {})

    async def read(self) -> None:
        self.latest = await self._store.latest()
        for node in self.latest:
            await self._judge(node)

    async def record(self, measured: Measurement) -> None:
        measured = replace(measured, nodes=tuple(node for node in measured.nodes if node.has_figures))
        best = {node.node: _best(node) for node in measured.nodes if not node.is_forced}
        await self._store.record(measured, best)
        self.latest = await self._store.latest()
        for node in measured.nodes:
            await self._judge(node.node)

    async def forget(self, node: str) -> None:
        await self._store.forget(node)
        self._findings.pop(node, None)
        self.latest = await self._store.latest()

    def latest_of(self, node: str) -> NodeFigures | None:
        return self.latest.get(node)

    def findings(self, node: str) -> Sequence[Finding]:
        """What has become worse than it was."""
        return self._findings.get(node, ())

    def speeds(self, gpus: Callable[[], Mapping[str, tuple[str, ...]]]) -> dict[str, float]:
        """By node, relative to the others. ``gpus``: those that each has, by uuid."""
        if not self.latest:
            return {}
        nodes = gpus()
        key = (self.latest, nodes)
        if self._speeds[0] != key:
            self._speeds = (key, node_speeds(nodes, self.latest))
        return self._speeds[1]

    async def _judge(self, node: str) -> None:
        self._findings[node] = judge_figures(await self._store.history(node))


def _best(node: NodeFigures) -> list[BestFigure]:
    return [BestFigure(one.key, max(one.values), node.measured_at) for one in all_series([node])]

"""A node's report as points of its curves, at most one per second."""

from __future__ import annotations

from collections.abc import Iterator

from ugro.core.node import Gpu, NodeReport
from ugro.telemetry.metricstore import node_owner
from ugro.telemetry.series import Points, SeriesKey


def samples(report: NodeReport, now: float) -> dict[SeriesKey, Points]:
    """The step of a point is its unix second."""
    second, time_ms = int(now), int(now * 1000)
    return {
        SeriesKey(node_owner(report.name), 0, 0, key): Points([second], [time_ms], [float(value)])
        for key, value in _values(report)
        if value is not None
    }


def _values(report: NodeReport) -> Iterator[tuple[str, float | None]]:
    yield "score", report.score
    yield "up", 0.0 if report.facts is None else 1.0
    yield "link/latency_s", report.link.rtt_s
    yield "link/loss_ratio", report.link.loss_ratio if report.facts else None
    facts = report.facts
    if facts is None:
        return
    yield "cpu/use_ratio", facts.cpu_use_ratio
    yield "cpu/load", facts.load[0]
    yield "memory/used_ratio", facts.memory_used_ratio
    for disk in facts.disks:
        yield f"disk/{disk.mount}/used_ratio", disk.used_ratio
    for gpu in facts.gpus:
        for name, value in _of_gpu(gpu):
            yield f"gpu/{gpu.index}/{name}", value


def _of_gpu(gpu: Gpu) -> Iterator[tuple[str, float | None]]:
    yield "use_ratio", gpu.use_ratio
    yield "memory_used_bytes", gpu.memory_used_bytes
    yield "memory_used_ratio", gpu.memory_ratio
    yield "temperature_c", gpu.temperature_c
    yield "power_w", gpu.power_w
    yield "throttled", None if gpu.throttle is None else float(bool(gpu.throttle))
    if gpu.power_w is not None and gpu.power_limit_w:
        yield "power_limit_ratio", gpu.power_w / gpu.power_limit_w

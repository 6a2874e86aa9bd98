"""Measured hardware for Prometheus: what ``ugro node bench`` found last, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from ugro.core.figures import PRECISIONS, AllReduceFigures, DeviceFigures, LinkFigures, NodeFigures
from ugro.core.support.moment import unix_seconds
from ugro.telemetry.prometheus import Family

_MOST_LINKS = 1000  # of a hundred nodes there would be ten thousand


def of_hardware(
    nodes: Mapping[str, NodeFigures], links: Iterable[LinkFigures], allreduces: Iterable[AllReduceFigures]
) -> Iterator[Family]:
    yield from _of_nodes(nodes)
    yield from _of_devices(nodes)
    yield from _of_links([one for one in links if one.error is None][:_MOST_LINKS])
    yield _of_allreduces(allreduces)


def _of_nodes(nodes: Mapping[str, NodeFigures]) -> Iterator[Family]:
    for name, words, value in _NODE_GAUGES:
        family = Family(name, "gauge", words)
        for node in nodes.values():
            family.add(value(node), node=node.node)
        yield family


_NODE_GAUGES: tuple[tuple[str, str, Callable[[NodeFigures], float | None]], ...] = (
    (
        "ugro_node_measured_time_seconds",
        "When a node's hardware was measured last, since the epoch.",
        lambda node: unix_seconds(node.measured_at),
    ),
    (
        "ugro_node_measured_cpu_bytes_per_second",
        "Text that all cores of a node compress.",
        lambda node: node.cpu.all_cores_bytes_per_s if node.cpu else None,
    ),
    (
        "ugro_node_measured_cpu_core_bytes_per_second",
        "Text that one core of a node compresses.",
        lambda node: node.cpu.one_core_bytes_per_s if node.cpu else None,
    ),
    (
        "ugro_node_measured_memory_bytes_per_second",
        "Copies within a node's main memory, read and written.",
        lambda node: node.memory_bytes_per_s,
    ),
    (
        "ugro_node_measured_storage_read_bytes_per_second",
        "Sequential reads from the disk with UGRO's folder.",
        lambda node: node.storage.read_bytes_per_s if node.storage else None,
    ),
    (
        "ugro_node_measured_storage_write_bytes_per_second",
        "Writes with fsync to the disk with UGRO's folder.",
        lambda node: node.storage.write_bytes_per_s if node.storage else None,
    ),
    (
        "ugro_node_measured_storage_random_reads_per_second",
        "Random reads of 4 KiB from the disk with UGRO's folder.",
        lambda node: node.storage.random_reads_per_s if node.storage else None,
    ),
    (
        "ugro_node_measured_storage_fsync_seconds",
        "One small write with fsync to the disk with UGRO's folder, the median.",
        lambda node: node.storage.fsync_s if node.storage else None,
    ),
)


def _of_devices(nodes: Mapping[str, NodeFigures]) -> Iterator[Family]:
    flops = Family(
        "ugro_node_measured_device_operations_per_second", "gauge", "Matrix products of a device, by precision."
    )
    memory = Family("ugro_node_measured_device_memory_bytes_per_second", "gauge", "Copies within a device's memory.")
    copies = Family(
        "ugro_node_measured_device_copy_bytes_per_second", "gauge", "Copies between main memory and a device."
    )
    for node in nodes.values():
        for device in node.devices:
            labels = {"node": node.node, "device": _name(device), "model": device.name}
            for precision in PRECISIONS:
                rate = device.rate(precision)
                flops.add(None if rate is None else rate * 1e12, **labels, precision=precision)
            memory.add(device.memory_bytes_per_s, **labels)
            copies.add(device.to_device_bytes_per_s, **labels, direction="to")
            copies.add(device.from_device_bytes_per_s, **labels, direction="from")
    yield from (flops, memory, copies)


def _of_links(links: Iterable[LinkFigures]) -> Iterator[Family]:
    speed = Family("ugro_node_measured_link_bytes_per_second", "gauge", "One TCP connection from a node to another.")
    latency = Family("ugro_node_measured_link_latency_seconds", "gauge", "Round trip between two nodes, the median.")
    jitter = Family(
        "ugro_node_measured_link_jitter_seconds", "gauge", "Mean difference of a round trip to the next one."
    )
    for one in links:
        speed.add(one.bytes_per_s, node=one.source, to=one.target)
        latency.add(one.latency_s, node=one.source, to=one.target)
        jitter.add(one.jitter_s, node=one.source, to=one.target)
    yield from (speed, latency, jitter)


def _of_allreduces(found: Iterable[AllReduceFigures]) -> Family:
    family = Family(
        "ugro_node_measured_allreduce_seconds", "gauge", "One all-reduce over a set of nodes, the median."
    )
    for one in found:
        family.add(one.seconds, nodes=",".join(sorted(one.nodes)), backend=one.backend, bytes=one.size_bytes)
    return family


def _name(device: DeviceFigures) -> str:
    return "cpu" if device.index is None else str(device.index)

"""How fast nodes are by what was measured, and which are too busy to be measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.features.hardware.model import CpuFigures, DeviceFigures, Mode, NodeFigures
from ugro.features.hardware.rules import Device, busy, estimate, node_speeds
from ugro.features.power.model import OwnerReport, Then, When
from ugro.kernel.links.model import Facts, Gpu, GpuHolder


def node(name: str, *fp16: float, cpu: float = 100.0) -> NodeFigures:
    devices = tuple(
        DeviceFigures(f"{name}-{index}", "RTX 4090", index, fp32_tflops=rate / 4, fp16_tflops=rate)
        for index, rate in enumerate(fp16)
    )
    return NodeFigures(name, "2026-01-01T00:00:00+00:00", Mode.FULL, devices=devices, cpu=CpuFigures(cpu, cpu, 1))


def speeds(*nodes: NodeFigures, without: str = "") -> dict[str, float]:
    gpus = {one.node: tuple(device.uuid for device in one.devices) for one in nodes}
    return node_speeds(gpus, {one.node: one for one in nodes if one.node != without})


def test_a_node_is_as_fast_as_its_slowest_gpu_and_noise_makes_no_difference() -> None:
    found = speeds(node("a", 100.0), node("b", 95.0, 91.0), node("c", 100.0, 50.0))
    assert found["a"] == found["b"] == 1.0
    assert 0.45 < found["c"] < 0.6


def test_nodes_without_gpus_are_compared_among_themselves_by_their_cpus() -> None:
    found = speeds(node("a", 100.0, cpu=1.0), node("b", cpu=300.0), node("c", cpu=100.0))
    assert found["a"] == found["b"] == 1.0
    assert 0.3 < found["c"] < 0.4


def test_if_one_of_them_was_not_measured_none_is_faster() -> None:
    assert set(speeds(node("a", 100.0), node("b", 10.0), node("c", 50.0), without="c").values()) == {1.0}
    assert node_speeds({}, {}) == {}


def test_static_shares_follow_measured_figures_before_the_names_of_models() -> None:
    measured = [node("a", 100.0).devices[0], node("b", 25.0).devices[0]]
    found = estimate([Device("RTX 4090", measured=one) for one in measured])
    assert found.values == (1.0, 0.25)
    assert "measured by ugro node bench (fp16)" in found.source
    unknown = estimate([Device("no such GPU", measured=one) for one in measured])
    assert unknown.values == found.values, "of a model without a figure, too"


def test_static_shares_compare_what_all_devices_have() -> None:
    one, other = node("a", 100.0).devices[0], replace(node("b", 80.0).devices[0], fp16_tflops=None)
    found = estimate([Device("RTX 4090", measured=one), Device("RTX 3090", measured=other)])
    assert found.values == (1.0, 0.8)
    assert "(fp32)" in found.source
    partly = estimate([Device("RTX 4090", measured=one), Device("RTX 3090")])
    assert "vendor figures" in partly.source, "one without measurement: all by their names"


def test_static_shares_of_cpus_are_by_what_was_measured_and_not_by_cores() -> None:
    fast, slow = node("a", cpu=400.0), node("b", cpu=100.0)
    found = estimate([Device(None, 2, "x", None, fast), Device(None, 64, "x", None, slow)])
    assert found.values == (1.0, 0.25)
    with_torch = [replace(one, devices=(DeviceFigures("cpu", "x", fp32_tflops=rate),)) for one, rate in
                  ((fast, 0.5), (slow, 0.4))]  # fmt: skip
    found = estimate([Device(None, 2, "x", None, one) for one in with_torch])
    assert found.values == (1.0, 0.8)


def facts(*gpus: Gpu, cpu: float = 0.1) -> Facts:
    return Facts(0.0, 1.0, (0.0, 0.0, 0.0), cpu, 100, 50, gpus=gpus)


IDLE = Gpu(0, "GPU-0", "RTX", 1000, 40, 0.0)


@pytest.mark.parametrize(
    ("found", "has_jobs", "why"),
    [
        (facts(IDLE), False, None),
        (facts(IDLE), True, "runs a job"),
        (facts(replace(IDLE, use_ratio=0.6)), False, "GPU 0: 60 % in use"),
        (facts(replace(IDLE, memory_used_bytes=400)), False, "40 % of its memory"),
        (facts(replace(IDLE, holder=GpuHolder("a", "n", "7", 1, "ann", 0.0))), False, "job 7 of another agent"),
        (facts(cpu=0.8), False, "CPU: 80 %"),
        (facts(IDLE, replace(IDLE, index=1, use_ratio=None, memory_total_bytes=None)), False, None),
    ],
)
def test_a_node_in_use_is_not_measured(found: Facts, has_jobs: bool, why: str | None) -> None:
    reason = busy(found, has_jobs=has_jobs)
    assert (reason is None) == (why is None)
    assert why is None or why in str(reason)


def test_a_node_whose_owner_is_there_is_not_measured() -> None:
    there = OwnerReport(When.ACTIVE, Then.PAUSE, 600.0, is_there=True, sign="ann types on pts/3")
    assert busy(facts(), there, has_jobs=False) == "is used by its owner (ann types on pts/3)"
    assert busy(facts(), replace(there, is_there=False), has_jobs=False) is None

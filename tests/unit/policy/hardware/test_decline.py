"""When a device counts as slower than it was: above noise, twice in a row, and with a reason to look at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.features.hardware.model import CpuFigures, DeviceFigures, Mode, NodeFigures, StorageFigures, Surroundings
from ugro.features.hardware.rules import judge_figures
from ugro.kernel.agent.model import Finding, Grade


def gpu(bf16: float, **seen: object) -> DeviceFigures:
    return DeviceFigures("GPU-1", "RTX", 0, bf16_tflops=bf16, seen=Surroundings(**seen))  # type: ignore[arg-type]


def of_gpu(bf16: float, **seen: object) -> NodeFigures:
    return NodeFigures("gpu1", "2026-01-01T00:00:00+00:00", Mode.QUICK, devices=(gpu(bf16, **seen),))


def of_cpu(speed: float) -> NodeFigures:
    return NodeFigures("gpu1", "2026-01-01T00:00:00+00:00", Mode.QUICK, cpu=CpuFigures(speed, 4 * speed, 4))


def of_disk(write: float, read: float, *, is_cached: bool = False) -> NodeFigures:
    disk = StorageFigures(write, read, 1000.0, is_cached=is_cached)
    return NodeFigures("gpu1", "2026-01-01T00:00:00+00:00", Mode.QUICK, storage=disk)


def of_sync(fsync_s: float, write: float = 100e6) -> NodeFigures:
    disk = StorageFigures(write, 200e6, 1000.0, fsync_s)
    return NodeFigures("gpu1", "2026-01-01T00:00:00+00:00", Mode.QUICK, storage=disk)


def judged(*newest_first: NodeFigures) -> list[Finding]:
    return judge_figures(newest_first)


def test_a_gpu_that_is_far_below_its_earlier_figures_twice_is_a_finding() -> None:
    [found] = judged(of_gpu(60), of_gpu(55), of_gpu(100), of_gpu(101))
    assert (found.subject, found.check, found.grade) == ("gpu1", "measured", Grade.WARNING)
    assert "GPU 0 bf16: 60 TFLOP/s in the last two measurements, 100 TFLOP/s before" in found.text


@pytest.mark.parametrize(
    "history",
    [
        (60.0,),  # nothing to compare with
        (60.0, 55.0),
        (60.0, 100.0, 100.0),  # once
        (60.0, 95.0, 60.0, 100.0),  # not in a row
        (85.0, 84.0, 100.0),  # noise
        (120.0, 130.0, 100.0),
    ],
)
def test_one_low_run_noise_or_a_better_figure_is_none(history: tuple[float, ...]) -> None:
    assert judged(*map(of_gpu, history)) == []


def test_a_quota_that_makes_a_cpu_swing_by_a_third_is_no_finding_but_half_the_speed_is() -> None:
    assert judged(*map(of_cpu, (70e6, 68e6, 100e6, 97e6, 104e6))) == []
    assert len(judged(*map(of_cpu, (50e6, 52e6, 100e6, 97e6, 104e6)))) == 1


def test_what_was_forced_on_a_busy_node_counts_neither_way() -> None:
    low = replace(of_gpu(50), is_forced=True)
    assert judged(low, low, low, of_gpu(100)) == []
    assert len(judged(low, of_gpu(60), low, of_gpu(60), of_gpu(100))) == 1


def test_the_remedy_names_what_was_seen_while_it_was_slow() -> None:
    [narrow] = judged(of_gpu(60, pcie_width=4, pcie_width_max=16), of_gpu(60), of_gpu(100))
    assert "4 of 16 lanes" in (narrow.remedy or "")
    [hot] = judged(of_gpu(60, throttle=("power", "heat"), temperature_c=91.0), of_gpu(60), of_gpu(100))
    assert "slowed down by heat at 91 °C" in (hot.remedy or "")
    [plain] = judged(of_gpu(60, throttle=("power",)), of_gpu(60), of_gpu(100))
    assert "nvidia-smi" in (plain.remedy or ""), "that it reaches its power limit under load is no news"


def test_a_dying_disk_is_named_and_reads_from_a_cache_are_not_compared() -> None:
    [found] = judged(of_disk(100e6, 20e6), of_disk(100e6, 21e6), of_disk(100e6, 200e6))
    assert "storage reads" in found.text
    assert "smartctl" in (found.remedy or "")
    cached = of_disk(100e6, 9e9, is_cached=True)
    assert judged(of_disk(100e6, 200e6), of_disk(100e6, 200e6), cached, cached) == []


def test_a_disk_whose_small_fsyncs_take_far_longer_is_named_although_it_reads_and_writes_as_before() -> None:
    [found] = judged(*map(of_sync, (0.5, 0.4, 0.005, 0.006, 0.004)))
    assert "small fsyncs: 2.5/s in the last two measurements, 200/s before" in found.text
    assert "smartctl" in (found.remedy or "")
    [together] = judged(of_sync(0.5, 10e6), of_sync(0.5, 10e6), of_sync(0.005))
    assert "small fsyncs" in together.text, "the worst comes first"
    assert "1 more figures are low" in together.text, "one disk, one finding"


@pytest.mark.parametrize(
    "history",
    [
        (0.060, 0.070, 0.020, 0.025),  # a busy disk: three times as long
        (0.010, 0.012, 0.0001, 0.0001),  # a cache that was switched off: not long at all
        (0.5, 0.005, 0.005),  # once
        (0.005, 0.005, 0.5),  # better
        (0.001, 0.001, 0.0),  # no clock says so
    ],
)
def test_noise_of_fsyncs_and_those_that_are_still_quick_are_no_finding(history: tuple[float, ...]) -> None:
    assert judged(*map(of_sync, history)) == []


def test_figures_of_one_device_are_one_finding() -> None:
    low, high = of_gpu(60), of_gpu(100)
    both = [replace(run, devices=(replace(run.devices[0], fp32_tflops=speed),))
            for run, speed in ((low, 10.0), (low, 10.0), (high, 40.0))]  # fmt: skip
    [found] = judge_figures(both)
    assert "GPU 0 fp32" in found.text, "the worst comes first"
    assert "1 more figures are low" in found.text

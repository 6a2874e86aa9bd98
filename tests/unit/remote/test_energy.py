"""Joules from counters and from power, whatever the readings are cut into; and the counters of CPU packages."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.training.on_node import CpuMeter, EnergyMeter, Reading, packages

GAP_S = 10.0
_TIMES = st.lists(st.floats(0.01, 9.0), min_size=1, max_size=30)


def metered(*readings: Reading, wraps_at_j: float | None = None) -> EnergyMeter:
    meter = EnergyMeter(GAP_S, wraps_at_j)
    for reading in readings:
        meter.add(reading)
    return meter


def test_power_is_a_straight_line_between_two_readings() -> None:
    meter = metered(Reading(0.0, power_w=100.0), Reading(4.0, power_w=200.0), Reading(5.0, power_w=200.0))
    assert (meter.joules, meter.measured_s, meter.source) == (800.0, 5.0, "power")


@given(_TIMES, st.floats(0.0, 500.0), st.floats(-10.0, 10.0))
def test_more_readings_of_the_same_power_give_the_same_energy(steps: list[float], first_w: float, slope: float) -> None:
    """On a straight line nothing is lost between two readings, however many there are."""
    ends = [sum(steps[:at]) for at in range(len(steps) + 1)]
    halves = [ends[0], *(time for a, b in pairwise(ends) for time in ((a + b) / 2, b))]
    coarse, fine = (metered(*(Reading(at, power_w=first_w + slope * at) for at in times)) for times in (ends, halves))
    assert fine.joules == pytest.approx(coarse.joules, rel=1e-9, abs=1e-6)
    assert fine.measured_s == pytest.approx(coarse.measured_s)


@given(_TIMES, st.integers(0, 10**9))
def test_a_counter_misses_nothing_however_seldom_it_is_read(used: list[float], first: int) -> None:
    counts = [first + sum(used[:at]) for at in range(len(used) + 1)]
    often = metered(*(Reading(float(at), count) for at, count in enumerate(counts)))
    seldom = metered(Reading(0.0, counts[0]), Reading(float(len(used)), counts[-1]))
    assert often.joules == pytest.approx(seldom.joules, rel=1e-9, abs=1e-5)
    assert often.measured_s == seldom.measured_s == len(used)
    assert often.source == "counter"


@given(st.lists(st.floats(0.0, 99.0), min_size=1, max_size=30))
def test_a_counter_that_wraps_goes_on(used: list[float]) -> None:
    counts = [sum(used[:at]) % 100.0 for at in range(len(used) + 1)]
    meter = metered(*(Reading(float(at), count) for at, count in enumerate(counts)), wraps_at_j=100.0)
    assert meter.joules == pytest.approx(sum(used), abs=1e-6)


def test_a_gap_is_not_filled_and_not_counted_as_measured() -> None:
    meter = metered(*(Reading(at, power_w=50.0) for at in (0.0, 5.0, 5.1 + GAP_S, 6.1 + GAP_S)))
    assert meter.joules == pytest.approx(50.0 * 6)
    assert meter.measured_s == pytest.approx(6.0)


def test_a_counter_that_began_again_claims_nothing_for_that_time() -> None:
    """After its driver was loaded again: how much it had counted by then is not known."""
    meter = metered(Reading(0.0, 500.0), Reading(1.0, 600.0), Reading(2.0, 3.0), Reading(3.0, 13.0))
    assert (meter.joules, meter.measured_s) == (110.0, 2.0)
    by_power = metered(Reading(0.0, 500.0, 40.0), Reading(1.0, 3.0, 60.0), Reading(2.0, 63.0, 60.0))
    assert (by_power.joules, by_power.source) == (110.0, "counter and power"), "but by its power, if that is read"


def test_what_cannot_be_read_is_not_claimed() -> None:
    meter = metered(Reading(0.0), Reading(1.0, power_w=10.0), Reading(2.0), Reading(3.0, power_w=10.0))
    assert (meter.joules, meter.measured_s, meter.source) == (0.0, 0.0, None)
    assert metered(Reading(0.0, 5.0)).source is None


# --- CPU packages -------------------------------------------------------------------------------------------------


def zone(folder: Path, name: str, kind: str, microjoules: int, wraps_at: int = 262_143_328_850) -> Path:
    made = folder / name
    made.mkdir(parents=True, exist_ok=True)
    (made / "name").write_text(kind + "\n")
    (made / "energy_uj").write_text(f"{microjoules}\n")
    (made / "max_energy_range_uj").write_text(f"{wraps_at}\n")
    return made


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UGRO_POWERCAP", str(tmp_path))
    return tmp_path


def test_all_packages_of_a_machine_are_counted_and_their_parts_are_not(powercap: Path) -> None:
    first, second = zone(powercap, "intel-rapl:0", "package-0", 0), zone(powercap, "intel-rapl:1", "package-1", 10**6)
    zone(powercap, "intel-rapl:0:0", "core", 0)
    zone(powercap, "intel-rapl:2", "psys", 0)
    (powercap / "intel-rapl").mkdir()
    cpu = CpuMeter(share=0.5)
    assert cpu
    cpu.read(0.0)
    (first / "energy_uj").write_text("30000000\n")
    (second / "energy_uj").write_text("11000000\n")
    cpu.read(2.0)
    assert (cpu.joules, cpu.measured_s, cpu.source) == (20.0, 2.0, "counter"), "half of 30 and 10 joules"


def test_a_package_that_wraps_goes_on(powercap: Path) -> None:
    made = zone(powercap, "intel-rapl:0", "package-0", 9_000_000, wraps_at=10_000_000)
    cpu = CpuMeter()
    cpu.read(0.0)
    (made / "energy_uj").write_text("1000000\n")
    cpu.read(1.0)
    assert cpu.joules == 2.0


def test_counters_that_this_user_may_not_read_are_none(powercap: Path) -> None:
    zone(powercap, "intel-rapl:0", "package-0", 0)
    (powercap / "intel-rapl:0" / "energy_uj").unlink()
    (powercap / "intel-rapl:0" / "energy_uj").mkdir()  # root may read any file
    assert packages() == []
    assert not CpuMeter()


def test_a_machine_without_counters_has_none(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UGRO_POWERCAP", str(powercap / "nowhere"))
    assert packages() == []

"""What a job used, by device, rank and epoch, and which device is not worth its energy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.rig.training import Pretend
from ugro.features.training.model import DeviceSum, EnergySample, FindingKind, JobProfile
from ugro.features.training.rules_energy import (
    EpochMark,
    NodePart,
    Price,
    epoch_marks,
    job_energy,
    joules_at,
    watts,
    with_energy,
)
from ugro.features.training.rules_profile import alternatives, profile
from ugro.kernel.telemetry.records import PipelineRecord, Training, read
from ugro.train.rules.shares import Mode

BEGAN_S = 1_000.0
FREE = Price()


def steady(seconds: float, measured: float = 1.0, every_s: float = 10.0, **powers: float) -> list[EnergySample]:
    """Devices that draw the same all the time, each measured for that share of it."""
    times = [at * every_s for at in range(1, int(seconds / every_s) + 1)] or [seconds]

    def sums(at: float) -> dict[str, DeviceSum]:
        return {name: DeviceSum(power * at * measured, at * measured, "counter") for name, power in powers.items()}

    return [EnergySample(at, BEGAN_S + at, sums(at)) for at in times]


def part(
    node: str, samples: list[EnergySample], ranks: tuple[int, ...] = (0,), gpus: tuple[int, ...] = (0,)
) -> NodePart:
    return NodePart(node, ranks, gpus, samples)


def test_a_job_is_charged_what_all_its_devices_used_in_all_attempts() -> None:
    parts = [part("gpu1", steady(3600, gpu0=100.0)), part("gpu2", steady(3600, gpu0=50.0), ranks=(1,))]
    found = job_energy(2, parts, before_j=36_000.0, price=Price(0.30, "EUR"))
    assert found is not None
    assert found.wh == pytest.approx(160.0)
    assert found.cost == pytest.approx(0.16 * 0.30)
    assert (found.currency, found.measured_share, found.attempt) == ("EUR", 1.0, 2)
    assert found.words == "160 Wh, 0.05 EUR (GPUs)"
    assert [(one.rank, one.node) for one in found.ranks] == [(0, "gpu1"), (1, "gpu2")]
    assert [one.joules for one in found.ranks] == pytest.approx([360_000, 180_000])


def test_without_a_price_there_is_no_cost() -> None:
    found = job_energy(1, [part("gpu1", steady(60, gpu0=60.0))], 0.0, FREE)
    assert found is not None
    assert (found.cost, found.currency) == (None, None)
    assert found.words == "1.00 Wh (GPUs)"


def test_where_nothing_can_be_read_nothing_is_claimed() -> None:
    assert job_energy(1, [part("gpu1", [])], 0.0, FREE) is None
    assert job_energy(1, [], 0.0, FREE) is None
    assert job_energy(1, [part("gpu1", [EnergySample(5.0, BEGAN_S, {})])], 0.0, FREE) is None


def test_gaps_and_devices_that_are_not_read_are_said() -> None:
    found = job_energy(1, [part("gpu1", steady(100, measured=0.92, gpu0=10.0))], 0.0, FREE)
    assert found is not None
    assert found.words.endswith("(GPUs; measured for 92 % of the time)")
    both = [part("gpu1", steady(100, gpu0=10.0)), part("gpu2", [], ranks=(1,))]
    found = job_energy(1, both, 0.0, FREE)
    assert found is not None
    assert found.measured_share == pytest.approx(0.5), "of the second node nothing is known"


def test_each_rank_has_its_own_gpu_and_an_equal_part_of_the_cpu() -> None:
    samples = steady(10, gpu0=30.0, gpu2=10.0, cpu=20.0)
    found = job_energy(1, [part("gpu1", samples, ranks=(4, 5), gpus=(2, 0))], 0.0, FREE)
    assert found is not None
    assert [(one.rank, one.joules, one.is_shared) for one in found.ranks] == [(4, 200.0, True), (5, 400.0, True)]
    assert {one.device: one.ranks for one in found.devices} == {"gpu0": (5,), "gpu2": (4,), "cpu": (4, 5)}
    assert "GPUs and CPU" in found.words


def test_ranks_that_share_gpus_share_their_energy_equally() -> None:
    found = job_energy(1, [part("gpu1", steady(10, gpu0=30.0, gpu1=10.0), ranks=(0,), gpus=(0, 1))], 0.0, FREE)
    assert found is not None
    assert [one.joules for one in found.ranks] == [400.0]
    found = job_energy(1, [part("gpu1", steady(10, gpu0=30.0), ranks=(0, 1, 2))], 0.0, FREE)
    assert found is not None
    assert [(one.joules, one.is_shared) for one in found.ranks] == [(100.0, True)] * 3


def test_between_two_samples_energy_is_on_a_straight_line() -> None:
    samples = steady(100, gpu0=10.0)
    assert joules_at(samples, BEGAN_S) == 0.0
    assert joules_at(samples, BEGAN_S + 5) == pytest.approx(50.0), "before the first sample, too"
    assert joules_at(samples, BEGAN_S + 55) == pytest.approx(550.0)
    assert joules_at(samples, BEGAN_S + 1e6) == 1000.0
    assert joules_at(samples, BEGAN_S - 50) == 0.0


def test_epochs_add_up_to_what_was_used_until_the_last_one() -> None:
    parts = [part("gpu1", steady(100, gpu0=10.0)), part("gpu2", steady(100, gpu0=5.0), ranks=(1,))]
    marks = [EpochMark(0, BEGAN_S + 30), EpochMark(1, BEGAN_S + 70), EpochMark(2, BEGAN_S + 100)]
    found = job_energy(1, parts, 0.0, FREE, marks)
    assert found is not None
    assert [(one.epoch, one.seconds) for one in found.epochs] == [(0, 30.0), (1, 40.0), (2, 30.0)]
    assert [one.joules for one in found.epochs] == pytest.approx([450.0, 600.0, 450.0])
    assert sum(one.joules for one in found.epochs) == pytest.approx(found.joules)


class Counted(Sequence[EnergySample]):
    """May be looked at that often."""

    def __init__(self, samples: list[EnergySample], most_looks: int) -> None:
        self._looks_left = most_looks
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, at: Any) -> Any:
        self._looks_left -= 1
        assert self._looks_left >= 0
        return self._samples[at]


def test_many_epochs_of_a_long_job_are_found_without_looking_at_all_samples_for_each() -> None:
    marks = [EpochMark(number, BEGAN_S + 2 * (number + 1)) for number in range(20_000)]
    samples = Counted(steady(40_000, gpu0=10.0), 10 * 4_000 + 20 * len(marks))
    found = job_energy(1, [NodePart("gpu1", (0,), (0,), samples)], 0.0, FREE, marks)
    assert found is not None
    assert [one.epoch for one in found.epochs] == list(range(10_000, 20_000)), "the last ones"
    assert {round(one.joules, 3) for one in found.epochs} == {20.0}, "an epoch of 2 s, the first of these, too"


def test_a_node_whose_clock_does_not_fit_has_no_epochs() -> None:
    hour_off = [replace(one, time_s=one.time_s + 3600) for one in steady(100, gpu0=5.0)]
    parts = [part("gpu1", steady(100, gpu0=10.0)), part("gpu2", hour_off, ranks=(1,))]
    found = job_energy(1, parts, 0.0, FREE, [EpochMark(0, BEGAN_S + 30)])
    assert found is not None
    assert found.epochs == ()


def test_a_clock_that_was_set_tells_nothing_of_epochs_and_of_power() -> None:
    early, late = steady(100, gpu0=10.0)[:5], steady(100, gpu0=10.0)[5:]
    parts = [part("gpu1", [*early, *(replace(one, time_s=one.time_s - 20) for one in late)])]
    found = job_energy(1, parts, 0.0, FREE, [EpochMark(0, BEGAN_S + 30)])
    assert found is not None
    assert (found.joules, found.epochs) == (1000.0, ())
    assert watts(parts, BEGAN_S + 10, BEGAN_S + 40) == {}


def test_the_last_record_of_an_epoch_ends_it() -> None:
    marks = epoch_marks([10, 20, 30, 40, 0, 50], [0.0, 0.0, 0.5, 1.0, 7.0, float("nan")])
    assert marks == [EpochMark(0, 30), EpochMark(1, 40)]


# --- how well it is used ------------------------------------------------------------------------------------------


def profiled(pretend: Pretend, steps: int = 60) -> tuple[JobProfile, Training]:
    training = read(pretend.run(steps))
    found = profile(training, 1)
    assert found is not None
    return found, training


def test_the_power_of_each_node_is_that_of_the_steps() -> None:
    parts = [part("gpu0", steady(100, gpu0=80.0, gpu3=20.0), gpus=(3, 0)), part("gpu1", [], ranks=(1,))]
    assert watts(parts, BEGAN_S + 20, BEGAN_S + 60) == {"gpu0": [pytest.approx(20.0), pytest.approx(80.0)]}
    assert watts(parts, BEGAN_S + 60, BEGAN_S + 60) == {}


def test_steps_that_are_newer_than_the_last_report_are_taken_as_those_before() -> None:
    """In a long run a line is written once a minute, and a few steps may all be newer."""
    parts = [part("gpu0", steady(3600, every_s=60.0, gpu0=80.0))]
    assert watts(parts, BEGAN_S + 3610, BEGAN_S + 3620) == {"gpu0": [pytest.approx(80.0)]}
    assert watts(parts, BEGAN_S + 4000, BEGAN_S + 4010) == {}, "but not long after it"


def test_samples_per_joule_of_each_device_and_of_all() -> None:
    found, _ = profiled(Pretend([0.001, 0.002]))
    measured = with_energy(found, {"gpu0": [100.0], "gpu1": [50.0]})
    first, second = measured.ranks
    assert (first.watts, second.watts, measured.watts) == (100.0, 50.0, 150.0)
    assert first.samples_per_joule == pytest.approx(first.samples / (100 * found.step_s))
    assert measured.samples_per_joule == pytest.approx(96 / (150 * found.step_s))


def test_where_a_device_is_not_read_nothing_is_said_of_all() -> None:
    found, training = profiled(Pretend([0.001, 0.002]))
    others = alternatives(found, training)
    measured = with_energy(found, {"gpu0": [100.0]}, others.without_s, others.whole_s)
    assert measured.ranks[0].samples_per_joule is not None
    assert (measured.ranks[1].watts, measured.watts, measured.samples_per_joule) == (None, None, None)
    assert measured.findings == found.findings


def test_a_device_that_adds_little_speed_for_much_energy_is_named() -> None:
    found, training = profiled(Pretend([0.001, 0.012]))
    others = alternatives(found, training)
    measured = with_energy(found, {"gpu0": [100.0], "gpu1": [90.0]}, others.without_s, others.whole_s)
    last = measured.findings[-1]
    assert (last.kind, last.ranks) == (FindingKind.ENERGY, (1,))
    assert last.words.startswith("gpu1 adds ")
    assert "% speed for 47 % of the energy: without it, a joule would do 1." in last.words
    assert last.remedy == "if energy matters more than time, launch it without gpu1"
    assert measured.verdict == found.verdict, "what costs time comes first"
    together = replace(found, ranks=tuple(replace(one, node=f"box:{one.rank}") for one in found.ranks))
    last = with_energy(together, {"box": [100.0, 90.0]}, others.without_s, others.whole_s).findings[-1]
    assert last.remedy.endswith("launch it without box:1"), "the node has another rank"


def test_a_device_whose_marginal_samples_per_joule_are_negative_is_named() -> None:
    """Its fixed time alone is more than the other needs for the whole batch."""
    found, training = profiled(Pretend([0.001, 0.001], fixed_s=[0.0, 0.3], mode=Mode.ADAPTIVE))
    others = alternatives(found, training)
    assert others.without_s[1] is not None
    assert others.without_s[1] < others.whole_s
    last = with_energy(found, {"gpu0": [100.0], "gpu1": [5.0]}, others.without_s, others.whole_s).findings[-1]
    assert last.kind is FindingKind.ENERGY
    assert last.words.startswith("gpu1 makes it slower, with 5 % of the energy: without it, a joule would do ")


def test_every_device_whose_marginal_samples_per_joule_are_negative_is_named() -> None:
    found, _ = profiled(Pretend([0.001] * 5))
    powers = {f"gpu{rank}": [power] for rank, power in enumerate((100.0, 5.0, 10.0, 100.0, 90.0))}
    # Without the second or the third one steps are shorter; without one of the last two hardly longer.
    measured = with_energy(found, powers, [0.2, 0.099, 0.09, 0.101, 0.101], 0.1)
    named = [one for one in measured.findings if one.kind is FindingKind.ENERGY]
    assert [one.ranks for one in named] == [(2, 1), (3,)], "and the worst of those that add something"
    assert named[0].words == (
        "each of gpu2 and gpu1 makes it slower, with 5 % of the energy together: "
        "without gpu2, a joule would do 1.15 times as much"
    )
    assert named[0].remedy == "launch it without gpu2, and look again"
    assert named[1].words.startswith("gpu3 adds 1 % speed for 33 % of the energy: ")


def test_ranks_of_a_pipeline_have_no_samples_of_their_own() -> None:
    found, training = profiled(Pretend([0.001, 0.012]))
    training.pipeline = PipelineRecord((1, 0), (8, 4), 8, 0.1, 0.11, "gpu1 computes longest")
    found = replace(found, pipeline=training.pipeline)
    others = alternatives(found, training)
    measured = with_energy(found, {"gpu0": [100.0], "gpu1": [90.0]}, others.without_s, others.whole_s)
    assert [rank.watts for rank in measured.ranks] == [100.0, 90.0]
    assert [rank.samples_per_joule for rank in measured.ranks] == [None, None]
    assert measured.samples_per_joule == pytest.approx(96 / (190 * found.step_s))
    assert measured.findings == found.findings, "none can be left out: each has layers"


def test_nothing_is_said_of_leaving_out_a_rank_of_local_sgd() -> None:
    found, training = profiled(Pretend([0.001, 0.012]))
    assert alternatives(found, training).without_s
    assert training.run is not None
    training.run = replace(training.run, is_local=True)
    assert not alternatives(found, training).without_s


def test_devices_that_are_worth_their_energy_are_not_named() -> None:
    found, training = profiled(Pretend([0.001, 0.002]))
    others = alternatives(found, training)
    measured = with_energy(found, {"gpu0": [100.0], "gpu1": [50.0]}, others.without_s, others.whole_s)
    assert FindingKind.ENERGY not in [one.kind for one in measured.findings]


def test_ranks_of_one_node_take_its_gpus_in_order_or_share_them() -> None:
    found, _ = profiled(Pretend([0.001] * 3, names=("gpu0:0", "gpu0:1", "gpu1")))
    measured = with_energy(found, {"gpu0": [10.0, 30.0], "gpu1": [20.0, 20.0]})
    assert [rank.watts for rank in measured.ranks] == [10.0, 30.0, 40.0]

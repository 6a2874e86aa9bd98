from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.health.rules_score import Verdict, assess, status_of
from ugro.kernel.links.model import Disk, Facts, Gpu, LinkQuality, Reason, Status
from ugro.kernel.links.rules import gpu_changes

GB = 1000**3
FINE = Facts(
    time_unix=0.0,
    uptime_s=1.0,
    load=(0.0, 0.0, 0.0),
    cpu_use_ratio=0.1,
    memory_total_bytes=100 * GB,
    memory_available_bytes=50 * GB,
)
GOOD_LINK = LinkQuality(rtt_s=0.001)


def gpu(
    index: int = 1,
    *,
    temperature_c: float | None = 60,
    used_percent: float | None = 50,
    error: str | None = None,
) -> Gpu:
    used = None if used_percent is None else round(used_percent * GB / 10)
    return Gpu(index, f"GPU-{index}", "RTX 3070 Ti", 10 * GB, used, temperature_c=temperature_c, error=error)


def disk(used_percent: float, mount: str = "/") -> Disk:
    return Disk(mount, 1000 * GB, round((100 - used_percent) * 10 * GB))


def with_gpus(*gpus: Gpu) -> Facts:
    return replace(FINE, gpus=gpus)


def with_memory(used_percent: float) -> Facts:
    return replace(FINE, memory_available_bytes=round((100 - used_percent) * GB))


def with_disks(*disks: Disk) -> Facts:
    return replace(FINE, disks=disks)


def texts(verdict: Verdict) -> list[str]:
    return [reason.text for reason in verdict.reasons]


def test_a_node_with_nothing_wrong_has_every_point_and_no_reason() -> None:
    assert assess(with_gpus(gpu()), GOOD_LINK) == Verdict(100, Status.HEALTHY)


def test_a_node_without_gpus_keeps_the_points_of_its_gpus() -> None:
    assert assess(FINE, GOOD_LINK).score == 100


def test_what_is_not_known_costs_nothing() -> None:
    assert assess(with_gpus(gpu(temperature_c=None, used_percent=None)), LinkQuality()).score == 100


@pytest.mark.parametrize(
    ("facts", "score", "reason"),
    [
        (with_gpus(gpu(temperature_c=80)), 100, None),
        (with_gpus(gpu(temperature_c=81)), 84, "GPU 1 RTX 3070 Ti is at 81 °C"),
        (with_gpus(gpu(temperature_c=85)), 84, "GPU 1 RTX 3070 Ti is at 85 °C"),
        (with_gpus(gpu(temperature_c=86)), 60, "GPU 1 RTX 3070 Ti is at 86 °C"),
        (with_gpus(gpu(used_percent=90)), 100, None),
        (with_gpus(gpu(used_percent=91)), 92, "GPU 1 RTX 3070 Ti has 91 % of its memory used"),
        (with_gpus(gpu(used_percent=95)), 92, "GPU 1 RTX 3070 Ti has 95 % of its memory used"),
        (with_gpus(gpu(used_percent=96)), 84, "GPU 1 RTX 3070 Ti has 96 % of its memory used"),
        (with_gpus(gpu(error="lost")), 60, "GPU 1 RTX 3070 Ti cannot be read: lost"),
        (replace(FINE, gpu_error="driver mismatch"), 80, "GPUs cannot be read: driver mismatch"),
        (with_memory(90), 100, None),
        (with_memory(90.4), 88, "memory is 90.4 % used"),
        (with_memory(93), 88, "memory is 93 % used"),
        (with_memory(95), 88, "memory is 95 % used"),
        (with_memory(96), 70, "memory is 96 % used"),
        (with_disks(disk(90)), 100, None),
        (with_disks(disk(91)), 88, "disk / is 91 % full"),
        (with_disks(disk(95)), 88, "disk / is 95 % full"),
        (with_disks(disk(96)), 70, "disk / is 96 % full"),
    ],
)
def test_each_limit_of_the_machine_takes_its_points_only_when_passed(
    facts: Facts, score: int, reason: str | None
) -> None:
    verdict = assess(facts, GOOD_LINK)
    assert verdict.score == score
    assert texts(verdict) == ([] if reason is None else [reason])


@pytest.mark.parametrize(
    ("link", "score", "reason"),
    [
        (LinkQuality(rtt_s=0.050), 100, None),
        (LinkQuality(rtt_s=0.0505), 90, "network latency is 50.5 ms"),
        (LinkQuality(rtt_s=0.100), 90, "network latency is 100 ms"),
        (LinkQuality(rtt_s=0.120), 80, "network latency is 120 ms"),
        (LinkQuality(loss_ratio=0.05), 100, None),
        (LinkQuality(loss_ratio=0.10), 90, "10 % of keepalives went unanswered"),
        (LinkQuality(loss_ratio=0.20), 90, "20 % of keepalives went unanswered"),
        (LinkQuality(loss_ratio=0.25), 80, "25 % of keepalives went unanswered"),
    ],
)
def test_each_limit_of_the_network_takes_its_points_only_when_passed(
    link: LinkQuality, score: int, reason: str | None
) -> None:
    verdict = assess(FINE, link)
    assert verdict.score == score
    assert texts(verdict) == ([] if reason is None else [reason])


def test_little_room_for_jobs_takes_points_however_large_the_disk_is() -> None:
    """28 MB of 100 are 72 percent, and no job can start there any more."""
    mib = 2**20
    small = with_disks(Disk("/root/grid_workspace", 100 * mib, 28 * mib), disk(10))
    assert assess(small, GOOD_LINK) == Verdict(
        70, Status.DEGRADED, (Reason("system", "disk /root/grid_workspace has 28.0 MiB left", 30.0),)
    )
    assert assess(with_disks(Disk("/data", 10_000 * mib, 1000 * mib)), GOOD_LINK).score == 88
    assert assess(with_disks(disk(10), Disk("/", 100 * mib, 28 * mib)), GOOD_LINK).score == 100, "jobs do not use it"


def test_ranks_that_should_run_and_do_not_take_the_points_of_the_processes() -> None:
    verdict = assess(FINE, GOOD_LINK, ranks_expected=2)
    assert verdict.reasons == (Reason("processes", "no rank process is running, 2 expected", 10),)
    assert verdict.score == 90
    assert assess(replace(FINE, rank_processes=1), GOOD_LINK, ranks_expected=2).score == 100


def test_a_node_that_reports_runs_which_it_was_not_given_shows_it() -> None:
    verdict = assess(FINE, GOOD_LINK, strange_runs="reports runs that were never placed there: no job 7")
    assert verdict.reasons == (Reason("system", "reports runs that were never placed there: no job 7", 12.0),)
    assert verdict.status is Status.HEALTHY


def test_only_the_worst_of_several_gpus_counts_and_the_others_are_counted_in_words() -> None:
    hot = with_gpus(gpu(0, temperature_c=81), gpu(1, temperature_c=84), gpu(2), gpu(3, temperature_c=82))
    verdict = assess(hot, GOOD_LINK)
    assert verdict.score == 84
    assert texts(verdict) == ["GPU 1 RTX 3070 Ti is at 84 °C, and 2 more"]


def test_different_troubles_of_one_part_add_up() -> None:
    verdict = assess(with_gpus(gpu(temperature_c=82, used_percent=92)), GOOD_LINK)
    assert verdict.score == 100 - 16 - 8


def test_a_part_never_loses_more_than_it_has() -> None:
    verdict = assess(with_gpus(gpu(temperature_c=90, used_percent=99)), GOOD_LINK)
    assert verdict.score == 60
    assert [reason.points for reason in verdict.reasons] == [40, 0]


def test_the_worst_reason_comes_first() -> None:
    facts = replace(with_memory(93), gpus=(gpu(temperature_c=86),), disks=(disk(99, "/data"),))
    verdict = assess(facts, LinkQuality(rtt_s=0.06), ranks_expected=1)
    assert [(reason.part, reason.points) for reason in verdict.reasons] == [
        ("gpu", 40),
        ("system", 30),
        ("network", 10),
        ("processes", 10),
        ("system", 0),
    ]
    assert verdict.status is Status.UNHEALTHY


@pytest.mark.parametrize(
    ("score", "status"),
    [
        (100, Status.HEALTHY),
        (80, Status.HEALTHY),
        (79, Status.DEGRADED),
        (60, Status.DEGRADED),
        (59, Status.UNHEALTHY),
        (0, Status.UNHEALTHY),
    ],
)
def test_the_status_follows_from_the_score(score: int, status: Status) -> None:
    assert status_of(score) is status


def test_everything_wrong_leaves_nothing() -> None:
    facts = replace(with_memory(99), gpus=(gpu(error="lost"),))
    verdict = assess(facts, LinkQuality(rtt_s=1, loss_ratio=1), ranks_expected=1)
    assert (verdict.score, verdict.status) == (0, Status.UNHEALTHY)


percents = st.floats(min_value=0, max_value=100)
temperatures = st.none() | st.floats(min_value=-20, max_value=150)
errors = st.none() | st.just("lost")
gpus = st.builds(
    gpu, st.integers(0, 7), temperature_c=temperatures, used_percent=st.none() | percents, error=errors
)
all_facts = st.builds(
    lambda memory, disks, gpus, error, ranks: replace(
        with_memory(memory), disks=tuple(disks), gpus=tuple(gpus), gpu_error=error, rank_processes=ranks
    ),
    percents,
    st.lists(st.builds(disk, percents), max_size=3),
    st.lists(gpus, max_size=4),
    errors,
    st.integers(0, 2),
)
links = st.builds(LinkQuality, rtt_s=st.none() | st.floats(0, 10), loss_ratio=st.floats(0, 1))
rank_counts = st.integers(0, 4)


@given(all_facts, links, rank_counts)
def test_the_reasons_account_for_every_missing_point(facts: Facts, link: LinkQuality, ranks: int) -> None:
    verdict = assess(facts, link, ranks_expected=ranks)
    points = [reason.points for reason in verdict.reasons]
    assert 0 <= verdict.score <= 100
    assert verdict.score == 100 - sum(points)
    assert points == sorted(points, reverse=True)
    assert verdict.status is status_of(verdict.score)


@given(all_facts, links, st.floats(-20, 150), st.floats(0, 100))
def test_a_hotter_gpu_never_raises_the_score(facts: Facts, link: LinkQuality, c: float, more: float) -> None:
    cool = replace(facts, gpus=(*facts.gpus, gpu(temperature_c=c)))
    hot = replace(facts, gpus=(*facts.gpus, gpu(temperature_c=c + more)))
    assert assess(hot, link).score <= assess(cool, link).score


@given(all_facts, links, percents, percents)
def test_a_fuller_disk_never_raises_the_score(facts: Facts, link: LinkQuality, a: float, b: float) -> None:
    emptier = replace(facts, disks=(*facts.disks, disk(min(a, b))))
    fuller = replace(facts, disks=(*facts.disks, disk(max(a, b))))
    assert assess(fuller, link).score <= assess(emptier, link).score


@given(all_facts, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_worse_network_never_raises_the_score(
    facts: Facts, rtt_s: float, slower_s: float, loss: float, more_loss: float
) -> None:
    better = LinkQuality(rtt_s, loss)
    worse = LinkQuality(rtt_s + slower_s, min(1.0, loss + more_loss))
    assert assess(facts, worse).score <= assess(facts, better).score


@given(all_facts, links, gpus)
def test_one_more_gpu_never_raises_the_score(facts: Facts, link: LinkQuality, extra: Gpu) -> None:
    assert assess(replace(facts, gpus=(*facts.gpus, extra)), link).score <= assess(facts, link).score


def test_a_hundred_nodes_are_judged_in_milliseconds() -> None:
    troubled = replace(with_memory(93), gpus=tuple(gpu(index, temperature_c=86) for index in range(8)))
    begun = time.process_time()
    for _ in range(100):
        assess(troubled, GOOD_LINK, ranks_expected=1)
    assert time.process_time() - begun < 0.05


def test_gpus_that_vanish_or_appear_are_named_once() -> None:
    two, first = with_gpus(gpu(0), gpu(1)), with_gpus(gpu(0))
    assert gpu_changes(two, two) == []
    assert gpu_changes(two, first) == ["GPU 1 RTX 3070 Ti vanished; it has 1 GPU now"]
    assert gpu_changes(first, two) == ["GPU 1 RTX 3070 Ti appeared; it has 2 GPUs now"]
    assert gpu_changes(two, FINE) == ["GPU 0 RTX 3070 Ti and GPU 1 RTX 3070 Ti vanished; it has no GPU now"]
    moved = with_gpus(replace(gpu(1), index=0))
    assert gpu_changes(two, moved) == ["GPU 0 RTX 3070 Ti vanished; it has 1 GPU now"], "the other has its index now"
    assert gpu_changes(two, replace(FINE, gpu_error="the driver hangs")) == []

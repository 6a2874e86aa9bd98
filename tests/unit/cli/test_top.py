"""What ``ugro top`` draws."""

from __future__ import annotations

import pytest

from ugro.cli.output import Output
from ugro.cli.top.view import Seen, headline, lines, spark
from ugro.core.job import Job, JobSpec, JobState, Placement, Share
from ugro.core.node import Facts, Gpu, NodeReport, Status


def report(name: str, *gpus: Gpu, cpu: float | None = 0.1, error: str | None = None) -> NodeReport:
    facts = Facts(0.0, 0.0, (1.0, 1.0, 1.0), cpu, 100, 80, gpus=gpus)
    if error:
        return NodeReport(name, Status.UNREACHABLE, 0, error=error)
    return NodeReport(name, Status.HEALTHY, 100, facts=facts)


def gpu(index: int, use: float | None, used: int | None = 2, total: int | None = 8, heat: float | None = 50.0) -> Gpu:
    gib = 2**30
    sizes = (total * gib if total is not None else None, used * gib if used is not None else None)
    return Gpu(index, f"uuid{index}", "NVIDIA GeForce RTX 3070 Ti", *sizes, use, heat, 100.0)


def drawn(*nodes: NodeReport, sort: str = "name") -> list[str]:
    return lines(Output(), Seen("home", nodes, (), ()), sort)


def test_a_node_has_a_line_for_each_gpu_and_its_name_once() -> None:
    shown = drawn(report("gpu1", gpu(0, 0.5), gpu(1, 1.0)))
    assert "gpu1" in shown[1]
    assert "0 RTX 3070 Ti  ████      50%" in shown[1]
    assert "gpu1" not in shown[2]
    assert "1 RTX 3070 Ti  ████████ 100%" in shown[2]
    assert "██        25%" in shown[2]


def job(number: int, state: JobState, *gpus: int) -> Job:
    spec, placement = JobSpec(f"job{number}", ("x",)), Placement((Share("gpu1", gpus),))
    return Job(number, spec, "ann", state, "", "2026-01-01T00:00:00Z", placement=placement)


def test_a_job_is_shown_beside_the_gpus_that_it_holds_and_no_others() -> None:
    jobs = (
        job(1, JobState.RUNNING, 1),
        job(2, JobState.RECOVERING, 0),  # its last attempt had it
        job(3, JobState.STOPPING, 0, 2),
        job(4, JobState.RUNNING),
    )
    nodes = (report("gpu1", gpu(0, 0.5), gpu(1, 1.0), gpu(2, 1.0)),)
    first, second, third = lines(Output(), Seen("home", nodes, jobs, ()), "name")[1:4]
    assert "3 job3, 4 job4 (no GPU)" in first
    assert "job1" not in first
    assert "1 job1" in second
    assert "job3" not in second
    assert "3 job3" in third
    assert "job2" not in first + second + third
    [alone] = lines(Output(), Seen("home", (report("gpu1"),), jobs, ()), "name")[1:2]
    assert alone.endswith("4 job4")


def test_a_gpu_that_tells_nothing_is_no_zero() -> None:
    silent = drawn(report("gpu1", gpu(0, None, None, None, None)))
    assert "RTX 3070 Ti" in silent[1]
    assert "0%" not in silent[1].replace("10%", "").replace("20%", "")


@pytest.mark.parametrize(
    ("sort", "order"),
    [("name", "abc"), ("use", "bca"), ("memory", "cab"), ("temperature", "bac")],
)
def test_nodes_are_ordered_by_what_was_asked_for(sort: str, order: str) -> None:
    nodes = (
        report("a", gpu(0, 0.1, used=4, heat=60.0)),
        report("b", gpu(0, 0.9, used=1, heat=80.0)),
        report("c", gpu(0, 0.5, used=8, heat=40.0)),
    )
    shown = drawn(*nodes, sort=sort)
    assert "".join(line.split()[1] for line in shown if line.startswith("✓")) == order


def test_a_node_that_is_away_says_why_and_comes_last_by_use() -> None:
    shown = drawn(report("a", error="connection refused"), report("b", cpu=0.0), sort="use")
    assert shown[2].startswith("?  a")
    assert shown[2].endswith("connection refused")


def test_text_of_a_node_cannot_reach_the_terminal_as_commands() -> None:
    shown = drawn(report("a", error="\x1b[2Jgone"))
    assert "\x1b" not in "".join(shown)


def test_the_headline_sums_up_what_is_known() -> None:
    nodes = (report("a", gpu(0, 0.5), gpu(1, 1.0)), report("b", gpu(0, None, None, None)), report("c", error="away"))
    assert headline(Seen("home", nodes, (), ())) == (
        "home   2 of 3 nodes   GPU 75%   VRAM 4.0 GiB of 16.0 GiB   300 W   0 running, 0 waiting"
    )
    assert headline(Seen("home", (report("a"),), (), ())) == "home   1 of 1 nodes   0 running, 0 waiting"


def test_a_curve_is_drawn_from_its_least_to_its_largest_value() -> None:
    assert spark([8.0, 1.0, None, 4.5]) == "█▁ ▅"
    assert spark([2.0, 2.0]) == "▁▁"
    assert spark([1.0]) == spark([]) == spark([None, None]) == ""

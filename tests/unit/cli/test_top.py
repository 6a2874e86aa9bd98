"""What ``ugro top`` draws."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cli.test_output import ESCAPES, Terminal, columns_of
from ugro.cli.health import exit_code
from ugro.cli.output import Output
from ugro.cli.top import HELP, Act, Controls, LogView, footer, pressed
from ugro.cli.top_view import Item, Seen, headline, lines, spark
from ugro.features.training.model import Headline, LossLine
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Launcher, Placement, Share
from ugro.kernel.links.model import Facts, Gpu, GpuHolder, NodeReport, Status


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
    assert "0 RTX 3070 Ti   50%  2.0/8.0 GiB  50 °C  100 W" in shown[1]
    assert "gpu1" not in shown[2]
    assert "1 RTX 3070 Ti  100%" in shown[2]


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
    assert shown[3] == "        connection refused"


def test_a_second_name_and_another_agents_gpu_are_said_and_count_for_nothing() -> None:
    ann = GpuHolder("other", "gpu1", "12", 1, "ann", 0.0)
    first = report("gpu1", replace(gpu(0, 0.5), holder=ann))
    second = replace(report("gpu1-lan", gpu(0, 0.5)), same_as="gpu1")
    shown = drawn(first, second)
    assert shown[2].strip() == "GPU 0 is used by job 12 of another agent (user ann, since 00:00 UTC)"
    assert shown[4].strip() == "the same machine as gpu1: not used"
    assert "1 of 1 nodes   GPU 50%   VRAM 2.0/8.0 GiB" in headline(Seen("home", (first, second), (), ()))
    assert (exit_code([first, replace(second, status=Status.UNHEALTHY)]), exit_code([second])) == (0, 0)


def test_text_of_a_node_cannot_reach_the_terminal_as_commands() -> None:
    shown = drawn(report("a", error="\x1b[2Jgone"))
    assert "\x1b" not in "".join(shown)


def test_the_headline_sums_up_what_is_known() -> None:
    nodes = (report("a", gpu(0, 0.5), gpu(1, 1.0)), report("b", gpu(0, None, None, None)), report("c", error="away"))
    assert headline(Seen("home", nodes, (), ())) == (
        "home   2 of 3 nodes   GPU 75%   VRAM 4.0/16.0 GiB   300 W   0 running, 0 waiting"
    )
    assert headline(Seen("home", (report("a"),), (), ())) == "home   1 of 1 nodes   0 running, 0 waiting"


def test_a_curve_is_drawn_from_its_least_to_its_largest_value() -> None:
    assert spark([8.0, 1.0, None, 4.5]) == "█▁ ▅"
    assert spark([2.0, 2.0]) == "▁▁"
    assert spark([1.0]) == spark([]) == spark([None, None]) == ""


# --- layout -----------------------------------------------------------------------------------------------------


def at(columns: int, seen: Seen) -> list[str]:
    screen, before = Terminal(columns, 24), sys.stdout
    sys.stdout = screen.stream
    try:
        return [ESCAPES.sub("", line) for line in lines(Output(), seen, "name")]
    finally:
        sys.stdout = before
        screen.close()


def test_at_80_columns_memory_temperature_and_power_can_be_read() -> None:
    nodes = tuple(report(f"a-long-node-{n}", *(gpu(index, 1.0, 79, 80, 71.0) for index in range(8))) for n in range(20))
    jobs = tuple(replace(job(n, JobState.RUNNING, n), placement=Placement((Share("a-long-node-0", (n,)),)))
                 for n in range(8))  # fmt: skip
    shown = at(80, Seen("home", nodes, jobs, ()))
    assert [line for line in shown if columns_of(line) > 80] == []
    gpus = [line for line in shown if "RTX" in line]
    assert len(gpus) == 160
    assert all("100%  79.0/80.0 GiB  71 °C  100 W" in line for line in gpus)
    assert all(word in shown[0] for word in ("USE", "VRAM", "TEMP", "POWER", "JOB"))
    wide = [line for line in at(140, Seen("home", nodes, jobs, ())) if "RTX" in line]
    assert all("████████ 100%" in line and "79.0/80.0 GiB  71 °C  100 W" in line for line in wide)


def test_a_running_job_says_how_far_it_is_and_a_waiting_one_why() -> None:
    told = Headline(1, 1, False, 5.0, "step 450 of 1,000 (45 %) · 1m15s left · loss 0.123",
                    loss=LossLine("loss", 0.123, 0.1, (8.0, 1.0)))  # fmt: skip
    jobs = (job(1, JobState.RUNNING), replace(job(2, JobState.QUEUED), reason="waits for " + 30 * "job 1, "))
    shown = at(80, Seen("home", (report("gpu1"),), jobs, (), {1: told}))
    first = next(number for number, line in enumerate(shown) if "job1  running" in line)
    assert shown[first + 1].strip() == "step 450 of 1,000 (45 %) · 1m15s left · loss 0.123  █▁"
    assert shown[first + 3].strip().startswith("waits for job 1")
    assert len(shown) == first + 4, "one line for each"


# --- keys -------------------------------------------------------------------------------------------------------

SEEN = Seen("home", (report("gpu1"), report("gpu2")), (job(7, JobState.RUNNING, 0), job(8, JobState.QUEUED)), ())
ITEMS = [Item("node", "gpu1"), Item("node", "gpu2"), Item("job", "7"), Item("job", "8")]


def press(*keys: str, seen: Seen = SEEN) -> tuple[Controls, list[Act]]:
    controls, acts = Controls(), []
    for key in keys:
        controls, act = pressed(controls, key, ITEMS, seen)
        acts += [act] if act else []
    return controls, acts


def test_keys_move_the_selection_and_stop_at_the_ends() -> None:
    assert press("j")[0].selected == ITEMS[0]
    assert press("k")[0].selected == ITEMS[3]
    assert press(*"jjjjjj")[0].selected == ITEMS[3]
    assert press("\t")[0].selected == ITEMS[2]
    assert press("\t", "\t")[0].selected == ITEMS[0]
    assert press("j", "\x1b")[0] == Controls()
    assert press("j", "\x1b", "\x1b")[0].is_over
    assert pressed(Controls(), "j", [], SEEN)[0].selected is None


@pytest.mark.parametrize("answer", ["n", "q", " ", "\x1b", "c", "\n"])
def test_a_job_is_cancelled_only_by_a_yes_to_a_question_that_names_it(answer: str) -> None:
    asked, acts = press("\t", "c")
    assert acts == []
    assert footer(asked, SEEN) == "cancel job 7 job7 of ann, running on gpu1? y/N"
    refused, acts = press("\t", "c", answer)
    assert (acts, refused.asked, refused.is_over) == ([], None, False)
    _, [act] = press("\t", "c", "y")
    assert (act.kind, act.target) == ("cancel", "7")


def test_a_node_is_drained_after_a_question_and_resumed_at_once() -> None:
    asked, acts = press("j", "d")
    assert acts == []
    assert footer(asked, SEEN) == "drain gpu1? No new job starts there; 1 job continues there. y/N"
    assert [(act.kind, act.target) for act in press("j", "d", "y")[1]] == [("drain", "gpu1")]
    assert [(act.kind, act.target) for act in press("j", "j", "r")[1]] == [("resume", "gpu2")]


@pytest.mark.parametrize(("keys", "words"), [("c", "a job"), ("jc", "a job"), ("jl", "a job"), ("\td", "a node")])
def test_a_key_without_what_it_is_for_says_what_to_select(keys: str, words: str) -> None:
    controls, acts = press(*keys)
    assert (controls.message, acts) == (f"select {words} first: ↑ ↓", [])


def test_logs_are_opened_and_closed_and_their_rank_chosen() -> None:
    ddp = replace(SEEN.jobs[0], spec=JobSpec("x", ("x",), Launcher.DDP), placement=Placement((Share("a"), Share("b"))))
    seen = replace(SEEN, jobs=(ddp,))
    assert press("\t", "l", seen=seen)[0].log == LogView(7, 0, 2)
    assert press("\t", "l", "n", seen=seen)[0].log == LogView(7, 1, 2)
    assert press("\t", "l", "n", "n", seen=seen)[0].log == LogView(7, 0, 2)
    closed = press("\t", "l", "q", seen=seen)[0]
    assert (closed.log, closed.is_over) == (None, False)


def test_help_names_every_key_and_any_key_closes_it() -> None:
    assert press("?")[0].has_help
    assert press("?", "q")[0] == Controls()
    assert press("s", "s", "s", "s")[0].sort == "name"
    assert press(" ")[0].is_paused
    assert all(any(key in line for line in HELP) for key in ("↑", "Tab", "c ", "l ", "d ", "s ", "space", "q "))


@given(st.lists(st.sampled_from(["\x1b[A", "\x1b[B", *"cldrsynq? \t\x1b\nx"]), max_size=30))
def test_no_key_acts_without_a_question_but_resume(keys: list[str]) -> None:
    controls = Controls()
    for key in keys:
        was_asked = controls.asked
        controls, act = pressed(controls, key, ITEMS, SEEN)
        assert act is None or act.kind == "resume" or (act == was_asked and key == "y")
        assert footer(controls, SEEN)

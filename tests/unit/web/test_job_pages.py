"""What the pages of jobs say of a job: what was submitted, what was started, and where a step's time goes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from ugro.features.environments.model import EnvRequest
from ugro.features.planning.model import Forecast, Prediction
from ugro.features.training.model import Headline, RankProfile, Speed
from ugro.kernel.jobs.engine.rules.attempt import NodeRun, RunState
from ugro.kernel.jobs.engine.runs import RankRecord, RunStatus
from ugro.kernel.jobs.model import (
    ALL_GPUS,
    Cause,
    Failure,
    Job,
    JobSpec,
    JobState,
    Launcher,
    Placement,
    RankExit,
    Resources,
    Share,
    places,
    ranges,
)
from ugro.kernel.jobs.records import NodePlan, Plan, RankPlan
from ugro.kernel.telemetry.model import KeySummary
from ugro.web.pages.job_page import JobPage, Known, bar, last_steps, plan_text, rank_rows

SPEC = JobSpec(
    "train",
    ("python", "train.py", "--lr", "1e-3"),
    Launcher.DDP,
    env=(("WANDB_API_KEY", "hush"), ("RATE", "1")),
    resources=Resources(max_nodes=2, gpus_per_node=ALL_GPUS),
)


def _page(spec: JobSpec) -> JobPage:
    job = Job(7, spec, "ann", JobState.QUEUED, "submitted", "2026-01-01T00:00:00+00:00")
    headline = Headline(7, 0, False, None, "")
    return JobPage(job, (), None, None, headline, False, [], [], has_more_events=False, plan=None)


def test_a_configuration_has_what_was_said_and_no_secrets() -> None:
    assert yaml.safe_load(_page(SPEC).spec) == {
        "name": "train",
        "script": "python",
        "args": ["train.py", "--lr", "1e-3"],
        "env": {"WANDB_API_KEY": None, "RATE": "1"},
        "sync": False,
        "resources": {"nodes": "1..2", "gpus_per_node": "all"},
    }


def test_a_job_names_its_python_environment() -> None:
    assert _page(SPEC).environment is None
    wanted = EnvRequest(requirements=("torch==2.13.0", "numpy"), index_url="https://ann:hush@host/simple")
    page = _page(replace(SPEC, environment=wanted))
    assert page.environment == "torch==2.13.0, numpy"
    assert "hush" not in page.spec


def test_what_was_predicted_is_compared_with_the_speed_so_far() -> None:
    page = _page(SPEC)
    assert page.predicted is None
    made = Forecast(Prediction(("gpu1",), 412.0, 0.08, 0.2, 0.0, (96,)), "2026-01-01T00:00:00+00:00")
    assert replace(page, forecast=made).predicted == "412 samples/s ± 8 %"
    running = replace(page.headline, speed=Speed(398.0, "samples/s"))
    words = replace(page, forecast=made, headline=running).predicted
    assert words == "412 samples/s ± 8 %; measured 398, 3 % less"
    tokens = replace(page.headline, speed=Speed(398.0, "tokens/s"))
    assert replace(page, forecast=made, headline=tokens).predicted == "412 samples/s ± 8 %"


def test_what_all_ranks_of_a_node_share_stands_once_in_a_plan() -> None:
    ranks = tuple(RankPlan(at, at, ("python", "train.py"), (("RANK", str(at)), ("A_TOKEN", "hush"))) for at in range(2))
    found = yaml.safe_load(plan_text(Plan(7, 1, (NodePlan("gpu1", ranks, "/code"),))))

    assert found["nodes"] == [
        {
            "node": "gpu1",
            "cwd": "/code",
            "command": "python train.py",
            "env": {"A_TOKEN": "***"},
            "ranks": [{"rank": 0, "RANK": "0"}, {"rank": 1, "RANK": "1"}],
        }
    ]


@pytest.mark.parametrize(("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0–2, 5"), ((4, 3, 1), "1, 3–4")])
def test_many_numbers_are_said_by_their_ends(numbers: tuple[int, ...], text: str) -> None:
    assert ranges(numbers) == text


def test_places_name_nodes_and_their_gpus() -> None:
    assert places(Placement((Share("gpu1", (0, 1)), Share("gpu2")))) == "gpu1 GPU 0–1, gpu2"
    assert places(None) == ""


def test_the_parts_of_a_step_stand_side_by_side_and_never_beyond_it() -> None:
    rank = RankProfile(0, "gpu1", 8, 0.4, 0.1, 0.1, 0.1, 0.05, 0.05, 0.5, 0.2)
    pieces = bar(rank, 1.0)

    assert [part for part, _, _ in pieces] == [
        "data", "forward", "backward", "optimizer", "other", "communication", "waiting",
    ]  # fmt: skip
    assert all(at + length <= 1000 for _, at, length in pieces)
    assert pieces[1] == ("forward", 100.0, 100.0)
    assert bar(rank, 0.0)[0] == ("data", 0.0, 0.0)


NODES = {0: "gpu1", 1: "gpu1", 2: "gpu2"}


def _job(state: JobState, launcher: Launcher = Launcher.DDP) -> Job:
    placement = Placement((Share("gpu1", (2, 5)), Share("gpu2", (0,))))
    spec = JobSpec("train", ("python",), launcher)
    return Job(7, spec, "ann", state, "", "2026-01-01T00:00:00+00:00", attempt=1, placement=placement)


def _said(job: Job, known: Known) -> list[tuple[str, str]]:
    return [(row.state, row.words) for row in rank_rows(job, NODES, known)]


def _run(
    node: str, state: RunState, status: str, *records: RankRecord, is_reachable: bool = True
) -> dict[str, tuple[NodeRun, RunStatus | None]]:
    ranks = tuple(rank for rank, where in NODES.items() if where == node)
    told = RunStatus("7", 1, status, is_claimed=True, ranks=records, started_ranks=ranks)
    return {node: (NodeRun(node, state, is_reachable=is_reachable), told)}


def test_of_ranks_under_way_only_what_their_nodes_told_is_said() -> None:
    running = _run("gpu1", RunState.RUNNING, "running") | _run("gpu2", RunState.RUNNING, "running")
    assert _said(_job(JobState.RUNNING), Known(running)) == [
        ("running", "started"), ("running", "started"), ("running", "running"),
    ]  # fmt: skip
    silent = _run("gpu1", RunState.RUNNING, "running", is_reachable=False)
    ended = _run("gpu2", RunState.FAILED, "exited", RankRecord(2, signal=9))
    assert _said(_job(JobState.UNREACHABLE), Known(silent | ended)) == [
        ("unknown", "unknown: its node does not answer"), ("unknown", "unknown: its node does not answer"),
        ("ended", "ended by SIGKILL"),
    ]  # fmt: skip
    dead = _run("gpu1", RunState.DEAD, "dead") | {"gpu2": (NodeRun("gpu2", RunState.ABSENT), None)}
    assert [words for _, words in _said(_job(JobState.STARTING), Known(dead))] == [
        "unknown", "unknown", "not started yet",
    ]  # fmt: skip


def test_of_ranks_that_have_ended_the_code_or_the_signal_is_said_where_it_was_recorded() -> None:
    assert set(_said(_job(JobState.SUCCEEDED), Known())) == {("succeeded", "exit code 0")}
    exits = (RankExit(0, 0), RankExit(1, 3), RankExit(2))
    failure = Failure(Cause.RANK_FAILED, "rank 1 failed", 1, "gpu1", 3, exits=exits)
    assert _said(_job(JobState.FAILED), Known(failure=failure)) == [
        ("succeeded", "exit code 0"), ("failed", "exit code 3"), ("ended", "ended"),
    ]  # fmt: skip
    assert set(_said(_job(JobState.CANCELLED), Known())) == {("ended", "ended")}, "how is not known"


def test_a_failure_that_was_written_down_without_exits_still_tells_the_culprits() -> None:
    failure = Failure(Cause.RANK_FAILED, "rank 1 failed", 1, "gpu1", 3)
    assert _said(_job(JobState.FAILED), Known(failure=failure))[1] == ("failed", "exit code 3")


def test_the_newest_step_of_each_rank_is_said_but_not_of_torchruns_launchers() -> None:
    steps = last_steps(
        KeySummary("job/7", 1, rank, key, 2, 0, step, 0.0, None)
        for rank, key, step in ((0, "loss", 5), (0, "speed", 4), (2, "loss", 9))
    )
    assert [row.last_step for row in rank_rows(_job(JobState.RUNNING), NODES, Known(last_steps=steps))] == [5, None, 9]
    torchrun = rank_rows(_job(JobState.RUNNING, Launcher.TORCHRUN), NODES, Known(last_steps=steps))
    assert [row.last_step for row in torchrun] == [None] * 3
    assert [row.gpus for row in torchrun] == ["2, 5", "2, 5", "0"]

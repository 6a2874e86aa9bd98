"""What the pages of jobs say of a job: what was submitted, what was started, and where a step's time goes."""

from __future__ import annotations

import pytest
import yaml

from ugro.core.job import ALL_GPUS, Job, JobSpec, JobState, Launcher, Placement, Resources, Share
from ugro.core.plan import NodePlan, Plan, RankPlan
from ugro.core.profile import RankProfile
from ugro.web.jobview import JobPage, bar, places, plan_text, ranges

SPEC = JobSpec(
    "train",
    ("python", "train.py", "--lr", "1e-3"),
    Launcher.DDP,
    env=(("WANDB_API_KEY", "hush"), ("RATE", "1")),
    resources=Resources(max_nodes=2, gpus_per_node=ALL_GPUS),
)


def _page(spec: JobSpec) -> JobPage:
    job = Job(7, spec, "ann", JobState.QUEUED, "submitted", "2026-01-01T00:00:00+00:00")
    return JobPage(job, [], None, None, [], [], has_more_events=False, plan=None)


def test_a_configuration_has_what_was_said_and_no_secrets() -> None:
    assert yaml.safe_load(_page(SPEC).spec) == {
        "name": "train",
        "script": "python",
        "args": ["train.py", "--lr", "1e-3"],
        "env": {"WANDB_API_KEY": None, "RATE": "1"},
        "sync": False,
        "resources": {"nodes": "1..2", "gpus_per_node": "all"},
    }


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


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0–2, 5"), ((4, 3, 1), "1, 3–4")]
)
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

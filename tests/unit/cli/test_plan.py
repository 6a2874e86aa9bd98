"""Predictions as they are printed: by ``ugro plan``, and in the plan of a launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.cli.jobs.document import show_dry_run
from ugro.cli.output import Output
from ugro.features.planning.cli import _lines
from ugro.features.planning.model import DeviceNeed, LaunchPlan, LocalPlan, NodeFigures, Prediction
from ugro.kernel.jobs.model import JobSpec, Launcher, Placement, Share
from ugro.kernel.jobs.records import DryRun, NodePlan, Plan, RankPlan

BEST = Prediction(("gpu1", "gpu2"), 412.0, 0.08, 0.155, 0.02, (48, 16))
ALONE = Prediction(("gpu1",), 390.0, 0.05, 0.164, 0.0, (64,), why="5 % slower")
LOCAL = LocalPlan(("gpu1", "gpu2", "gpu3"), 1350.4, 80, 12.0, 1.5)
NODES = tuple(
    NodeFigures(name, "RTX", 0.01, 0.002, 0.0, None, "2030-01-01T00:00:00+00:00", 1, is_cached=False)
    for name in ("gpu1", "gpu2", "gpu3")
)
GIB = 2**30
NEED = DeviceNeed("ddp", "gpu1", "RTX", GIB, GIB, 2 * GIB, GIB, GIB // 2, 8 * GIB, 32, 32)


def plan(local: LocalPlan | None) -> LaunchPlan:
    return LaunchPlan("train", 64, 25_600_000, 102_400_000, (BEST, ALONE), NODES, local=local)


def test_local_sgd_is_a_line_of_its_own_that_says_what_it_changes() -> None:
    best, alone, local, *_ = _lines(plan(LOCAL), is_all=False)
    words = "all three, local SGD every 80 steps"
    assert best == f"best: {'gpu1 + gpu2':<{len(words)}}       412 samples/s  ± 8 %"
    assert alone == f"      {'gpu1 alone':<{len(words)}}       390  5 % slower"
    assert local == f"      {words}     1,350  changes the training: see docs/slow-networks.md"


def test_where_the_training_is_local_sgd_that_line_is_about_it() -> None:
    lines = list(_lines(replace(plan(LOCAL), is_of_local=True), is_all=False))
    assert any(line.endswith("1,350  what this training does") for line in lines)


def test_where_local_sgd_is_not_faster_nothing_is_said_of_it() -> None:
    assert not any("local SGD" in line or "slow-networks" in line for line in _lines(plan(None), is_all=True))


def dry_run(launcher: Launcher = Launcher.DDP, prediction: Prediction | None = None) -> DryRun:
    spec = JobSpec("train", ("train.py", "--size", "a b"), launcher)
    planned = Plan(7, 1, (NodePlan("gpu1", (RankPlan(0, 0, ("python3", "train.py"), ()),)),))
    memory = (NEED,) if prediction else ()
    placement = Placement((Share("gpu1"),))
    return DryRun(spec, True, "gpu1 is free", planned, placement, prediction=prediction, memory=memory)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (dry_run(prediction=BEST), "  speed    412 samples/s ± 8 % (predicted)"),
        (dry_run(), "  speed    not predicted: ugro plan train.py --size 'a b'"),
    ],
)
def test_a_dry_run_prints_the_predicted_speed_or_how_to_get_it(
    found: DryRun, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_dry_run(Output(), found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["train would start now (gpu1 is free)", "  nodes    gpu1", line]


def test_a_dry_run_prints_the_memory_that_was_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    show_dry_run(Output(), dry_run(prediction=BEST))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  memory")]
    assert line.startswith("  memory   ddp      fits: gpu1 (RTX) needs about 5.5 GiB of 8.0 GiB (parameters 1.0 GiB")


def test_a_command_has_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    show_dry_run(Output(), dry_run(Launcher.COMMAND))
    assert "speed" not in capsys.readouterr().out

"""What ``ugro demo`` makes of what the ranks of its two trainings tell."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from ugro.cli.output import Output
from ugro.kernel.jobs.model import Job, JobSpec, JobState
from ugro.lab.demo_training import MODES, Progress, Result, Trial, document, gain

EQUAL = Result(48, 40, 50.0, 0.4, 1.25, ["lab1", "lab2"], [48, 48], [0.1, 0.4], [0.3, 0.0], [3, 3])
BALANCED = Result(48, 40, 75.0, 0.1, 1.2501, ["lab2", "lab1"], [20, 76], [0.2, 0.2], [0.0, 0.01], [3, 3])
LINES = (
    "from step 1: lab1 48, lab2 48; equal shares",
    "step 4 of 48: loss 3.1234, 50.1 samples/s, waiting 40.1%",
    "a library says something",
)


def told(result: Result) -> str:
    return f"result {json.dumps(asdict(result))}"


def test_the_result_is_the_last_thing_that_is_told() -> None:
    progress = Progress(Output())
    assert [progress.read("off", line) for line in (*LINES, told(EQUAL))] == [None, None, None, EQUAL]


def test_a_json_document_stands_alone_while_people_are_shown_every_step(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    shown = []
    for is_json in (True, False):
        progress = Progress(Output(is_json=is_json))
        for mode in MODES:
            for line in LINES:
                progress.read(mode, line)
        shown.append(capfdbinary.readouterr().out)
    quiet, loud = shown
    assert quiet == b""
    steps = [line.split() for line in loud.decode().splitlines() if " of 48" in line]
    half = ["50", "40", "%", "3.123"]
    assert steps == [["4", "of", "48", *half], ["4", "of", "48", *half, *half]]


def test_the_document_has_both_runs_and_what_the_second_gained() -> None:
    spec = JobSpec("train", ("train.py",))
    jobs = [Job(number, spec, "ann", JobState.SUCCEEDED, "", "2026-01-01T00:00:00Z") for number in (1, 2)]
    trials = {mode: Trial(job, result) for mode, job, result in zip(MODES, jobs, (EQUAL, BALANCED), strict=True)}
    assert gain(trials) == 1.5
    assert document(trials) == {
        "runs": {"off": {"job": 1, **asdict(EQUAL)}, "adaptive": {"job": 2, **asdict(BALANCED)}},
        "gain": 1.5,
    }

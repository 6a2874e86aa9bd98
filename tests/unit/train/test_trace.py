"""Being asked for a trace, apart from torch: who is asked, when one looks, and what becomes of failures."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from tests.rig.training import Pretend
from tests.rig.waiting import wait_until
from ugro.features.training.service import read_end
from ugro.train.telemetry import Tracer


def tracer(folder: Path, rank: int = 0) -> Tracer:
    return Tracer(folder, "7.1", folder / "output", rank, is_cuda=False)


def ask(folder: Path, steps: object = 3, key: str = "a", run: str = "7.1") -> None:
    (folder / "control.json").write_text(json.dumps({"run": run, "key": key, "trace_steps": steps}))


def look_again(made: Tracer) -> int:
    made._next_look = 0.0
    return made.asked()


def test_the_main_rank_looks_once_a_second_at_most_and_asks_until_it_has_begun(tmp_path: Path) -> None:
    made = tracer(tmp_path)
    assert made.asked() == 0
    ask(tmp_path)
    assert made.asked() == 0, "it has only just looked"
    assert look_again(made) == 3
    assert made.asked() == 3
    assert look_again(tracer(tmp_path, rank=1)) == 0, "the others are told by the main one"


def test_one_request_is_one_trace_however_often_it_is_written(tmp_path: Path) -> None:
    made = tracer(tmp_path)
    ask(tmp_path)
    assert look_again(made) == 3
    made._asked = 0
    os.unlink(tmp_path / "control.json")
    ask(tmp_path)
    assert look_again(made) == 0
    ask(tmp_path, 2, key="b")
    assert look_again(made) == 2


@pytest.mark.parametrize("steps", [0, -1, "x", None, [1], {"a": 1}])
def test_a_word_that_makes_no_sense_asks_for_nothing(tmp_path: Path, steps: object) -> None:
    ask(tmp_path, steps)
    assert look_again(tracer(tmp_path)) == 0
    ask(tmp_path, 5, run="6.1")
    assert look_again(tracer(tmp_path)) == 0, "it is another run's"
    (tmp_path / "control.json").write_bytes(b"\xff" * 10_000)
    assert look_again(tracer(tmp_path)) == 0


def test_without_ugro_nobody_can_ask(tmp_path: Path) -> None:
    assert Tracer(None, "None.1", tmp_path, 0, is_cuda=False).asked() == 0


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")
def test_some_steps_are_recorded_and_what_fails_is_told_where_the_trace_would_be(tmp_path: Path) -> None:
    import torch
    from torch.profiler import profile

    made, traces = tracer(tmp_path), tmp_path / "output" / "traces"
    made.after_step(4, 2)
    for step in (5, 6):
        assert made.is_tracing
        torch.ones(4, 4).matmul(torch.ones(4, 4))
        made.after_step(step, 0)
    assert not made.is_tracing
    wait_until(lambda: (traces / "rank_0.step_5.json.gz").exists(), 60, "the trace to be written")
    events = json.loads(gzip.decompress((traces / "rank_0.step_5.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::matmul" for event in events) == 2
    with profile() as theirs:
        made.after_step(10, 1)
        torch.ones(4, 4).matmul(torch.ones(4, 4))
        made.after_step(11, 0)
    assert "uses torch.profiler itself" in (traces / "rank_0.step_11.txt").read_text()
    assert any(event.name == "aten::matmul" for event in theirs.events()), "theirs goes on"
    made.after_step(20, 5)
    made.close()
    assert (traces / "rank_0.step_21.json.gz").exists(), "the training ended first"
    assert {path.name for path in tmp_path.iterdir()} == {"output"}


def test_the_end_of_a_large_file_is_read_with_its_beginning_and_no_more(tmp_path: Path) -> None:
    lines = Pretend([0.001, 0.001], names=("a", "b")).run(3000)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(lines) + b'{"kind":"prof')
    whole = read_end(file, 10_000)
    assert (len(whole.steps), whole.steps[-1].step) == (3000, 2999)
    some = read_end(file, 20, block=10_000)
    assert 20 <= len(some.steps) < 100
    assert some.steps[-1].step == 2999
    assert [step.step for step in some.steps] == list(range(some.steps[0].step, 3000)), "without a gap"
    assert some.names(2) == ("a", "b"), "which is said at the beginning only"
    assert some.plan is not None
    capped = read_end(file, 10_000, block=10_000, most_bytes=30_000)
    assert len(capped.steps) < 100, "whatever is asked for"


def test_a_file_without_lines_or_of_one_long_line_is_no_training(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"")
    assert not read_end(file, 10).steps
    file.write_bytes(b"x" * (3 << 20))
    assert not read_end(file, 10).steps


def test_after_a_start_anew_what_was_before_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    second = Pretend([0.001], names=("alone",), batch=32).run(4)
    file.write_bytes(b"".join([*Pretend([0.001] * 3).run(9), *second]))
    found = read_end(file, 100)
    assert [step.shares for step in found.steps] == [(32,)] * 4
    assert found.names(1) == ("alone",)

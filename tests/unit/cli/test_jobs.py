"""The words of the job commands: whose they are, what is hidden, what a job looks like to a program."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click
import pytest

from ugro.cli.jobs.describe import duration_s, exit_code, next_commands, ranks, variables
from ugro.cli.jobs.document import job_document, plan_document
from ugro.cli.jobs.logs import MOMENT, Bytes, Documents, Prefixed
from ugro.cli.jobs.options import divide
from ugro.cli.jobs.submit import launch, run
from ugro.cli.output import Output
from ugro.client.job_logs import LogPiece
from ugro.kernel.jobs.config.options import OPTIONS as JOB_OPTIONS
from ugro.kernel.jobs.config.options import POSITIONAL
from ugro.kernel.jobs.model import Attempt, Cause, Failure, Job, JobSpec, JobState, Launcher, Placement, Share
from ugro.kernel.jobs.records import NodePlan, Plan, RankPlan
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.secrets import looks_secret

OPTIONS = {"--nodes": True, "--name": True, "--detach": False, "-d": False, "-e": True}


@pytest.mark.parametrize(
    ("words", "ours", "script", "theirs"),
    [
        ("train.py --epochs 3 --nodes 3", "--nodes 3", "train.py", "--epochs 3"),
        ("--nodes 3 train.py --epochs=3 -d", "--nodes 3 -d", "train.py", "--epochs=3"),
        ("train.py --nodes=3 x -e A=1", "--nodes=3 -e A=1", "train.py", "x"),
        ("train.py -lr 1 -de --node 2 --name-or-path x", "", "train.py", "-lr 1 -de --node 2 --name-or-path x"),
        ("train.py --detach=1", "", "train.py", "--detach=1"),
        ("--epochs 3 train.py", "--epochs", "3", "train.py"),
        ("train.py --nodes", "--nodes", "train.py", ""),
        ("--nodes 2", "--nodes 2", None, ""),
    ],
)
def test_words_are_ours_by_their_whole_name_and_else_the_scripts(
    words: str, ours: str, script: str | None, theirs: str
) -> None:
    assert divide(words.split(), OPTIONS) == (ours.split(), script, theirs.split())


def test_every_key_of_a_job_file_that_is_an_option_is_one_of_the_commands() -> None:
    options = {option.flag for option in JOB_OPTIONS.values() if option.name not in POSITIONAL}
    assert options <= {name for parameter in launch.params for name in parameter.opts}
    # One process has no ranks.
    of_ranks = {"--nodes", "--launcher", "--balance", "--train-sync"}
    assert options - of_ranks <= {name for one in run.params for name in one.opts}


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "PGPASSWORD", "APIKEY"])
def test_what_looks_like_a_secret_is_not_shown(name: str) -> None:
    assert looks_secret(name)
    assert variables([(name, "abc"), ("A", "b c")]) == [f"{name}=***", "A='b c'"]


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "HF_HOME"])
def test_what_is_no_secret_is_shown(name: str) -> None:
    assert not looks_secret(name)


def job(state: JobState = JobState.FAILED, **fields: Any) -> Job:
    spec = JobSpec("train", ("train.py",), Launcher.DDP)
    placement = Placement((Share("gpu1", (0, 1)), Share("gpu2")))
    settings: dict[str, Any] = {
        "attempt": 1,
        "placement": placement,
        "started_at": "2030-01-01T00:00:10.000+00:00",
        "ended_at": "2030-01-01T00:00:40.000+00:00",
        "exit_code": 9,
    }
    return Job(17, spec, "ann", state, "it broke", "2030-01-01T00:00:00.000+00:00", **{**settings, **fields})


def test_a_jobs_document_has_these_names_and_no_others() -> None:
    failure = Failure(Cause.OOM, "rank 1 ran out of memory", rank=1, node="gpu1", exit_code=137)
    attempt = Attempt(1, Placement((Share("gpu1", (0, 1)),)), "2030-01-01T00:00:10.000+00:00", failure=failure)
    document = json.loads(dumps(job_document(job(), [attempt])))
    assert set(document) == {
        *("id", "name", "state", "reason", "exit_code", "user", "priority", "attempt", "ranks", "nodes"),
        *("submitted_at", "started_at", "ended_at", "duration_s", "cached_from", "origin", "spec", "attempts"),
    }
    assert document["nodes"] == [{"name": "gpu1", "gpus": [0, 1]}, {"name": "gpu2", "gpus": []}]
    assert (document["id"], document["name"], document["state"], document["ranks"]) == (17, "train", "failed", 3)
    assert document["duration_s"] == 30
    [told] = document["attempts"]
    assert set(told) == {"number", "nodes", "started_at", "ended_at", "outcome", "failure"}
    assert told["failure"]["cause"] == "oom"
    assert "attempts" not in job_document(job())


def test_programs_get_no_secret_values_either() -> None:
    env = (("A", "b"), ("GITHUB_PAT", "hush"), ("URL", "redis://:hush@h"))
    spec, rank = replace(job().spec, env=env), RankPlan(0, 0, ("true",), env)
    plan = plan_document(Plan(17, 1, (NodePlan("gpu1", (rank,)),)))
    assert plan is not None
    for shown in (job_document(replace(job(), spec=spec))["spec"].env, plan.nodes[0].ranks[0].env):
        assert shown == (("A", "b"), ("GITHUB_PAT", "***"), ("URL", "redis://:***@h"))
    assert plan_document(None) is None


def test_how_long_is_from_the_submit_for_one_that_waits() -> None:
    waiting = job(JobState.RECOVERING, ended_at="2030-01-01T00:00:50.000+00:00")
    assert duration_s(waiting) == 50


def test_a_job_that_did_not_succeed_never_returns_0() -> None:
    assert exit_code(job(exit_code=9)) == 9
    assert exit_code(job(exit_code=None)) == 1
    assert exit_code(job(JobState.CANCELLED, exit_code=0)) == 1
    assert exit_code(job(JobState.SUCCEEDED, exit_code=0)) == 0


def test_a_job_that_never_started_has_no_log_to_look_at() -> None:
    assert "ugro logs 17" in next_commands(job())
    assert next_commands(job(started_at=None)) == "ugro events 17 · ugro retry 17"


def test_a_job_that_was_not_placed_has_one_rank() -> None:
    assert ranks(job(placement=None)) == 1


@pytest.mark.parametrize("text", ["yesterday", "-3", "10x", ""])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="10m"):
        MOMENT.convert(text, None, None)


def test_a_time_is_how_long_ago_or_when() -> None:
    assert MOMENT.convert("2030-01-01T00:00:00+00:00", None, None) == 1893456000
    assert MOMENT.convert("1h", None, None) - MOMENT.convert("2h", None, None) == pytest.approx(3600, abs=5)


def piece(rank: int, content: bytes, dropped: int = 0) -> LogPiece:
    return LogPiece(1, rank, f"gpu{rank + 1}", 0, content, dropped)


def test_lines_of_several_ranks_are_whole_and_aligned(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    printer = Prefixed(Output())
    for rank, content in [(10, b"a\nb"), (1, b"one\n"), (10, b"c\n\nend"), (1, b"\xff\x1b[31mred\x1b[0m\n")]:
        printer.piece(piece(rank, content))
    printer.close()
    assert capfdbinary.readouterr().out == (
        b"rank 10 gpu11 | a\nrank 1 gpu2   | one\nrank 10 gpu11 | bc\nrank 10 gpu11 | \n"
        b"rank 1 gpu2   | \xff\x1b[31mred\x1b[0m\nrank 10 gpu11 | end\n"
    )


def test_a_line_that_never_ends_is_shown_all_the_same(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    printer = Prefixed(Output())
    for _ in range(3):
        printer.piece(piece(0, b"x" * 40_000))
    printer.close()
    assert capfdbinary.readouterr().out.count(b"x") == 120_000


def test_bytes_of_one_rank_pass_as_they_are_and_a_loss_is_said(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    printer = Bytes(Output())
    printer.piece(piece(0, b"10%\r20%\r\xff"))
    printer.piece(piece(0, b"", dropped=3 * 2**30))
    printer.piece(piece(0, b"later\n"))
    captured = capfdbinary.readouterr()
    assert captured.out == b"10%\r20%\r\xfflater\n"
    assert b"3.0 GiB of this log were dropped on gpu1" in captured.err


def test_lines_for_a_program_are_documents(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    printer = Documents(Output(is_json=True))
    printer.piece(piece(0, b"ok\n\xff\n"))
    printer.piece(piece(0, b"", dropped=5))
    printer.piece(piece(0, b"end"))
    printer.close()
    found = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    place = {"attempt": 1, "rank": 0, "node": "gpu1"}
    assert found == [{**place, **more} for more in (
        {"line": "ok"}, {"line_base64": "/w=="}, {"dropped_bytes": 5}, {"line": "end"},
    )]  # fmt: skip

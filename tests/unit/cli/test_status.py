"""The list of jobs: for people at 80 columns, with whole reasons; for programs, with columns that stay."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.unit.cli.test_jobs import job
from tests.unit.cli.test_output import ESCAPES, Terminal, columns_of
from ugro.cli.jobs import status
from ugro.cli.jobs.describe import ago
from ugro.cli.output import Output
from ugro.kernel.jobs.model import Attempt, JobState, Placement, Share
from ugro.kernel.jobs.operations import Details
from ugro.kernel.support.moments import Instant

NOW = datetime(2030, 1, 1, 2, 0, 40, tzinfo=UTC)
LONG = (
    "rank 1 on gpu2 ended with exit code 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
    "GPU 0 has a total capacity of 7.79 GiB; it has no retries left after 3 attempts"
)


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Of 80 columns."""
    made, before = Terminal(80, 24), sys.stdout
    sys.stdout = made.stream
    try:
        yield made
    finally:
        sys.stdout = before
        made.close()


def test_at_80_columns_the_reason_of_a_failure_is_whole_and_a_success_says_nothing() -> None:
    jobs = [
        replace(job(), reason=LONG),
        job(JobState.SUCCEEDED),
        job(JobState.RUNNING, ended_at=None),
        job(JobState.QUEUED, started_at=None, placement=None, ended_at=None),
        job(JobState.SUCCEEDED, cached_from=3),
    ]
    with terminal():
        lines = [ESCAPES.sub("", line) for line in status.table(Output(), jobs, Instant(NOW.timestamp()))]
    assert max(map(columns_of, lines)) <= 80
    assert LONG in " ".join(line.strip() for line in lines)
    first = next(number for number, line in enumerate(lines) if "succeeded" in line)
    assert "running" in lines[first + 1], "nothing below a job that succeeded"
    assert "queued" in lines[first + 2]
    assert lines[first + 3].strip() == "it broke", "what it waits for"
    assert lines[-1].strip() == "it broke", "that its result is another job's"
    assert "STARTED" in lines[0]
    assert "2 h ago" in lines[1]
    assert "30.0 s" in lines[1]


def test_one_job_is_shown_with_its_whole_reason_and_when_it_ran() -> None:
    times = ("2030-01-01T00:00:10.000+00:00", "2030-01-01T00:00:40.000+00:00")
    attempt = Attempt(1, Placement((Share("gpu1"),)), *times, LONG)
    success = replace(attempt, outcome="every rank ended with 0")
    with terminal() as screen:
        status.show(Output(), Details(replace(job(), reason=LONG), (attempt,)))
        lines = [ESCAPES.sub("", line) for line in screen.shown().splitlines()]
        status.show(Output(), Details(job(JobState.SUCCEEDED), (success,)))
        shown = screen.shown()
    assert [line for line in lines if columns_of(line) > 80] == []
    assert " ".join(line.strip() for line in lines).count("no retries left after 3 attempts") == 1
    assert any(line.startswith("  started    2030-01-01") for line in lines)
    assert "it broke" not in shown
    assert "every rank" not in shown


def test_a_list_without_jobs_says_what_there_is_none_of(capsys: pytest.CaptureFixture[str]) -> None:
    status.show_all(Output(), [])
    assert capsys.readouterr().err == "no jobs yet; try: ugro run -- hostname\n"
    status.show_all(Output(), [], ["failed", "running"])
    assert capsys.readouterr().err == "no job is failed or running\n"


def test_programs_get_the_same_columns_as_ever_and_new_ones_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    status.show_all(Output(), [replace(job(), reason="two\nlines\tand a tab")])
    header, row = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert header[:9] == ["job", "name", "state", "nodes", "gpus", "try", "time", "user", "reason"]
    assert header[9:] == ["submitted", "started", "ended"]
    assert row == [
        *("17", "train", "failed", "gpu1,gpu2", "2", "1", "30.000", "ann", "two\\nlines\\tand a tab"),
        *("2030-01-01T00:00:00.000+00:00", "2030-01-01T00:00:10.000+00:00", "2030-01-01T00:00:40.000+00:00"),
    ]


@pytest.mark.parametrize(
    ("passed", "words"),
    [
        (timedelta(seconds=-5), "just now"),  # another clock is ahead
        (timedelta(seconds=59), "just now"),
        (timedelta(minutes=1), "1 min ago"),
        (timedelta(minutes=59, seconds=59), "59 min ago"),
        (timedelta(hours=23, minutes=59), "23 h ago"),
        (timedelta(days=400), (NOW - timedelta(days=400)).astimezone().strftime("%Y-%m-%d")),
        (timedelta(days=3), (NOW - timedelta(days=3)).astimezone().strftime("%b %d %H:%M")),
    ],
)
def test_when_is_how_long_ago_and_later_the_day(passed: timedelta, words: str) -> None:
    assert ago(Instant((NOW - passed).timestamp()), Instant(NOW.timestamp())) == words

"""``ugro wait``."""

from __future__ import annotations

import time

import click

from ugro.cli import candidates
from ugro.cli.jobs.describe import exit_code, sentence
from ugro.cli.jobs.document import job_document
from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.core.errors import TimedOut, UsageError
from ugro.core.job import Job, JobState
from ugro.core.support.quantity import parse_duration


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=candidates.live_jobs)
@click.option("--timeout", metavar="TIME", help="Give up after this time, such as 10m, with exit code 124.")
@json_option
@pass_session
def wait(session: Session, jobs: tuple[str, ...], timeout: str | None) -> int:
    """Wait until jobs have ended.

    Waits for all JOBs (default: the last job). Returns 0 if all succeeded, else the exit code of the first that failed.

    \b
    Example:
      ugro wait 12 13 --timeout 2h
    """
    client = session.client()
    deadline = time.monotonic() + (_seconds(timeout) if timeout else float("inf"))
    # Resolved before waiting: another job may soon be the last one, or have this name.
    numbers = [client.jobs.get(job).id for job in jobs or ("last",)]
    ended = [_wait(session.output, client, number, deadline) for number in dict.fromkeys(numbers)]
    if session.output.is_json:
        session.output.document({"jobs": [job_document(job) for job in ended]})
    for job in ended:
        session.output.note(sentence(job))
    failed = [job for job in ended if job.state is not JobState.SUCCEEDED]
    return exit_code(min(failed, key=lambda job: job.ended_at or "")) if failed else 0


def _wait(output: Output, client: Client, number: int, deadline: float) -> Job:
    left_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
    job: Job | None = None
    for job in client.jobs.moves(number, timeout_s=left_s):
        output.progress(sentence(job))
    if job is None:
        raise TimedOut(f"no report about job {number}")
    return job


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--timeout: {error}") from error

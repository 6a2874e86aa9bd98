"""``ugro wait`` and ``ugro cancel``."""

from __future__ import annotations

import getpass
import time

import click

from ugro.cli import candidates
from ugro.cli.jobs.document import job_document
from ugro.cli.jobs.text import exit_code, sentence
from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.core.errors import TimedOut, UsageError
from ugro.core.job import FINAL_STATES, Job, JobState
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


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=candidates.live_jobs)
@click.option("--all", "-a", "is_all", is_flag=True, help="Cancel all your jobs.")
@json_option
@pass_session
def cancel(session: Session, jobs: tuple[str, ...], is_all: bool) -> None:
    """Stop jobs and all their processes.

    Jobs that have already ended are not changed.

    \b
    Examples:
      ugro cancel last
      ugro cancel --all
    """
    if bool(jobs) == is_all:
        raise UsageError("name the jobs, or use --all", hint="for example: ugro cancel last")
    client = session.client()
    chosen = [str(job.id) for job in _mine(client)] if is_all else jobs
    found = [client.jobs.cancel(job) for job in chosen]
    if session.output.is_json:
        session.output.document({"jobs": [job_document(job) for job in found]})
    for job in found:
        text = f"has already ended: {job.state}" if job.is_final else "is stopping"
        session.output.note(f"job {job.id} {job.spec.name} {text}")
    if not found:
        session.output.note("you have no waiting or running jobs")


def _wait(output: Output, client: Client, number: int, deadline: float) -> Job:
    left_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
    job: Job | None = None
    for job in client.jobs.moves(number, timeout_s=left_s):
        output.progress(sentence(job))
    if job is None:
        raise TimedOut(f"no report about job {number}")
    return job


def _mine(client: Client) -> list[Job]:
    states = [state for state in JobState if state not in FINAL_STATES]
    return [job for job in client.jobs.newest(None, states=states) if job.user == getpass.getuser()]


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--timeout: {error}") from error

"""``ugro cancel``."""

from __future__ import annotations

import click

from ugro.cli import candidates
from ugro.cli.jobs.document import job_document
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.core.errors import UsageError
from ugro.core.job import FINAL_STATES, Job, JobState
from ugro.kernel.access.operations import GetWhoami


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


def _mine(client: Client) -> list[Job]:
    states = [state for state in JobState if state not in FINAL_STATES]
    me = client.ask(GetWhoami()).user
    return [job for job in client.jobs.newest(None, states=states) if job.user == me]

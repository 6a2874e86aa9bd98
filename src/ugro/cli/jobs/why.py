"""``ugro why``."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ugro.cli import candidates
from ugro.cli.jobs import describe
from ugro.cli.jobs.document import job_document
from ugro.cli.jobs.result_summary import result_lines
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.jobs import Details
from ugro.core.job import WAITING_STATES, JobState, places
from ugro.core.support.quantity import format_duration


@click.command()
@click.argument("job", default="last", shell_complete=candidates.jobs)
@json_option
@pass_session
def why(session: Session, job: str) -> None:
    """Explain why a job waits, where it runs, or how it ended.

    For a waiting job: what it needs, which jobs hold that, and when it may start.
    """
    jobs = session.client().jobs
    details = jobs.details(job)
    found = details.job
    answer = jobs.why(found.id) if found.state in WAITING_STATES else None
    if session.output.is_json:
        document = {"job": job_document(found, details.attempts), "why": answer, "safe_mode": session.safe_mode}
        session.output.document(document)
        return
    if answer is None:
        made = jobs.brief_results(found.id) if found.is_final else None
        lines = iter([*_outcome(details), *(result_lines(found, made) if made is not None else ())])
    else:
        lines = iter([f"job {found.id} {found.spec.name} is {found.state}: {answer['text']}", *answer["details"]])
        if found.state is JobState.RECOVERING:
            lines = iter([*lines, *_outcome(details)])
    for number, line in enumerate(lines):
        session.output.text(line if number == 0 else f"  {line}")


def _outcome(details: Details) -> Iterator[str]:
    job = details.job
    yield describe.sentence(job)
    if job.held is not None:
        yield f"on {places(job.held)}, for {format_duration(describe.duration_s(job))}"
    failure = details.attempts[-1].failure if details.attempts else None
    if failure is not None:
        yield from list(describe.failure_lines(failure))[int(failure.reason in job.reason) :]
    yield f"next: {describe.next_commands(job, failure)}"

"""``ugro events``."""

from __future__ import annotations

import click

from ugro.cli import candidates
from ugro.cli.jobs.describe import local_time
from ugro.cli.jobs.moment import MOMENT, SINCE
from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.core.event import Event


@click.command()
@click.argument("job", required=False, shell_complete=candidates.jobs)
@click.option("--since", type=MOMENT, metavar="TIME", help=SINCE)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new events until Ctrl-C.")
@json_option
@pass_session
def events(session: Session, job: str | None, since: float | None, follow: bool) -> None:
    """Print the history of events.

    Of JOB, or of all jobs and nodes; the oldest first.
    """
    output = session.output
    for event in session.client().jobs.events(job=job, since_unix_s=since, follow=follow):
        if output.is_json:
            output.document({"event": event})
        else:
            _show(output, event)


def _show(output: Output, event: Event) -> None:
    about = f"job {event.job}" if event.job is not None else event.node or ""
    if event.job is not None and event.attempt:
        about += f".{event.attempt}"
    if output.is_terminal:
        output.text(f"{local_time(event.at)}  {about:<10}  {event.kind:<11}  {event.text}")
    else:
        output.record((event.at, about, event.kind, event.text))

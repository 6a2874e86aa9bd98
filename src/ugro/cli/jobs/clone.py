"""``ugro clone``."""

from __future__ import annotations

import click

from ugro.cli import candidates
from ugro.cli.session import Session, json_option, pass_session


@click.command()
@click.argument("job", default="last", shell_complete=candidates.jobs)
@json_option
@pass_session
def clone(session: Session, job: str) -> None:
    """Print a job as a job file, to edit and submit again.

    Submit it in the folder of its code. Environment variables that look secret have no value in it: give them when you
    submit.

    \b
    Example:
      ugro clone 12 > job.yaml && ugro launch -f job.yaml
    """
    text = session.client().jobs.file(job)
    if session.output.is_json:
        session.output.document({"file": text})
    else:
        session.output.block(text.removesuffix("\n"))

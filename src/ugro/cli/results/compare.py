"""``ugro compare``."""

from __future__ import annotations

import click

from ugro.cli import candidates
from ugro.cli.jobs.document import job_document
from ugro.cli.output import Cell
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.jobs import Fact
from ugro.core.errors import UsageError


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB JOB...", shell_complete=candidates.jobs)
@click.option("--all", "-a", "is_all", is_flag=True, help="Also show what is the same.")
@json_option
@pass_session
def compare(session: Session, jobs: tuple[str, ...], is_all: bool) -> int:
    """Show what differs between jobs.

    Compares parameters, command, environment, code, packages, nodes, settings and metrics of two or more jobs. A name
    means the newest job of that name that is not among the others.

    \b
    Examples:
      ugro compare 12 13
      ugro compare train last
    """
    if len(jobs) < 2:
        raise UsageError("give at least two jobs", hint="ugro compare 12 13")
    found = session.client().jobs.compare(jobs)
    rows = [row for row in found.rows if is_all or not row.is_same]
    if session.output.is_json:
        facts = [{"key": row.key, "is_same": row.is_same, "values": row.values} for row in rows]
        session.output.document({"jobs": [job_document(job) for job in found.jobs], "rows": facts})
    elif not rows:
        session.output.note("no differences")
    else:
        header = ("FACT", *(f"JOB {job.id}" for job in found.jobs))
        session.output.table(header, [_cells(row) for row in rows])
    return 0


def _cells(row: Fact) -> list[Cell]:
    return [Cell(row.key), *(Cell(value or "-", "" if row.is_same else "warn") for value in row.values)]

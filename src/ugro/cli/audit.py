"""``ugro audit``: who did what."""

from __future__ import annotations

import click

from ugro.cli.jobs.describe import local_time
from ugro.cli.jobs.moment import MOMENT, SINCE
from ugro.cli.output import Cell
from ugro.cli.session import Session, json_option, pass_session


@click.command()
@click.option("--since", type=MOMENT, metavar="TIME", help=SINCE)
@click.option("--user", help="Show only what this user did.")
@click.option("-n", "--limit", type=click.IntRange(1, 10_000), metavar="N", default=1000, help="Print the newest N.")
@json_option
@pass_session
def audit(session: Session, since: float | None, user: str | None, limit: int) -> None:
    """Show who did what, through commands and the dashboard.

    Each call that changes something has an entry: jobs that were submitted, cancelled or retried, commands on nodes,
    changed nodes and settings, sign-ins to the dashboard, also those that failed. The oldest first.

    \b
    Example:
      ugro audit --since 1d --user ann
    """
    output = session.output
    entries = session.client().audit(since_unix_s=since or 0, user=user, limit=limit)
    if output.is_json:
        output.document({"audit": entries})
        return
    if not entries:
        output.note("no entries")
        return
    rows = [
        [
            Cell(local_time(one.at) if output.is_terminal else one.at),
            Cell(one.user, "id"),
            Cell(one.via),
            Cell(one.action, "bold"),
            Cell(one.subject),
            Cell(one.outcome, "" if one.outcome == "done" else "warn"),
        ]
        for one in entries
    ]
    output.table(("TIME", "USER", "VIA", "ACTION", "SUBJECT", "OUTCOME"), rows, spare=("VIA",))

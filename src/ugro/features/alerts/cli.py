"""``ugro alerts``: active alerts, past ones, and a test of the notification channels."""

from __future__ import annotations

import time

import click

from ugro.cli.jobs.describe import local_time
from ugro.cli.output import Cell, Style
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.features.alerts.model import Alert, Severity
from ugro.features.alerts.operations import ListAlerts, TestChannels
from ugro.kernel.support.quantities import format_duration

_SIGNS: dict[Severity, tuple[str, Style]] = {
    Severity.CRITICAL: ("✗", "bad"),
    Severity.WARNING: ("!", "warn"),
    Severity.INFO: ("✓", "good"),
}


@click.group(cls=CommandGroup)
def alerts() -> None:
    """Show alerts about nodes, and test notification channels."""


@alerts.command("ls")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(0, 10_000),
    metavar="N",
    default=10,
    show_default=True,
    help="Number of past events to show.",
)
@json_option
@pass_session
def list_(session: Session, limit: int) -> int:
    """List active alerts and past ones.

    Exit code: 0 if no alert is active, 1 if one is.
    """
    found = session.client().ask(ListAlerts(limit))
    on, events = found.alerts, found.events
    output = session.output
    if output.is_json:
        output.document(found)
        return 1 if on else 0
    if on:
        output.table(("", "SEVERITY", "NODE", "FOR", "ALERT"), [_row(alert) for alert in on])
    else:
        output.note("no active alerts")
    for event in reversed(events):
        output.text(f"{local_time(event.at)}  {event.text}")
    return 1 if on else 0


@alerts.command()
@click.argument("channels", nargs=-1)
@json_option
@pass_session
def test(session: Session, channels: tuple[str, ...]) -> int:
    """Send a test message to CHANNELS.

    Default: all channels of the cluster file, and the log. Exit code: 0 if all were sent, 1 if not.

    \b
    Example:
      ugro alerts test ops
    """
    client = session.client()
    session.output.progress("sending")
    tried = client.ask(TestChannels(channels)).channels
    if session.output.is_json:
        session.output.document({"channels": tried})
    else:
        for one in tried:
            session.output.text(f"{one.channel}: {'failed' if one.error else 'sent'}")
            if one.error:
                session.output.warn(one.error, one.hint)
    return 1 if any(one.error for one in tried) else 0


def _row(alert: Alert) -> list[Cell]:
    sign, style = _SIGNS[alert.severity]
    age_s = time.time() - (alert.started_at or alert.first_seen_at)
    return [
        Cell(sign, style),
        Cell(alert.severity, style),
        Cell(alert.node or "all", "bold"),
        Cell(format_duration(max(0.0, age_s)), is_number=True),
        Cell(alert.text),
    ]

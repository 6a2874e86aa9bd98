"""``ugro hooks``: what is called when something happens, a test of it, and the calls that were made."""

from __future__ import annotations

import click

from ugro.cli.jobs.describe import local_time
from ugro.cli.output import Cell, Style
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.features.hooks.model import Delivery, DeliveryState, HookName, HookReport
from ugro.features.hooks.operations import ListHookDeliveries, ListHooks, TestHook

_TEST_S = 120.0
_STYLES: dict[DeliveryState, Style] = {
    DeliveryState.DELIVERED: "good",
    DeliveryState.WAITING: "warn",
    DeliveryState.FAILED: "bad",
}


@click.group(cls=CommandGroup)
def hooks() -> None:
    """Show and test what is called when something happens."""


@hooks.command("ls")
@json_option
@pass_session
def list_(session: Session) -> None:
    """List the hooks of the cluster file."""
    found = session.client().ask(ListHooks()).hooks
    if session.output.is_json:
        session.output.document({"hooks": found})
    elif found:
        session.output.table(("HOOK", "WHEN", "CALL", "WAITING", "LAST", "NOTE"), [_row(hook) for hook in found])
    else:
        session.output.note("there are no hooks; they are defined in the cluster file, under hooks")


@hooks.command()
@click.argument("name", type=click.Choice([name.value for name in HookName]))
@json_option
@pass_session
def test(session: Session, name: str) -> None:
    """Call a hook once, with a sample whose field test is true.

    \b
    Example:
      ugro hooks test idle
    """
    session.output.progress(f"calling {name}")
    made = session.client().ask(TestHook(name), timeout_s=_TEST_S).id
    if session.output.is_json:
        session.output.document({"hook": name, "id": made})
    else:
        session.output.text(f"{name}: delivered ({made})")


@hooks.command()
@click.argument("name", required=False, type=click.Choice([name.value for name in HookName]))
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(0, 10_000),
    metavar="N",
    default=20,
    show_default=True,
    help="Number of deliveries to show.",
)
@json_option
@pass_session
def deliveries(session: Session, name: str | None, limit: int) -> None:
    """List the newest calls of all hooks, or of one."""
    found = session.client().ask(ListHookDeliveries(limit, name)).deliveries
    if session.output.is_json:
        session.output.document({"deliveries": found})
    elif found:
        session.output.table(("TIME", "HOOK", "STATE", "TRIES", "ID", "NOTE"), [_line(one) for one in reversed(found)])
    else:
        session.output.note("nothing was called yet")


def _row(hook: HookReport) -> list[Cell]:
    last = local_time(hook.last_at) if hook.last_at else ""
    return [
        Cell(hook.name, "bold"),
        Cell(hook.when),
        Cell(hook.call),
        Cell(str(hook.waiting), is_number=True),
        Cell(f"{last} {hook.last or ''}".strip(), _STYLES[hook.last] if hook.last else ""),
        Cell(hook.error),
    ]


def _line(one: Delivery) -> list[Cell]:
    return [
        Cell(local_time(one.created_at)),
        Cell(one.hook, "bold"),
        Cell(one.state, _STYLES[one.state]),
        Cell(str(one.tries), is_number=True),
        Cell(one.id, "id"),
        Cell(one.error),
    ]

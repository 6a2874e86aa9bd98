"""``ugro node sleep`` and ``ugro node wake``."""

from __future__ import annotations

import click

from ugro.cli import candidates
from ugro.cli.session import Session, json_option, pass_session
from ugro.features.power.operations import SuspendNode, WakeNode


@click.command()
@click.argument("name", shell_complete=candidates.node_names)
@json_option
@pass_session
def sleep(session: Session, name: str) -> None:
    """Suspend a node now, if nobody would miss it.

    A job that needs the node wakes it again. The cluster file says how: see power.
    """
    session.client().ask(SuspendNode(name))
    if session.output.is_json:
        session.output.document({"node": {"name": name, "power": "going to sleep"}})
    session.output.note(f"{name} is going to sleep; wake it with: ugro node wake {name}")


@click.command()
@click.argument("name", shell_complete=candidates.node_names)
@json_option
@pass_session
def wake(session: Session, name: str) -> None:
    """Wake a node that sleeps.

    Without jobs it is suspended again after power.suspend_after.
    """
    session.client().ask(WakeNode(name))
    if session.output.is_json:
        session.output.document({"node": {"name": name, "power": "waking"}})
    session.output.note(f"{name} is being woken; see: ugro node ls")

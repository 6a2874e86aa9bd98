"""``ugro relay``: the other end of a client's ssh. Loads little: every command of that client waits for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from ugro.cli.session import Session, pass_session
from ugro.features.remote_access.client.relay import Relay
from ugro.kernel.support.errors import UsageError
from ugro.kernel.support.state_dir import StateDir


@click.command()
@click.option("--socket", metavar="PATH", type=click.Path(path_type=Path), help="Socket of the agent; default: yours.")
@pass_session
def relay(session: Session, socket: Path | None) -> None:
    """Carry the connections of a client on another machine.

    Started by that client's ssh, and of no use by hand. It connects to the agent of your account, and starts it if
    none runs. The variable UGRO_SOCKET names another agent's socket, as --socket does.
    """
    if sys.stdin.isatty():
        raise UsageError("a relay is started by ssh, from another machine", hint="there: ugro login YOU@THIS-MACHINE")

    def start() -> None:
        client = session.own_client()
        client.agent()
        client.close()

    Relay(StateDir.find(os.environ), start, socket).run(0, 1)

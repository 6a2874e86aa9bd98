"""``ugro agent``: rarely needed, because every command starts the agent."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import BinaryIO

import click

from ugro.cli.output import Output
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.core.agent import AgentStatus
from ugro.core.errors import NotFound


@click.group(cls=CommandGroup)
def agent() -> None:
    """Start, stop and inspect the agent.

    The agent is the process on this machine that keeps the queue, starts jobs and watches nodes. Any command that needs
    it starts it.
    """


@agent.command()
@json_option
@pass_session
def start(session: Session) -> None:
    """Start the agent, if it is not running."""
    _show(session.output, session.new_client().agent())


@agent.command()
@json_option
@pass_session
def stop(session: Session) -> None:
    """Stop the agent. Jobs on the nodes keep running."""
    was_running = session.new_client().stop_agent()
    if session.output.is_json:
        session.output.document({"stopped": was_running})
    session.output.note("the agent has stopped" if was_running else "no agent was running")


@agent.command()
@json_option
@pass_session
def restart(session: Session) -> None:
    """Stop the agent and start it again, with the same cluster file.

    It then uses the UGRO_* variables of this command. Jobs on the nodes keep running.
    """
    _show(session.output, session.new_client().restart_agent())


@agent.command()
@json_option
@pass_session
def status(session: Session) -> int:
    """Show the running agent.

    Exit code: 0 if an agent runs, 5 if not.
    """
    found = session.new_client().running_agent()
    if found is None:
        if session.output.is_json:
            session.output.document({"agent": None})
        session.output.note("no agent is running; any command starts it, or: ugro agent start")
        return 5
    _show(session.output, found)
    return 0


@agent.command()
@click.option("-n", "--tail", type=click.IntRange(0), metavar="N", default=50, show_default=True, help="Print N lines.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@json_option
@pass_session
def logs(session: Session, tail: int, follow: bool) -> None:
    """Print the agent's log, one JSON object per line.

    Works without a running agent, too.
    """
    path = session.new_client().home.log
    try:
        log = path.open("rb")
    except OSError as error:
        raise NotFound(f"there is no log at {path}", hint="the agent writes it: ugro agent start") from error
    lines = log.read().splitlines(keepends=True)
    session.output.raw(b"".join(lines[-tail:] if tail else []))
    while follow:
        time.sleep(0.2)
        session.output.raw(log.read())
        if _is_replaced(log, path):
            session.output.raw(log.read())  # written before the log was replaced
            log.close()
            log = path.open("rb")
    log.close()


def _is_replaced(log: BinaryIO, path: Path) -> bool:
    """A full log is renamed, and a new one started."""
    return path.exists() and path.stat().st_ino != os.fstat(log.fileno()).st_ino


def _show(output: Output, status: AgentStatus) -> None:
    if output.is_json:
        output.document({"agent": status})
        return
    output.text(f"agent {status.version}, pid {status.pid}, since {status.started_at}")
    output.text(f"serves   {status.cluster_file or 'this machine (no cluster file)'}")
    output.text(f"nodes    {status.nodes_connected} of {status.nodes} connected")
    output.text(f"home     {status.home}")
    if status.config_error:
        output.warn(f"{status.config_error} (the last valid configuration stays in use)", status.config_hint)

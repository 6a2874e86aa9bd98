"""``ugro login`` and ``ugro logout``: using the agent of another machine."""

from __future__ import annotations

import os
from contextlib import closing

import click

from ugro.cli.session import Session, json_option, pass_session
from ugro.features.remote_access.client.agent import RemoteAgent
from ugro.features.remote_access.client.master import LOCAL, MASTER_VARIABLE, chosen_master, forget, remember
from ugro.kernel.support.errors import UsageError
from ugro.kernel.support.state_dir import StateDir


@click.command()
@click.argument("master", metavar="[USER@]HOST")
@click.option("--master-ugro", "command", metavar="PATH", help="Path of ugro there, if it is not in the PATH.")
@json_option
@pass_session
def login(session: Session, master: str, command: str | None) -> None:
    """Use the agent of another machine from now on.

    MASTER is a host as ssh takes it. Every command then works with the agent there, over ssh: your keys, your ssh
    configuration, your account on that machine. Nothing has to be opened there. `ugro logout` ends it.

    \b
    Examples:
      ugro login ann@gpu-master
      ugro login gpu-master --master-ugro /opt/ugro/bin/ugro
    """
    if master == LOCAL:
        raise UsageError("'local' means this machine", hint="to use it again: ugro logout")
    home = StateDir.find(os.environ)
    chosen = chosen_master(os.environ, home, named=master, command=command or session.named_command)
    assert chosen is not None
    with closing(RemoteAgent(chosen, home, on_wait=session.output.progress)) as reach:
        agent, there = reach.agent(), reach.link.banner
    remember(home, chosen)
    session.output.end_progress()
    if session.output.is_json:
        about = {"address": chosen.address, "user": there.user, "host": there.host, "version": there.version}
        session.output.document({"master": about})
        return
    nodes = f"{agent.nodes} node{'' if agent.nodes == 1 else 's'}"
    session.output.note(f"using {chosen} from now on: ugro {there.version}, account {there.user}, {nodes}")
    if os.environ.get(MASTER_VARIABLE):
        session.output.warn(f"{MASTER_VARIABLE} is set, and overrides it", f"unset {MASTER_VARIABLE}")


@click.command()
@json_option
@pass_session
def logout(session: Session) -> None:
    """Use this machine's own agent again."""
    known = forget(StateDir.find(os.environ))
    if session.output.is_json:
        session.output.document({"master": None})
        return
    session.output.note(f"{known} is not used any more" if known else "no other machine was used")

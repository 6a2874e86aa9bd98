"""``ugro allow`` and ``ugro deny``: whether a cluster file that was found in a folder is used."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ugro.cli import candidates
from ugro.cli.output import Output
from ugro.cli.session import Session, allowance_facts, json_option, pass_session
from ugro.core.errors import NotFound, Unallowed, UsageError

_FILE = click.argument("file", required=False, type=click.Path(path_type=Path), shell_complete=candidates.files)


@click.command()
@_FILE
@click.option("--yes", "-y", is_flag=True, help="Allow it without asking.")
@json_option
@pass_session
def allow(session: Session, file: Path | None, yes: bool) -> int:
    """Allow a cluster file that was found in a folder.

    Shows which commands FILE runs on this machine, which hosts it sends code to, and what else it opens or deletes,
    and asks. FILE is by default the one for the current folder.

    A file that comes with a repository may be somebody else's work: it is not used until you allow it. After an edit of
    those parts, the last allowed configuration stays in use until you allow the new one. Your own ~/.ugro/cluster.yaml,
    a file that you name with --cluster or UGRO_CLUSTER, and one that ugro init wrote need no allowance.

    With --json there is no question: without --yes it is printed and not allowed, with exit code 2.
    """
    from ugro.client.allowances import allow as record
    from ugro.client.allowances import require

    client = session.new_client(any_cluster=True)
    path = _path(session, file)
    try:
        lines, was_allowed = require(client.home, path), True
    except Unallowed as error:
        if not _is_wanted(session.output, error, yes=yes):
            return error.exit_code
        record(client.home, error)
        lines, was_allowed = error.lines, False
    if client.running_agent() is not None:
        client.reload_cluster()
    if session.output.is_json:
        session.output.document({"cluster_file": {"path": str(path), "allowed": True, "effects": lines}})
    session.output.note(f"{path} {'was already allowed' if was_allowed else 'is allowed; undo with: ugro deny'}")
    return 0


@click.command()
@_FILE
@json_option
@pass_session
def deny(session: Session, file: Path | None) -> None:
    """Withdraw the allowance of a cluster file.

    FILE is by default the one for the current folder. A running agent that uses it keeps its configuration until it is
    stopped.
    """
    from ugro.client.allowances import deny as withdraw

    client = session.new_client(any_cluster=True)
    path = _path(session, file)
    was_allowed = withdraw(client.home, path)
    if session.output.is_json:
        session.output.document({"cluster_file": {"path": str(path), "allowed": False}})
    session.output.note(f"{path} {'is no longer allowed' if was_allowed else 'was not allowed'}")
    agent = client.running_agent()
    if agent is not None and agent.cluster_file and path.exists() and os.path.samefile(path, agent.cluster_file):
        session.output.note("the running agent still uses it; to stop it: ugro agent stop")


def _is_wanted(output: Output, error: Unallowed, *, yes: bool) -> bool:
    if yes:
        output.note(*allowance_facts(error))
        return True
    if output.is_json:
        document = {"path": error.file, "allowed": False, "effects": error.lines, "news": error.news}
        output.document({"cluster_file": document})
        output.complain(error)
        return False
    if not output.can_ask:
        output.note(*allowance_facts(error))
        raise UsageError("cannot ask here: stdin is not a terminal", hint="allow it without asking: --yes")
    if not output.confirm(allowance_facts(error), "Allow it?"):
        output.note("not allowed; nothing was changed")
        return False
    return True


def _path(session: Session, file: Path | None) -> Path:
    from ugro.client.clusterfile import nearest_cluster_file
    from ugro.core.support.state_dir import StateDir

    if (named := file or session.cluster) is not None:
        return named.expanduser().absolute()
    found = nearest_cluster_file(os.environ, Path.cwd(), StateDir.find(os.environ))
    if found.path is None or not found.is_found:
        raise NotFound("there is no cluster file in this folder or above it", hint="name it: ugro allow FILE")
    return found.path

"""``ugro store``: where the agent's state is kept, and moving it."""

from __future__ import annotations

from pathlib import Path

import click

from ugro.cli.output import Output
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.kernel.agent.model import Moved, StoreStatus
from ugro.kernel.support.errors import NotAllowed
from ugro.kernel.support.quantities import format_size


@click.group(cls=CommandGroup)
def store() -> None:
    """Show where the agent's state is kept, or move it.

    The state (the queue, jobs and their history, notes, sweeps, services) is in the SQLite file state.db in the state
    directory, or in a PostgreSQL database. Logs, results and metrics stay in the state directory.
    """


@store.command()
@json_option
@pass_session
def status(session: Session) -> int:
    """Show where the state is, whether the agent runs or not.

    Exit code: 0, or 5 if its server does not answer.
    """
    found = session.new_client().stores.status()
    if session.output.is_json:
        session.output.document({"store": found})
    else:
        _show(session.output, found)
    return 5 if found.problem else 0


@store.command()
@click.option("--to", required=True, metavar="URL", help="postgresql://USER@HOST/DATABASE, or the word sqlite.")
@click.option("--password-file", type=click.Path(path_type=Path), help="A file that holds the password for URL.")
@click.option("--yes", "-y", is_flag=True, help="Stop a running agent without asking.")
@json_option
@pass_session
def migrate(session: Session, to: str, password_file: Path | None, yes: bool) -> None:
    """Move the state to a PostgreSQL database, or back to SQLite.

    All rows are copied in one transaction, and compared. The target must be empty. What was there before is kept, but
    not used any more. A running agent is stopped first; jobs on the nodes keep running, and the next command starts the
    agent again, with the new store.

    A password is never part of URL: use --password-file, PGPASSFILE or PGPASSWORD.

    \b
    Examples:
      ugro store migrate --to postgresql://ugro@db.example/ugro --password-file ~/.ugro/db.password
      ugro store migrate --to sqlite
    """
    client, output = session.new_client(), session.output
    if client.running_agent() is not None:
        client.stores.check(to, password_file)  # before the agent is stopped for nothing
        _ask_to_stop(output, is_sure=yes)
        client.stop_agent(keeps_cluster=True)
    moved = client.stores.move(to, password_file)
    if output.is_json:
        output.document({"moved": moved})
    else:
        _show_moved(output, moved)


def _ask_to_stop(output: Output, *, is_sure: bool) -> None:
    if is_sure:
        return
    if not output.can_ask or not output.confirm(["The agent runs. Jobs on the nodes keep running."], "Stop it?"):
        raise NotAllowed("an agent runs", hint="stop it first: ugro agent stop; or use --yes")


def _show(output: Output, found: StoreStatus) -> None:
    kind = f"PostgreSQL {found.version}".rstrip() if found.kind == "postgresql" else "SQLite"
    output.text(f"store    {kind}, {found.where}")
    if found.problem:
        output.warn(f"it does not answer: {found.problem}")
        return
    output.text(f"size     {format_size(found.bytes)}, schema {found.schema}")
    if found.used_by:
        output.text(f"used by  {found.used_by}")


def _show_moved(output: Output, moved: Moved) -> None:
    output.note(f"moved {moved.rows} rows of {moved.tables} tables to {moved.where}, and compared them")
    output.note(f"what was there before is kept as {moved.before}, and not used any more")
    output.note("the next command starts the agent with it")

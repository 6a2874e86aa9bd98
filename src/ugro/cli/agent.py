"""``ugro agent``: rarely needed, because every command starts the agent."""

from __future__ import annotations

import os
import pwd
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import click

from ugro.cli.jobs.describe import local_time
from ugro.cli.output import Cell, Output
from ugro.cli.session import CommandGroup, Session, json_option, pass_session, warn_of_safe_mode
from ugro.client.launcher import is_locked
from ugro.client.service import Service, Unit, command, lingers
from ugro.features.safe_mode.cli import reconcile, show_safe_mode
from ugro.kernel.agent.model import AgentStatus, Backup, Restored
from ugro.kernel.support.errors import NotAllowed, NotFound, UsageError
from ugro.kernel.support.quantities import format_size
from ugro.kernel.support.state_dir import CLUSTER_FILE, CLUSTER_VARIABLE, StateDir

# --- install ----------------------------------------------------------------------------------------------------------
# ``ugro agent install`` and ``uninstall``: the agent as a service of systemd.


_system_option = click.option(
    "--system", "is_system", is_flag=True, help="A unit of the whole system, which root installs."
)
_user_option = click.option(
    "--user", metavar="NAME", help="With --system: whose agent it is. By default the user who called sudo."
)


@dataclass(frozen=True, slots=True)
class _Account:
    name: str
    folder: Path
    home: StateDir


@click.command()
@_system_option
@_user_option
@click.option(
    "--sandbox/--no-sandbox",
    "sandbox",
    default=None,
    help="Restrict what the agent may do. By default if every node is reached by ssh: jobs on this machine would be "
    "restricted, too.",
)
@click.option("--print", "is_print", is_flag=True, help="Print the unit, and change nothing.")
@json_option
@pass_session
def install(session: Session, is_system: bool, user: str | None, sandbox: bool | None, is_print: bool) -> None:
    """Run the agent as a systemd service.

    It then starts with the machine, and again after a crash. Without --system it is a unit of your own systemd.
    Running it again brings the unit up to date. Jobs keep running when the service is restarted, stopped or removed.

    \b
    Examples:
      ugro agent install
      sudo ugro agent install --system --user ann
      ugro agent install --print
    """
    account = _account(is_system, user)
    unit = _unit(session, account, is_system=is_system, sandbox=sandbox)
    if is_print:
        session.output.raw(unit.text().encode())
        return
    service = _service(account, is_system=is_system)
    service.expect_ours(account.home.path)
    if not service.is_for(account.home) and is_locked(account.home):
        if is_system:
            hint = f"stop it first: sudo -u {account.name} ugro agent stop; jobs on the nodes keep running"
            raise NotAllowed(f"an agent of {account.name} runs already", hint=hint)
        session.new_client().stop_agent(keeps_cluster=True)
    is_new = service.install(unit)
    _show(session.output, service, account, is_new=is_new)


@click.command()
@_system_option
@_user_option
@json_option
@pass_session
def uninstall(session: Session, is_system: bool, user: str | None) -> None:
    """Stop the agent's service and remove its unit.

    State, logs and results stay, and jobs on the nodes keep running. The next command starts the agent again, without
    a service.
    """
    account = _account(is_system, user)
    service = _service(account, is_system=is_system)
    was_there = service.uninstall(account.home.path)
    if session.output.is_json:
        session.output.document({"uninstalled": was_there})
    if was_there:
        session.output.note(f"removed {service.path}", f"the state in {account.home.path} is as it was")
    else:
        session.output.note(f"the service is not installed: there is no {service.path}")


def _account(is_system: bool, user: str | None) -> _Account:
    if user is not None and not is_system:
        raise UsageError("--user belongs to --system", hint="sudo ugro agent install --system --user NAME")
    if not is_system:
        entry = pwd.getpwuid(os.getuid())
        return _Account(entry.pw_name, Path(entry.pw_dir), StateDir.find(os.environ))
    name = user or os.environ.get("SUDO_USER")
    if name is None:
        hint = "name the user whose agent it is: --user NAME; it runs jobs and reaches nodes as this user"
        raise UsageError("--system needs a user", hint=hint)
    try:
        entry = pwd.getpwnam(name)
    except KeyError as error:
        raise NotFound(f"there is no user {name}", hint="see: getent passwd") from error
    chosen = os.environ.get("UGRO_HOME")
    return _Account(name, Path(entry.pw_dir), StateDir(Path(chosen or f"{entry.pw_dir}/.ugro").absolute()))


def _service(account: _Account, *, is_system: bool) -> Service:
    if is_system and os.geteuid() != 0:
        hint = f"sudo ugro agent install --system --user {account.name}; or without --system, for yourself"
        raise NotAllowed("only root installs a unit of the whole system", hint=hint)
    return Service.of_system(account.name) if is_system else Service.of_user(os.environ)


def _unit(session: Session, account: _Account, *, is_system: bool, sandbox: bool | None) -> Unit:
    from ugro.client.before_agent import runs_jobs_here  # reads configurations: other commands do without

    cluster = _cluster_file(session, account)
    runs_jobs = runs_jobs_here(cluster) if sandbox is None else not sandbox
    # Host keys are kept there, and wheels of environments; a cluster file is changed by `ugro node add`.
    folders = [account.folder / ".ssh", account.folder / ".cache", *([cluster.parent] if cluster else [])]
    return Unit(
        account.home.path,
        tuple(command(sys.executable, account.home.path, cluster)),
        account.name if is_system else None,
        runs_jobs,
        tuple(folder for folder in dict.fromkeys(folders) if not folder.is_relative_to(account.home.path)),
    )


def _cluster_file(session: Session, account: _Account) -> Path | None:
    """The one that was named, else the user's own. One of a folder is not: a service has no folder."""
    named = session.cluster or os.environ.get(CLUSTER_VARIABLE)
    if named:
        path = Path(named).expanduser().absolute()
        if not path.is_file():
            raise NotFound(f"{path}: no such cluster file", hint="write one: ugro init")
        return path
    own = account.home.path / CLUSTER_FILE
    return own if own.is_file() else None


def _show(output: Output, service: Service, account: _Account, *, is_new: bool) -> None:
    is_lasting = service.is_system or lingers(account.name)
    if output.is_json:
        output.document({"service": {"unit": service.name, "path": str(service.path), "lingers": is_lasting}})
    word = "installed" if is_new else "already installed"
    output.note(f"{word}: {service.path}", f"see: {service.command} status {service.name}")
    if not is_lasting:
        output.warn(
            f"the service ends when {account.name} logs out, with jobs on this machine, and does not start at boot",
            f"sudo loginctl enable-linger {account.name}",
        )


# --- agent ------------------------------------------------------------------------------------------------------------


@click.group(cls=CommandGroup)
@click.pass_context
def agent(ctx: click.Context) -> None:
    """Start, stop and inspect the agent.

    The agent is the process on this machine that keeps the queue, starts jobs and watches nodes. Any command that needs
    it starts it.
    """
    session = ctx.find_object(Session)
    if session is not None and ctx.invoked_subcommand not in (None, "status", "reconcile"):
        session.expect_local(f"agent {ctx.invoked_subcommand}")


for one in (reconcile, install, uninstall):
    agent.add_command(one)


@agent.command()
@json_option
@pass_session
def start(session: Session) -> None:
    """Start the agent, if it is not running."""
    _agent_show(session.output, session.new_client().agent())


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
    _agent_show(session.output, session.new_client().restart_agent())


@agent.command()
@json_option
@pass_session
def status(session: Session) -> int:
    """Show the running agent.

    Exit code: 0 if an agent runs, 5 if not.
    """
    client = session.new_client()
    found = client.running_agent()
    if client.is_elsewhere:
        session.output.note(f"on {client.master}, over ssh")
    if found is None:
        if session.output.is_json:
            session.output.document({"agent": None})
        session.output.note("no agent is running; any command starts it, or: ugro agent start")
        return 5
    _agent_show(session.output, found)
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
    path = session.new_client().reach.own("reading the agent's log").home.log
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


@agent.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@json_option
@pass_session
def backup(session: Session, file: Path | None) -> None:
    """Back up the agent's state, whether the agent runs or not.

    The backup is one file: the queue, all jobs and their history, and what makes this agent known to its nodes. It does
    not hold logs, results or metrics. Without FILE it joins the backups that the agent makes and removes by itself.

    \b
    Examples:
      ugro agent backup
      ugro agent backup /mnt/safe/ugro.db
    """
    made = session.new_client().backups.make(file)
    if session.output.is_json:
        session.output.document({"backup": made})
    session.output.note(f"backed up {_jobs(made)} to {made.path}")


@agent.command()
@click.argument("file", required=False)
@click.option("--list", "is_list", is_flag=True, help="List the backups that the agent keeps.")
@click.option("--latest", is_flag=True, help="Restore the newest good backup.")
@click.option("--empty", is_flag=True, help="Begin with an empty state.")
@click.option("--yes", "-y", is_flag=True, help="Stop a running agent without asking.")
@json_option
@pass_session
def restore(session: Session, file: str | None, is_list: bool, latest: bool, empty: bool, yes: bool) -> int:
    """Restore the agent's state from a backup.

    FILE is a path, or a name from --list. The present state is set aside, not deleted. A running agent is stopped
    first; jobs on the nodes keep running.

    \b
    Examples:
      ugro agent restore --list
      ugro agent restore --latest
    """
    if sum((file is not None, is_list, latest, empty)) != 1:
        raise UsageError("name one FILE, or one of --list, --latest, --empty", hint="see: ugro agent restore --list")
    client, output = session.new_client(), session.output
    if is_list:
        _list(output, client.backups.all())
        return 0
    if client.running_agent() is not None:
        if not empty:
            client.backups.find(file)  # before the agent is stopped for nothing
        _ask_to_stop(output, is_sure=yes)
        client.stop_agent(keeps_cluster=True)
    restored = client.backups.begin_empty() if empty else client.backups.restore(file)
    if output.is_json:
        output.document({"restored": restored})
    else:
        _show_restored(output, restored)
    return 0


def _ask_to_stop(output: Output, *, is_sure: bool) -> None:
    if is_sure:
        return
    refused = NotAllowed("an agent runs", hint="stop it first: ugro agent stop; or use --yes")
    if not output.can_ask or not output.confirm(["The agent runs. Jobs on the nodes keep running."], "Stop it?"):
        raise refused


def _list(output: Output, found: Sequence[Backup]) -> None:
    if output.is_json:
        output.document({"backups": found})
        return
    if not found:
        output.note("there are no backups yet; the agent makes one about every 10 minutes if something has changed")
        return
    output.table(("MADE", "SIZE", "JOBS", "NAME", "STATE"), [_row(one) for one in found])


def _row(one: Backup) -> tuple[Cell, ...]:
    return (
        Cell(local_time(one.made_at)),
        Cell(format_size(one.bytes), is_number=True),
        Cell("-" if one.problem else str(one.jobs), is_number=True),
        Cell(Path(one.path).name),
        Cell(one.problem or "good"),
    )


def _show_restored(output: Output, restored: Restored) -> None:
    if restored.backup is None:
        output.note("the state is empty now")
    else:
        made = restored.backup
        output.note(f"restored {_jobs(made)} from {made.path}, made {local_time(made.made_at)}")
    if restored.aside:
        output.note(f"the state that was there is kept as {restored.aside[0]}")
    output.note(
        "the next command starts the agent with this state; what happened after the backup is not in it",
        "jobs that wait in it start, unless a node has run them since: cancel what is not wanted any more",
        "if that was more than this state knows, the agent starts in safe mode: ugro agent reconcile",
    )


def _jobs(made: Backup) -> str:
    newest = f" (the newest is {made.newest_job})" if made.newest_job else ""
    return f"{made.jobs} {'job' if made.jobs == 1 else 'jobs'}{newest}"


def _is_replaced(log: BinaryIO, path: Path) -> bool:
    """A full log is renamed, and a new one started."""
    return path.exists() and path.stat().st_ino != os.fstat(log.fileno()).st_ino


def _show_addresses(output: Output, status: AgentStatus) -> None:
    """Of its other doors: where they are, or why they are closed."""
    if status.team_socket:
        output.text(f"team     UGRO_SOCKET={status.team_socket}")
    if status.api_url:
        output.text(f"api      {status.api_url}")
    for problem in filter(None, (status.team_problem, status.api_problem)):
        output.warn(problem)


def _agent_show(output: Output, status: AgentStatus) -> None:
    if output.is_json:
        output.document({"agent": status})
        return
    output.text(f"agent {status.version}, pid {status.pid}, since {status.started_at}")
    output.text(f"serves   {status.cluster_file or 'this machine (no cluster file)'}")
    output.text(f"nodes    {status.nodes_connected} of {status.nodes} connected")
    output.text(f"home     {status.home}")
    if status.store.startswith("postgres"):
        output.text(f"store    {status.store}")
    _show_addresses(output, status)
    if status.last_backup:
        output.text(f"backup   {local_time(status.last_backup)}")
    if status.safe_mode is not None:
        show_safe_mode(output, status.safe_mode)
        warn_of_safe_mode(output, status.safe_mode)
    if (stood := status.stood_still) is not None:
        text = f"it stood still for {stood.seconds:g} s until {local_time(stood.at)}: {stood.where}"
        output.warn(text, "please report it with the end of: ugro agent logs")
    if status.backup_problem:
        output.warn(f"no backup could be made: {status.backup_problem}")
    if status.disk_problem:
        output.warn(status.disk_problem, status.disk_hint)
    if status.state_error:
        output.warn(status.state_error, status.state_hint)
    if status.config_error:
        output.warn(f"{status.config_error} (the last valid configuration stays in use)", status.config_hint)

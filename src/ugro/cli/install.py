"""``ugro agent install`` and ``uninstall``: the agent as a service of systemd."""

from __future__ import annotations

import os
import pwd
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.launcher import is_locked
from ugro.client.service import Service, lingers
from ugro.client.unit import Unit, command
from ugro.core.errors import NotAllowed, NotFound, UsageError
from ugro.core.support.state_dir import CLUSTER_FILE, CLUSTER_VARIABLE, StateDir

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
    from ugro.client.cluster_nodes import runs_jobs_here  # reads configurations: other commands do without

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

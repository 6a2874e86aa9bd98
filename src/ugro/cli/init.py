"""``ugro init``: writes a first cluster.yaml, after trying to reach the hosts."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from ugro.cli import health
from ugro.cli.output import Output, clean
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.clusterfile import find_cluster_file
from ugro.client.machines import with_second_names
from ugro.core.errors import NotFound, UgroError, UsageError
from ugro.core.node import NodeReport, Status
from ugro.core.support.destination import Destination
from ugro.core.support.quantity import format_size
from ugro.core.support.state_dir import CLUSTER_FILE, CLUSTER_VARIABLE, StateDir

_SSH_CONFIG = "~/.ssh/config"
_OWN_CONFIG = f"without the option, {_SSH_CONFIG} is read"


@click.command()
@click.argument("hosts", nargs=-1)
@click.option("--ssh-config", help="ssh configuration to read and to use; default: ~/.ssh/config.")
@click.option("--output", type=click.Path(path_type=Path), help="File to write; default: ./cluster.yaml.")
@click.option("--local/--no-local", default=True, show_default=True, help="Add this machine as a node, too.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@json_option
@pass_session
def init(
    session: Session, hosts: tuple[str, ...], ssh_config: str | None, output: Path | None, local: bool, force: bool
) -> int:
    """Write a first cluster.yaml from your SSH hosts.

    Tries to reach HOSTS (NAME, USER@HOST or USER@HOST:PORT), or the hosts in ~/.ssh/config, all at once. HOSTS that you
    name are all written; from ~/.ssh/config, only those that answer become nodes, and the others become comments.

    \b
    Examples:
      ugro init
      ugro init gpu1 ann@10.0.0.7
    """
    path = output or session.cluster or Path(os.environ.get(CLUSTER_VARIABLE) or CLUSTER_FILE)
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} exists already", hint=f"edit it, or overwrite it: {_again(session, output)}")
    ssh_config = _existing(ssh_config) if ssh_config else None
    _check_writable(path)
    reports = with_second_names(_examine(session, hosts, ssh_config), has_local=local)
    if not reports and not local:
        raise NotFound(f"no hosts in {ssh_config or _SSH_CONFIG}", hint="name some: ugro init gpu1 me@10.0.0.7")
    _write(path, _render(reports, ssh_config, has_local=local, is_explicit=bool(hosts)))
    if reports or session.output.is_json:
        _show(session.output, reports)
    else:
        session.output.note(f"no hosts in {ssh_config or _SSH_CONFIG}; the file has this machine only")
    session.output.note(f"wrote {path}; next: {_next(path)}")
    return 0


def _show(output: Output, reports: Sequence[NodeReport]) -> None:
    health.show(output, [report for report in reports if output.is_json or report.same_as is None])
    for report in reports:
        if report.same_as is not None:
            output.note(f"{report.name}: the same machine as {report.same_as}: written as a comment")


def _again(session: Session, output: Path | None) -> str:
    if output is None and session.cluster is not None:
        return f"ugro --cluster {shlex.quote(str(session.cluster))} init --force"
    return "ugro init --force" + (f" --output {shlex.quote(str(output))}" if output else "")


def _next(path: Path) -> str:
    """A plain ``ugro health`` may use another file: that of a lab, or of another folder."""
    found = find_cluster_file(None, os.environ, Path.cwd(), StateDir.find(os.environ)).path
    is_found = found is not None and found.exists() and found.samefile(path)
    return "ugro health" if is_found else f"ugro --cluster {shlex.quote(str(path))} health"


def _existing(ssh_config: str) -> str:
    path = os.path.abspath(os.path.expanduser(ssh_config))
    if not os.path.exists(path):
        raise UsageError(f"--ssh-config {ssh_config}: no such file", hint=_OWN_CONFIG)
    if os.path.isdir(path) or not os.access(path, os.R_OK):
        raise UsageError(f"--ssh-config {ssh_config}: cannot be read", hint=_OWN_CONFIG)
    return path


def _check_writable(path: Path) -> None:
    """Checked before the hosts are tried, which takes a while."""
    folder = path.parent
    _make_if_own(folder)
    hint = None
    if not os.path.exists(folder):
        problem, hint = errno.ENOENT, f"create its directory first: mkdir -p {shlex.quote(str(folder))}"
    elif not os.path.isdir(folder):
        problem = errno.ENOTDIR
    elif os.path.isdir(path):
        problem = errno.EISDIR
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        problem = errno.EACCES
    else:
        return
    raise _unwritable(path, os.strerror(problem), hint)


def _make_if_own(folder: Path) -> None:
    """Creates the state directory, if the file goes there: this may be the first command."""
    state = StateDir.find(os.environ)
    if Path(os.path.abspath(folder)) == state.path:
        try:
            state.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise state.unusable(error) from error


def _unwritable(path: Path, problem: str, hint: str | None = None) -> UgroError:
    return UgroError(f"{path} cannot be written: {problem.lower()}", hint=hint)


def _examine(session: Session, hosts: tuple[str, ...], ssh_config: str | None) -> list[NodeReport]:
    # With any cluster: the file to be written may not exist yet, or may be invalid.
    client = session.new_client(any_cluster=True)
    wanted = list(dict.fromkeys(hosts)) or client.ssh_hosts(ssh_config)
    reports: list[NodeReport] = []
    session.output.progress(f"trying {len(wanted)} hosts")
    for report in client.examine(wanted, ssh_config):
        reports.append(report)
        session.output.progress(f"tried {len(reports)} of {len(wanted)} hosts")
    return sorted(reports, key=lambda report: wanted.index(report.name))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error


def _render(reports: Sequence[NodeReport], ssh_config: str | None, *, has_local: bool, is_explicit: bool) -> str:
    names: set[str] = set()
    distinct = [report for report in reports if report.same_as is None]
    answering = [report for report in distinct if is_explicit or report.status is not Status.UNREACHABLE]
    lines = ["# The machines of this cluster. Edit it at any time: the agent reads changes by itself.", "nodes:"]
    if has_local or not answering:
        name = _unique(os.uname().nodename, names)
        lines.append(f"  {name}: {{transport: local, role: master}}  # this machine")
    lines += [("  " if report in answering else "  # ") + _entry(report, names) for report in distinct]
    second = [f"{report.name}: the same machine as {report.same_as}" for report in reports if report.same_as]
    lines += [f"  # {_on_one_line(text)}" for text in second]
    if ssh_config:
        lines += ["ssh:", f"  config_file: {json.dumps(ssh_config)}"]
    return "\n".join(lines) + "\n"


def _entry(report: NodeReport, names: set[str]) -> str:
    destination = Destination.parse(report.name)
    name = _unique(destination.host, names)
    fields = {
        "host": json.dumps(destination.host) if name != destination.host else None,
        "user": json.dumps(destination.user) if destination.user else None,
        "port": str(destination.port) if destination.port else None,
    }
    text = ", ".join(f"{key}: {value}" for key, value in fields.items() if value is not None)
    return f"{name}:" + (f" {{{text}}}" if text else "") + f"  # {_remark(report)}"


def _remark(report: NodeReport) -> str:
    if report.facts is None or report.machine is None:
        return _on_one_line(str(report.error))
    gpus = ", ".join(gpu.model for gpu in report.facts.gpus) or "no GPU"
    size = format_size(report.machine.memory_total_bytes)
    return _on_one_line(f"{gpus}; {report.machine.cores} cores, {size}")


def _on_one_line(text: str) -> str:
    """A comment ends with its line, and YAML allows no control characters in it."""
    return re.sub(r"\s+", " ", clean(text))


def _unique(host: str, names: set[str]) -> str:
    """A node name made from a host name; no name is used twice."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", host).strip("-._")[:50] or "node"
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", base):  # a number to other readers of YAML
        base = f"node-{base}"
    name, number = base, 2
    while name in names:
        name, number = f"{base}-{number}", number + 1
    names.add(name)
    return name

"""``ugro init``: a first cluster.yaml, from hosts that were tried and not only typed in."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import click

from ugro.cli import health
from ugro.cli.session import Session, json_option, pass_session
from ugro.core.errors import NotFound, UsageError
from ugro.core.node import NodeReport, Status
from ugro.core.quantity import format_size


@click.command()
@click.argument("hosts", nargs=-1)
@click.option("--ssh-config", help="The ssh configuration to read and to use; default: ~/.ssh/config.")
@click.option("--output", type=click.Path(path_type=Path), help="Where to write it; default: ./cluster.yaml.")
@click.option("--local/--no-local", default=True, show_default=True, help="Make this machine a node, too.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@json_option
@pass_session
def init(
    session: Session, hosts: tuple[str, ...], ssh_config: str | None, output: Path | None, local: bool, force: bool
) -> int:
    """Write a first cluster.yaml from HOSTS (NAME, USER@HOST or USER@HOST:PORT), or from ~/.ssh/config.

    All are tried at once. From ~/.ssh/config only those that answer become nodes, the others are noted as comments;
    HOSTS you name are all written.
    """
    path = output or session.cluster or Path("cluster.yaml")
    if path.exists() and not force:
        raise UsageError(f"{path} is there already", hint="edit it, or write over it: ugro init --force")
    session.cluster = None  # it need not exist yet
    ssh_config = str(Path(ssh_config).expanduser().absolute()) if ssh_config else None
    client = session.client()
    wanted = list(dict.fromkeys(hosts)) or client.ssh_hosts(ssh_config)
    if not wanted and not local:
        raise NotFound("no hosts in ~/.ssh/config", hint="name some: ugro init gpu1 me@10.0.0.7")
    reports = []
    for report in client.examine(wanted, ssh_config):
        reports.append(report)
        session.output.progress(f"tried {len(reports)} of {len(wanted)} hosts")
    reports.sort(key=lambda report: wanted.index(report.name))
    path.write_text(_render(reports, ssh_config, has_local=local, is_explicit=bool(hosts)))
    health.show(session.output, reports)
    session.output.note(f"wrote {path}; next: ugro health")
    return 0


def _render(reports: Sequence[NodeReport], ssh_config: str | None, *, has_local: bool, is_explicit: bool) -> str:
    lines = ["# The machines of this cluster. Edit it at any time: the agent takes changes up by itself.", "nodes:"]
    names: set[str] = set()
    if has_local:
        name = _unique(os.uname().nodename, names)
        lines.append(f"  {name}: {{transport: local, role: master}}  # this machine")
    for report in reports:
        is_node = is_explicit or report.status is not Status.UNREACHABLE
        lines.append(("  " if is_node else "  # ") + _entry(report, names))
    if len(lines) == 2:
        lines.append(f"  {_unique(os.uname().nodename, names)}: {{transport: local, role: master}}  # this machine")
    if ssh_config:
        lines += ["ssh:", f"  config_file: {json.dumps(ssh_config)}"]
    return "\n".join(lines) + "\n"


def _entry(report: NodeReport, names: set[str]) -> str:
    user, _, rest = report.name.rpartition("@")
    host, _, port = rest.partition(":")
    name = _unique(host, names)
    fields = {}
    if name != host:
        fields["host"] = host
    if user:
        fields["user"] = user
    if port:
        fields["port"] = port
    text = ", ".join(f"{key}: {json.dumps(value) if key != 'port' else value}" for key, value in fields.items())
    return f"{name}:" + (f" {{{text}}}" if text else "") + f"  # {_remark(report)}"


def _remark(report: NodeReport) -> str:
    if report.status is Status.UNREACHABLE or report.facts is None or report.machine is None:
        return re.sub(r"\s+", " ", f"{report.error}")
    gpus = ", ".join(gpu.name for gpu in report.facts.gpus) or "no GPU"
    return f"{gpus}; {report.machine.cores} cores, {format_size(report.machine.memory_total_bytes)}"


def _unique(host: str, names: set[str]) -> str:
    """A node name made of a host name: an address becomes a word, and no name is taken twice."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", host).strip("-._")[:60] or "node"
    name, number = base, 2
    while name in names:
        name, number = f"{base}-{number}", number + 1
    names.add(name)
    return name

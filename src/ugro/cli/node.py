"""``ugro node``: the nodes of the cluster."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ugro.cli import candidates, health, host_keys
from ugro.cli.output import Cell, Output
from ugro.cli.session import ExtendedGroup, Session, json_option, pass_session
from ugro.features.hardware import cli as figures
from ugro.features.hardware.operations import GetNodeHardware
from ugro.features.health import cli as doctor
from ugro.features.power.model import OwnerReport
from ugro.kernel.agent.operations import AddNode, DrainNode, GetAgentStatus, ReloadClusterFile, RemoveNode, ResumeNode
from ugro.kernel.files.operations import RemoveUnusedCode
from ugro.kernel.links.model import NodeReport, Status, by_name
from ugro.kernel.links.operations import CheckHealth, GetHostKey, TrustHostKey
from ugro.kernel.support.errors import UsageError
from ugro.kernel.support.quantities import format_duration, format_size


@click.group(cls=ExtendedGroup)
def node() -> None:
    """Manage nodes: list, show, add, trust, drain, set up, measure."""


@node.command()
@json_option
@pass_session
def ls(session: Session) -> int:
    """List the nodes with their address, hardware and labels."""
    reports = sorted(session.client(uses_nodes=True).follow(CheckHealth()), key=lambda report: by_name(report.name))
    if session.output.is_json:
        session.output.document({"nodes": reports})
    else:
        session.output.table(
            ("", "NODE", "STATUS", "ROLE", "TARGET", "CORES", "MEMORY", "GPUS", "LABELS", "NOTE"),
            [_row(report) for report in reports],
        )
    return 0


@node.command()
@click.argument("name", shell_complete=candidates.node_names)
@json_option
@pass_session
def show(session: Session, name: str) -> int:
    """Show one node in detail."""
    if name.startswith("@"):
        raise UsageError(f"{name} is not a single node", hint=f"for several nodes: ugro health {name}")
    client = session.client()
    report = next(client.follow(CheckHealth((name,))))
    hardware = client.ask(GetNodeHardware(report.name))
    if session.output.is_json:
        session.output.document({"node": report, "hardware": hardware})
    else:
        _show(session.output, report)
        _show_details(session.output, figures.details(hardware))
        doctor.show(session.output, hardware.findings)
    return health.exit_code([report])


@node.command()
@click.argument("names", nargs=-1, shell_complete=candidates.nodes)
@click.option("--all", "everything", is_flag=True, help="Remove all unused code, not only above sync.store_limit.")
@json_option
@pass_session
def gc(session: Session, names: tuple[str, ...], everything: bool) -> int:
    """Remove unused code of jobs from nodes and this machine.

    NAMES are nodes; the default is all. The least recently used code is removed first.
    """
    session.output.progress("removing unused code")
    found = session.client().ask(RemoveUnusedCode(names, everything)).tidied
    if session.output.is_json:
        session.output.document({"tidied": found})
    else:
        rows = [
            [
                Cell(one.node or "this machine", "id"),
                Cell(format_size(one.freed_bytes), is_number=True),
                Cell(format_size(one.kept_bytes), is_number=True),
                Cell(str(one.trees), is_number=True),
                Cell(one.error or "", "bad"),
            ]
            for one in found
        ]
        session.output.table(("NODE", "FREED", "KEPT", "TREES", "NOTE"), rows)
    return 1 if any(one.error for one in found) else 0


@node.command()
@click.argument("name")
@click.option("--host", help="Host name, address or ssh alias; default: NAME.")
@click.option("--user", help="User name to log in with.")
@click.option("--port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of the ssh server.")
@click.option(
    "--label", "labels", multiple=True, shell_complete=candidates.labels, help="Label of the node. May be repeated."
)
@click.option("--python", help="Path of the Python to use on the node.")
@json_option
@pass_session
def add(session: Session, /, name: str, labels: tuple[str, ...], **fields: str | int | None) -> int:
    """Add a node to the cluster file and try to reach it.

    Other nodes and running jobs are not affected.

    \b
    Example:
      ugro node add gpu4 --host 10.0.0.14 --user ann --label fast
    """
    given: dict[str, object] = {key: value for key, value in fields.items() if value is not None}
    client = session.client()
    client.ask(AddNode(name, given | ({"labels": list(labels)} if labels else {})))
    client.ask(ReloadClusterFile())
    session.output.note(f"{name} is in {client.ask(GetAgentStatus()).cluster_file}")
    session.output.progress(f"reaching {name}")
    report = next(client.follow(CheckHealth((name,))))
    health.show(session.output, [report])
    return health.exit_code([report])


@node.command()
@click.argument("name", shell_complete=candidates.node_names)
@click.option("--if-idle", is_flag=True, help="Only if no job runs there and no files of jobs are left there.")
@click.option("--force", is_flag=True, help="Also if jobs run there: they go on unseen.")
@json_option
@pass_session
def rm(session: Session, name: str, if_idle: bool, force: bool) -> None:
    """Remove a node from the cluster file.

    Nothing is changed on the node itself. A node on which jobs run is not removed.
    """
    if if_idle and force:
        raise UsageError("--if-idle and --force exclude each other", hint=f"ugro node rm {name}")
    session.client().ask(RemoveNode(name, only_if_idle=if_idle, even_with_jobs=force))
    if session.output.is_json:
        session.output.document({"removed": name})
    session.output.note(f"{name} is no longer part of the cluster")


@node.command()
@click.argument("name", shell_complete=candidates.node_names)
@click.option("--reason", default="", help="Reason, shown with the node.")
@json_option
@pass_session
def drain(session: Session, name: str, reason: str) -> None:
    """Start no new jobs on a node.

    Running jobs continue. Undo with: ugro node resume NAME.
    """
    session.client().ask(DrainNode(name, reason))
    if session.output.is_json:
        session.output.document({"node": {"name": name, "drained": reason}})
    session.output.note(f"{name} takes no new jobs; undo with: ugro node resume {name}")


@node.command()
@click.argument("name", shell_complete=candidates.node_names)
@json_option
@pass_session
def resume(session: Session, name: str) -> None:
    """Let a drained node take jobs again."""
    session.client().ask(ResumeNode(name))
    if session.output.is_json:
        session.output.document({"node": {"name": name, "drained": None}})
    session.output.note(f"{name} takes jobs again")


@node.command()
@click.argument("name", metavar="HOST", shell_complete=candidates.node_names)
@click.option("--yes", "-y", is_flag=True, help="Accept without asking.")
@click.option("--replace", is_flag=True, help="Accept a key that differs from the known one.")
@json_option
@pass_session
def trust(session: Session, name: str, yes: bool, replace: bool) -> int:
    """Show a node's SSH host key, and accept it after asking.

    HOST is a node, or any other host that ssh reaches: NAME, USER@HOST or USER@HOST:PORT.

    With --json there is no question: without --yes the key is printed and not accepted, with exit code 6.
    """
    client = session.client()
    key = client.ask(GetHostKey(name))
    if not key.is_trusted and session.output.is_json and not yes:
        session.output.document({"host_key": key})
        refusal = host_keys.changed(key) if key.is_changed and not replace else host_keys.unaccepted(key)
        session.output.complain(refusal)
        return refusal.exit_code
    if not key.is_trusted:
        host_keys.ask(session.output, key, yes=yes, replace=replace)
        key = client.ask(TrustHostKey(key.node, key.fingerprints, replace=replace))
    if session.output.is_json:
        session.output.document({"host_key": key})
    session.output.note(f"{name}: accepted host key of {key.address}: {', '.join(key.fingerprints)}")
    return 0


def _row(report: NodeReport) -> list[Cell]:
    sign, style = health.SIGNS[report.status]
    machine = report.machine
    gpus = [gpu.model for gpu in report.facts.gpus] if report.facts else []
    found = f"found by {report.found_by}" if report.found_by else ""
    notes = (found, report.power_note, report.owner_note, *report.taken_gpus)
    note = report.error or "; ".join(filter(None, notes))
    if report.drained is not None:
        note = f"drained: {report.drained}" if report.drained else "drained"
    note = report.second_name or note
    return [
        Cell(sign, style),
        Cell(report.name, "bold"),
        Cell(report.status, style),
        Cell(report.role),
        Cell(report.target),
        Cell(str(machine.cores) if machine else "", is_number=True),
        Cell(format_size(machine.memory_total_bytes) if machine else "", is_number=True),
        Cell(", ".join(gpus)),
        Cell(", ".join(report.labels)),
        Cell(note),
    ]


def _show(output: Output, report: NodeReport) -> None:
    output.text(f"{report.name}  {report.status}, score {report.score}")
    if report.status is Status.UNREACHABLE:
        output.text(f"  {report.error}")
        if report.hint:
            output.text(f"  {report.hint}")
    _show_details(output, _details(report))
    for reason in report.reasons:
        output.text(f"  -{reason.points:<9.0f} {reason.text}")


def _show_details(output: Output, details: Sequence[tuple[str, str]]) -> None:
    for key, value in details:
        output.text(f"  {key:<10} {value}")


def _details(report: NodeReport) -> list[tuple[str, str]]:
    details = [("target", report.target), ("role", report.role.value)]
    if report.found_by:
        details.append(("found by", f"{report.found_by}; not in the cluster file"))
    if report.drained is not None:
        details.append(("drained", report.drained or "yes"))
    if report.owner is not None:
        details += _owner(report.owner)
    if report.power is not None:
        mac = f"; MAC {report.power.mac}" if report.power.mac else ""
        details.append(("power", f"{report.power.state} {report.power.words}".strip() + mac))
    if report.second_name:
        details.append(("name", f"{report.second_name}; remove it: ugro node rm {report.name}"))
    if (machine := report.machine) is not None:
        details += [
            ("system", f"{machine.os}, Linux {machine.kernel}, {machine.arch}"),
            ("cpu", f"{machine.cores} × {machine.cpu_model}"),
            ("python", f"{machine.python} ({machine.python_path})"),
            ("root", machine.root),
        ]
    if report.facts is not None:
        details += _measured(report)
    return details


def _owner(owner: OwnerReport) -> list[tuple[str, str]]:
    seen = "nobody was noticed since it started"
    if owner.idle_s is not None:
        seen = f"{owner.sign}, {format_duration(owner.idle_s)} ago" + ("" if owner.is_there else ": gone")
    if not owner.is_known:
        seen = "it has not said yet whether somebody uses it"
    if owner.error is not None:
        seen = f"cannot be looked for: {owner.error}"
    rule = f"{owner.when}, then {owner.then}, quiet after {format_duration(owner.quiet_s)}"
    looks_at = [("", f"  looks at {', '.join(owner.sources)}")] if owner.sources else []
    return [("owner", f"{seen} ({rule})"), *looks_at, *(("", f"  not seen: {text}") for text in owner.blind)]


def _measured(report: NodeReport) -> list[tuple[str, str]]:
    facts, link = report.facts, report.link
    assert facts is not None
    details = [
        ("up", format_duration(facts.uptime_s)),
        ("load", " ".join(f"{value:.2f}" for value in facts.load)),
        ("memory", f"{format_size(facts.memory_available_bytes)} free of {format_size(facts.memory_total_bytes)}"),
    ]
    if facts.limits is not None:
        details.append(("limits", facts.limits.words))
    details += [
        ("disk", f"{disk.mount}: {format_size(disk.free_bytes)} free of {format_size(disk.total_bytes)}")
        for disk in facts.disks
    ]
    if link.rtt_s is not None:
        details.append(("link", f"{link.rtt_s * 1000:.2f} ms, {link.loss_ratio * 100:.0f} % late"))
    if link.clock_offset_s is not None:
        details.append(("clock", f"{link.clock_offset_s * 1000:+.1f} ms against this machine"))
    for gpu in facts.gpus:
        details.append((f"gpu {gpu.index}", f"{gpu.name} {gpu.uuid}" + (f": {gpu.error}" if gpu.error else "")))
        if gpu.holder is not None:
            details.append(("", f"  used by {gpu.holder}"))
        for process in gpu.processes:
            owner = f"job {process.job}" if process.job else ("ours" if process.is_ours else "not ours")
            size = format_size(process.memory_bytes) if process.memory_bytes is not None else "?"
            details.append(("", f"  pid {process.pid} {process.name}, {size}, {owner}"))
    if facts.gpu_driver:
        details.append(("driver", f"{facts.gpu_driver} (read by {facts.gpu_source})"))
    return details

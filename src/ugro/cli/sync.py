"""``ugro sync``: sends code to the nodes, or shows what would be sent and why."""

from __future__ import annotations

import os

import click

from ugro.cli import candidates
from ugro.cli.jobs.result_summary import amount
from ugro.cli.output import Cell, Output, Style
from ugro.cli.session import Session, json_option, pass_session
from ugro.core.code import Snapshot, SyncReport
from ugro.core.support.progress import Progress, together
from ugro.core.support.quantity import format_duration, format_size

_ENDED = ("done", "failed", "would")
_MOST_SHOWN = 20
_STYLES: dict[str, Style] = {"done": "good", "failed": "bad"}


@click.command()
@click.argument("nodes", nargs=-1, shell_complete=candidates.nodes)
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and why; send nothing.")
@click.option(
    "--workdir",
    metavar="DIR",
    default=".",
    shell_complete=candidates.directories,
    help="Directory to send; default: the current one.",
)
@click.option("--force", is_flag=True, help="Send the code even if it is larger than sync.max_size.")
@json_option
@pass_session
def sync(session: Session, nodes: tuple[str, ...], dry_run: bool, workdir: str, force: bool) -> int:
    """Send code to nodes.

    Sends the code in the current directory to NODES, or to all nodes; only files that a node lacks are transferred.
    Jobs do this by themselves. See docs/sync.md for what is left out.

    \b
    Examples:
      ugro sync --dry-run
      ugro sync gpu1 gpu2
    """
    output = session.output
    client = session.client(uses_nodes=True)
    output.progress(f"reading {workdir}")
    snapshot: Snapshot | None = None
    reports: dict[str, SyncReport] = {}
    for update in client.sync(os.path.expanduser(workdir), nodes, dry_run=dry_run, force=force):
        if isinstance(update, Snapshot):
            snapshot = update
        else:
            reports[update.node] = update
            output.progress(_progress(list(reports.values())))
    output.end_progress()
    found = sorted(reports.values(), key=lambda report: report.node)
    if output.is_json:
        output.document({"snapshot": snapshot, "nodes": found})
    elif snapshot is not None:
        _show(output, snapshot, found)
    return 1 if any(report.state == "failed" for report in found) else 0


def _progress(reports: list[SyncReport]) -> str:
    done = sum(report.state in _ENDED for report in reports)
    sending = [
        Progress(
            report.sent_bytes, report.bytes, report.sent_files, report.files,
            report.bytes_per_s if report.state not in _ENDED else None,
        )
        for report in reports if report.state != "would"
    ]  # fmt: skip
    words = f": {together(sending)}" if any(one.bytes for one in sending) else ""
    return f"{done} of {len(reports)} nodes{words}"


def _show(output: Output, snapshot: Snapshot, reports: list[SyncReport]) -> None:
    output.note(f"{snapshot.folder}: {amount(snapshot.files, snapshot.bytes)}, {snapshot.id[:12]}")
    for sentence in snapshot.skipped[:_MOST_SHOWN]:
        output.note(f"not sent: {sentence}")
    rows = [
        [
            Cell(report.node, "id"),
            Cell(report.state, _STYLES.get(report.state, "")),
            Cell(f"{report.files:,}", is_number=True),
            Cell(format_size(report.bytes), is_number=True),
            Cell(format_size(report.wire_bytes) if report.state != "would" else "", is_number=True),
            Cell(format_duration(report.seconds) if report.seconds else "", is_number=True),
            Cell(report.error or report.why),
        ]
        for report in reports
    ]
    output.table(["NODE", "STATE", "FILES", "SIZE", "SENT", "TIME", "WHY"], rows)
    _show_paths(output, reports)
    for report in reports:
        if report.hint:
            output.note(f"{report.node}: {report.hint}")


def _show_paths(output: Output, reports: list[SyncReport]) -> None:
    for report in reports:
        for travel in report.travels[:_MOST_SHOWN]:
            output.note(f"{report.node}  {travel.why:<8} {format_size(travel.bytes):>10}  {travel.path}")
        if report.files > _MOST_SHOWN and report.travels:
            output.note(f"{report.node}  … and {report.files - _MOST_SHOWN:,} more; see all with --json")

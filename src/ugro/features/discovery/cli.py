"""``ugro node discover``: the machines that the cluster file's sources list, and adding them to it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

import click

from ugro.cli.host_keys import NewKeys
from ugro.cli.output import Cell, Output, Style
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.features.discovery.model import Candidate, Discovered, Found, Standing
from ugro.features.discovery.operations import ListDiscoveredMachines, ReportDiscoveredMachines
from ugro.kernel.agent.operations import AddNode
from ugro.kernel.links.model import NodeReport, Status, by_name, not_used
from ugro.kernel.links.operations import CheckHealth
from ugro.kernel.support.errors import NotFound, UgroError
from ugro.kernel.support.quantities import format_size

_UNKNOWN_KEY = "host-key-unknown"
_STYLES: dict[Standing, Style] = {
    Standing.NEW: "id",
    Standing.NODE: "good",
    Standing.JOINED: "good",
    Standing.LEFT: "warn",
}


@click.command()
@click.argument("names", nargs=-1)
@click.option("--add", is_flag=True, help="Add new machines that answer to the cluster file; with NAMES, these.")
@click.option("--accept-new", is_flag=True, help="Accept SSH host keys that are not known yet, without asking.")
@json_option
@pass_session
def discover(session: Session, names: tuple[str, ...], add: bool, accept_new: bool) -> int:
    """Show the machines that discovery finds, or add them.

    The section discovery of the cluster file says where to look. Machines that are no nodes yet are probed if their SSH
    host key is known. With --add, host keys that are not known are shown, and accepted after asking; NAMES become nodes
    also if they do not answer.

    Exit code: 0, or 1 if a source cannot be read.

    \b
    Examples:
      ugro node discover
      ugro node discover --add gpu3 gpu4
    """
    client = session.client()
    session.output.progress("looking at the sources")
    seen = client.ask(ListDiscoveredMachines())
    session.output.end_progress()
    if not seen.sources:
        raise NotFound(
            "the cluster file names no source of machines",
            hint="add a section such as  discovery: {mdns: _ssh._tcp}; see docs/discovery.md",
        )
    chosen = _chosen(seen, names)
    round_ = _Round(session.output, client, chosen)
    round_.probe()
    if add:
        round_.add(are_named=bool(names), accepts_all=accept_new)
    _show(session.output, seen, round_)
    return 1 if any(source.error for source in seen.sources) else 0


def _chosen(seen: Discovered, names: Sequence[str]) -> list[Found]:
    known = {one.candidate.name: one for one in seen.found}
    for name in names:
        if name not in known:
            raise NotFound(f"no source lists a machine named {name}", hint="see: ugro node discover")
    found = [known[name] for name in dict.fromkeys(names)] if names else list(seen.found)
    return sorted(found, key=lambda one: by_name(one.candidate.name))


@dataclass(slots=True)
class _Round:
    output: Output
    client: Client
    found: list[Found]
    reports: dict[str, NodeReport] = field(default_factory=dict)  # by the name of the candidate
    added: list[str] = field(default_factory=list)
    unaccepted: list[str] = field(default_factory=list)  # nobody could be asked about their keys

    def probe(self) -> None:
        nodes = {one.node: one.candidate.name for one in self.found if one.node is not None}
        if nodes:
            self.output.progress("probing the nodes")
            found = self.client.follow(CheckHealth(tuple(nodes)))
            self.reports |= {nodes[report.name]: report for report in found}
        self._probe_new([one.candidate.name for one in self.found if one.standing is Standing.NEW])
        self.output.end_progress()

    def add(self, *, are_named: bool, accepts_all: bool) -> None:
        keys = NewKeys(self.output, self.client, None, accepts_all)
        new = [one for one in self.found if one.standing is not Standing.NODE]
        unknown = [one.candidate.name for one in new if self._cause(one) == _UNKNOWN_KEY]
        self._probe_new([name for name in unknown if keys.accept(name)])
        self.unaccepted = list(keys.left)
        for one in new:
            if self._may_be_added(one, are_named=are_named):
                self._add(one.candidate)

    def report(self, one: Found) -> NodeReport | None:
        return self.reports.get(one.candidate.name)

    def _probe_new(self, names: Sequence[str]) -> None:
        if not names:
            return
        self.output.progress(f"trying {len(names)} machines")
        wanted = ReportDiscoveredMachines(tuple(names))
        for count, report in enumerate(self.client.follow(wanted), start=1):
            self.reports[report.name] = report
            self.output.progress(f"tried {count} of {len(names)} machines")
        self.output.end_progress()

    def _cause(self, one: Found) -> str | None:
        report = self.report(one)
        return report.cause if report is not None else None

    def _may_be_added(self, one: Found, *, are_named: bool) -> bool:
        report = self.report(one)
        if report is None or report.same_as is not None or report.cause == _UNKNOWN_KEY:
            return False
        return are_named or (one.standing is Standing.NEW and report.status is not Status.UNREACHABLE)

    def _add(self, candidate: Candidate) -> None:
        fields = {
            "host": candidate.host if candidate.host != candidate.name else None,
            "user": candidate.user,
            "port": candidate.port,
            "labels": list(candidate.labels) or None,
        }
        try:
            given = {key: value for key, value in fields.items() if value is not None}
            self.client.ask(AddNode(candidate.name, given))
        except UgroError as error:
            self.output.warn(f"{candidate.name} is not added: {error}", error.hint)
        else:
            self.added.append(candidate.name)


def _show(output: Output, seen: Discovered, round_: _Round) -> None:
    if output.is_json:
        found = [
            {
                "name": one.candidate.name,
                "target": one.target,
                "standing": one.standing,
                "node": one.node,
                "labels": one.candidate.labels,
                "sources": one.candidate.sources,
                "added": one.candidate.name in round_.added,
                "note": _note(one, round_),
                "report": round_.report(one),
            }
            for one in round_.found
        ]
        output.document({"join": seen.join, "sources": seen.sources, "found": found})
        return
    output.table(
        ("NAME", "STANDING", "TARGET", "SOURCE", "HARDWARE", "LABELS", "NOTE"),
        [_row(one, round_) for one in round_.found],
    )
    for source in seen.sources:
        if source.error is not None:
            output.warn(f"{source.name} cannot be read, what it listed before stays: {source.error}", source.hint)
        for refused in source.refused:
            output.warn(f"{source.name}: not usable: {refused}")
    _say_next(output, seen, round_)


def _row(one: Found, round_: _Round) -> list[Cell]:
    name = one.candidate.name
    standing = "added" if name in round_.added else one.standing.value
    return [
        Cell(name, "bold"),
        Cell(standing, "good" if name in round_.added else _STYLES[one.standing]),
        Cell(one.target),
        Cell(", ".join(one.candidate.sources)),
        Cell(_hardware(round_.report(one))),
        Cell(", ".join(one.candidate.labels)),
        Cell(_note(one, round_) or ""),
    ]


def _hardware(report: NodeReport | None) -> str:
    if report is None or report.machine is None or report.facts is None:
        return ""
    gpus = ", ".join(gpu.model for gpu in report.facts.gpus) or "no GPU"
    return f"{gpus}; {report.machine.cores} cores, {format_size(report.machine.memory_total_bytes)}"


def _note(one: Found, round_: _Round) -> str | None:
    """What was seen now comes before what the agent noted earlier."""
    report = round_.report(one)
    if report is None or one.node is not None:
        return one.note or (report.error if report is not None else None)
    if report.cause == _UNKNOWN_KEY:
        return f"host key not accepted: ugro node trust {one.candidate.name}"
    if report.status is Status.UNREACHABLE:
        return report.error
    return not_used(report.same_as) if report.same_as else None


def _say_next(output: Output, seen: Discovered, round_: _Round) -> None:
    if not round_.found:
        output.note("the sources list no machines")
    if round_.added:
        output.note(f"added to the cluster file: {', '.join(round_.added)}")
    if round_.unaccepted:
        names = " ".join(map(shlex.quote, round_.unaccepted))
        output.note(f"not added, because host keys are not known: {names}; compare the keys above on the machines")
        output.note(f"accept these keys and add the machines: ugro node discover --add --accept-new {names}")
    new = [one for one in round_.found if one.standing is Standing.NEW and one.candidate.name not in round_.added]
    if seen.join == "ask" and new and not round_.unaccepted:
        output.note(f"{len(new)} new; to add what answers to the cluster file: ugro node discover --add")

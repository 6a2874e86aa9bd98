"""``ugro env``: the Python environments that nodes keep."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ugro.cli import candidates
from ugro.cli.jobs.describe import ago
from ugro.cli.jobs.options import environment_options
from ugro.cli.output import Cell, Output
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.features.environments.client import set_up
from ugro.features.environments.model import SHORT, KeptEnvironment, NodeVersions, Setup, SetupStep, Unasked
from ugro.features.environments.operations import (
    GetEnvironment,
    ListEnvironments,
    PrepareEnvironment,
    RemoveEnvironment,
    RemoveUnusedEnvironments,
)
from ugro.features.health.cli import SIGNS
from ugro.kernel.agent.model import Grade
from ugro.kernel.support import moments as clock
from ugro.kernel.support.errors import Interrupted
from ugro.kernel.support.moments import Instant, unix_seconds
from ugro.kernel.support.quantities import format_duration, format_size, parse_duration

_HEADER = ("ENVIRONMENT", "PACKAGES", "PYTHON", "SIZE", "MADE", "USED", "RUNS", "NODES")
_SPARE = ("MADE", "PYTHON", "RUNS")
_MOST_PACKAGES = 4  # that are named in a row
_MOST_NODES = 3
_REMOVE_S = 600.0  # an environment has a hundred thousand files
_DELETING = "it is still being deleted"


class _Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in some releases
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param)


@click.group(cls=CommandGroup)
def env() -> None:
    """List, show and remove the Python environments on nodes."""


@env.command()
@click.argument("nodes", nargs=-1, shell_complete=candidates.nodes)
@json_option
@pass_session
def ls(session: Session, nodes: tuple[str, ...]) -> int:
    """List the environments on nodes, the last used first.

    NODES are names, @all or @label; the default is all nodes.
    """
    output = session.output
    output.progress("asking the nodes")
    found = session.client(uses_nodes=True).ask(ListEnvironments(nodes))
    if output.is_json:
        output.document({"environments": found.environments, "unasked": found.unasked})
    elif found.environments:
        now = clock.now()
        output.table(_HEADER, [_row(one, now, output) for one in found.environments], spare=_SPARE)
    else:
        output.note("no environments; a job with environment makes one, or: ugro node setup")
    return _complain(output, found.unasked)


@env.command()
@click.argument("name", metavar="ENVIRONMENT", shell_complete=candidates.environments)
@json_option
@pass_session
def show(session: Session, name: str) -> None:
    """Show an environment: its packages, and the nodes that have it.

    The first letters of its name are enough.
    """
    found = session.client(uses_nodes=True).ask(GetEnvironment(name)).environment
    output = session.output
    if output.is_json:
        output.document({"environment": found})
        return
    now = clock.now()
    output.text(f"{found.name}  Python {found.python}, {format_size(found.size_bytes)}")
    for held in found.nodes:
        runs = f", in use by {held.runs} run{'' if held.runs == 1 else 's'}" if held.runs else ""
        output.text(f"  {held.node}  made {_ago(held.made_at, now)}, last used {_ago(held.used_at, now)}{runs}")
    output.table(("PACKAGE", "VERSION"), [[Cell(package), Cell(version)] for package, version in found.packages])


@env.command()
@click.argument("name", metavar="ENVIRONMENT", shell_complete=candidates.environments)
@click.argument("nodes", nargs=-1, shell_complete=candidates.nodes)
@json_option
@pass_session
def rm(session: Session, name: str, nodes: tuple[str, ...]) -> int:
    """Remove an environment from nodes.

    One that a running job uses is not removed. A later job that asks for the same makes it again.
    """
    session.output.progress("removing the environment")
    return _removed(session, RemoveEnvironment(name, nodes))


@env.command()
@click.argument("nodes", nargs=-1, shell_complete=candidates.nodes)
@click.option("--unused", type=_Duration(), metavar="DURATION", help="Remove those that were not used for this long.")
@click.option("--all", "everything", is_flag=True, help="Remove all that no running job uses.")
@json_option
@pass_session
def gc(session: Session, nodes: tuple[str, ...], unused: float | None, everything: bool) -> int:
    """Remove unused environments, those that were not used for longest first.

    Removes as many as necessary to get below environments.max_size of the cluster file, and what interrupted
    installations have left. Environments that running jobs use stay, and without --all those of the last minutes.
    """
    session.output.progress("removing unused environments")
    return _removed(session, RemoveUnusedEnvironments(nodes, unused, everything))


def _removed(session: Session, asked: RemoveEnvironment | RemoveUnusedEnvironments) -> int:
    output = session.output
    removals = session.client(uses_nodes=True).ask(asked, timeout_s=_REMOVE_S).nodes
    if output.is_json:
        output.document({"nodes": removals})
    else:
        rows = [
            [
                Cell(one.node, "bold"),
                Cell(", ".join(name[:SHORT] for name in one.removed), "id"),
                Cell(format_size(one.freed_bytes), is_number=True),
                Cell("" if one.kept_bytes is None else format_size(one.kept_bytes), is_number=True),
                Cell(one.error, "bad") if one.error else Cell(_DELETING if one.is_deleting else ""),
            ]
            for one in removals
        ]
        output.table(("NODE", "REMOVED", "FREED", "KEPT", "NOTE"), rows)
        for one in removals:
            if one.hint:
                output.note(f"{one.node}: {one.hint}")
    if any(one.is_unreachable for one in removals):
        return 5
    return int(any(one.error for one in removals))


def _complain(output: Output, unasked: Sequence[Unasked]) -> int:
    for one in unasked:
        output.warn(f"{one.node}: {one.error}", one.hint)
    if any(one.is_unreachable for one in unasked):
        return 5
    return int(bool(unasked))


def _row(one: KeptEnvironment, now: Instant, output: Output) -> list[Cell]:
    nodes = [held.node for held in one.nodes]
    if not output.is_terminal:
        made, used, packages = one.made_at, one.used_at, one.first_packages(len(one.packages))
        where = ",".join(nodes)
    else:
        made, used, packages = _ago(one.made_at, now), _ago(one.used_at, now), one.first_packages(_MOST_PACKAGES)
        where = ",".join(nodes) if len(nodes) <= _MOST_NODES else f"{len(nodes)} nodes"
    return [
        Cell(one.name[:SHORT] if output.is_terminal else one.name, "id"),
        Cell(packages),
        Cell(one.python),
        Cell(format_size(one.size_bytes) if output.is_terminal else str(one.size_bytes), is_number=True),
        Cell(made),
        Cell(used),
        Cell(str(one.runs or "") if output.is_terminal else str(one.runs), is_number=True),
        Cell(where),
    ]


def _ago(at: str, now: Instant) -> str:
    try:
        return ago(Instant(unix_seconds(at)), now)
    except ValueError:  # a node says what it likes
        return at


# --- setup ------------------------------------------------------------------------------------------------------------
# ``ugro node setup``: makes a Python environment on nodes ahead of time, and compares the versions there.


_SETUP_HEADER = ("", "NODE", "PYTHON", "TORCH", "CUDA", "NCCL", "DRIVER", "OTHERS", "SIZE", "TIME", "NOTE")
_SETUP_SPARE = ("TIME", "OTHERS", "SIZE")
# Columns with a version, and what a difference in it is called.
_KINDS = {"PYTHON": "Python", "TORCH": "torch", "CUDA": "CUDA", "NCCL": "NCCL", "DRIVER": "GPU driver"}
_MOST_LINES = 8  # of an installer, below an error
_ADVICE = "no environment is configured: name packages below environment in the job file or in cluster.yaml"


@click.command()
@click.argument("nodes", nargs=-1, shell_complete=candidates.nodes)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Make the environment of this job file.")
@environment_options
@json_option
@pass_session
def setup(session: Session, /, nodes: tuple[str, ...], file: Path | None, **fields: Any) -> int:
    """Make the Python environment on nodes, and compare versions.

    NODES are names, @all or @label; the default is all nodes. The environment is that of the job file, of the options,
    or else of the cluster file; without any, the table shows what the nodes have. Jobs make their environment by
    themselves: this only does it ahead of time. A node that has the environment already needs no time.

    Exit code: 0 if every node is ready, 1 if a node failed or existing environments differ so that jobs break, 5 if a
    node cannot be reached.

    \b
    Examples:
      ugro node setup
      ugro node setup gpu1 gpu2 -f job.yaml
    """
    output = session.output
    given = {key: value for key, value in fields.items() if value not in (None, (), [])}
    done: Setup | None = None
    lines = _Lines(output)
    path = os.path.abspath(file) if file is not None else None
    asked = PrepareEnvironment(nodes, path, given, os.getcwd())
    try:
        for update in set_up(session.client(uses_nodes=True), asked):
            if isinstance(update, Setup):
                done = update
            else:
                lines.show(update)
    except KeyboardInterrupt:
        text = "interrupted: nodes that were not ready yet have no new environment"
        raise Interrupted(text, hint="to go on: the same command again") from None
    output.end_progress()
    assert done is not None, "the stream ends with it, or with an error"
    if output.is_json:
        output.document({"environment": done.environment, "nodes": done.nodes, "findings": done.findings})
    else:
        show_versions(output, done)
    return done.exit_code


class _Lines:
    """A line for each node: in place on a terminal, elsewhere one whenever a node comes to another phase."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._steps: dict[str, SetupStep] = {}

    def show(self, step: SetupStep) -> None:
        before = self._steps.get(step.node)
        self._steps[step.node] = step
        if self._output.shows_progress:
            self._output.progress(*progress_lines(self._steps, self._output.room))
        elif before is None or before.phase != step.phase:
            self._output.note(f"{step.node}: {step.phase}")


def progress_lines(steps: Mapping[str, SetupStep], room: int) -> list[str]:
    """How many nodes are ready, and one line for each of the others, as far as there is room."""
    ready = sum(step.is_last for step in steps.values())
    first = f"{ready} of {len(steps)} nodes are ready"
    width = max(map(len, steps), default=0)
    busy = [f"  {node.ljust(width)}  {_words(step)}" for node, step in steps.items() if not step.is_last]
    if len(busy) >= room:
        busy = [*busy[: max(0, room - 2)], f"  … and {len(busy) - max(0, room - 2)} more nodes"]
    return [first, *busy]


def _words(step: SetupStep) -> str:
    parts = [step.phase]
    if step.total:
        # Only the installer on the node says how many are done.
        done = f"{step.done} of " if step.phase == "installing" else ""
        parts.append(f"{done}{step.total} packages")
    if step.total_bytes:
        parts.append(f"{format_size(step.bytes)} of {format_size(step.total_bytes)}")
    elif step.bytes:
        parts.append(format_size(step.bytes))
    return ", ".join(parts)


def show_versions(output: Output, done: Setup) -> None:
    if done.environment is not None:
        output.note(f"environment: {done.environment}")
    output.table(_SETUP_HEADER, [_setup_row(one) for one in done.nodes], spare=_SETUP_SPARE)
    for finding in done.findings:
        if finding.grade is not Grade.OK or "differ" in finding.text:
            sign, _ = SIGNS[finding.grade]
            output.note(f"{sign} {finding.text}", *([f"  → {finding.remedy}"] if finding.remedy else []))
    failed: dict[tuple[str, str | None], list[NodeVersions]] = {}
    for one in done.nodes:
        if one.error is not None:
            failed.setdefault((one.error, one.hint), []).append(one)
    for (error, hint), nodes in failed.items():  # what holds for all nodes is said once
        output.warn(f"{', '.join(one.node for one in nodes)}: {error}", hint)
        more = [line for line in nodes[0].last_lines if line.strip() not in error]
        output.note(*(f"  | {line}" for line in more[-_MOST_LINES:]))
    if done.environment is None:
        output.note(_ADVICE, "  for example: environment: {packages: [torch==2.13.0]}; see docs/environments.md")


def _setup_row(one: NodeVersions) -> list[Cell]:
    sign, style = SIGNS[Grade.FAILED if one.error else Grade.WARNING if one.differs else Grade.OK]
    versions = {
        "PYTHON": one.python, "TORCH": one.torch, "CUDA": one.cuda, "NCCL": one.nccl, "DRIVER": one.driver
    }  # fmt: skip
    return [
        Cell(sign, style),
        Cell(one.node, "bold"),
        *(Cell(version or "", "warn" if _KINDS[name] in one.differs else "") for name, version in versions.items()),
        Cell(_others(one.others), "warn" if set(one.differs) - set(_KINDS.values()) else ""),
        Cell(format_size(one.size_bytes) if one.size_bytes is not None else "", is_number=True),
        Cell(format_duration(one.seconds) if one.seconds is not None else "", is_number=True),
        Cell(_note(one), "bad" if one.error else ""),
    ]


def _others(packages: Sequence[tuple[str, str | None]]) -> str:
    return ", ".join(f"{name} {version or '–'}" for name, version in packages)


def _note(one: NodeVersions) -> str:
    if one.error is not None:
        return "unreachable" if one.is_unreachable else "failed"
    parts = [one.environment[:SHORT] if one.environment else ""]
    if one.label:
        parts.append(f"override for {one.label}")
    if one.differs:
        parts.append(f"differs in {', '.join(one.differs)}")
    return "; ".join(part for part in parts if part)

"""``ugro env``: the Python environments that nodes keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ugro.cli import candidates
from ugro.cli.jobs.describe import ago
from ugro.cli.output import Cell, Output
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.core.env_report import SHORT, EnvRemoval, KeptEnvironment, Unasked
from ugro.core.support import clock
from ugro.core.support.moment import Instant, unix_seconds
from ugro.core.support.quantity import format_size, parse_duration

_HEADER = ("ENVIRONMENT", "PACKAGES", "PYTHON", "SIZE", "MADE", "USED", "RUNS", "NODES")
_SPARE = ("MADE", "PYTHON", "RUNS")
_MOST_PACKAGES = 4  # that are named in a row
_MOST_NODES = 3
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
    found = session.client(uses_nodes=True).environments.list(nodes)
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
    found = session.client(uses_nodes=True).environments.show(name)
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
    return _removed(session.output, session.client(uses_nodes=True).environments.remove(name, nodes))


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
    calls = session.client(uses_nodes=True).environments
    return _removed(session.output, calls.gc(nodes, unused_s=unused, everything=everything))


def _removed(output: Output, removals: Sequence[EnvRemoval]) -> int:
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

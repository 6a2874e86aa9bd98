"""``ugro lab``: unequal simulated nodes on this machine."""

from __future__ import annotations

import os

import click

from ugro.cli import health
from ugro.cli.output import Cell, Output
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.kernel.links.model import Status
from ugro.kernel.support.errors import UsageError
from ugro.kernel.support.state_dir import StateDir
from ugro.lab.lab import Lab, Outcome
from ugro.lab.nodes import Shape, Throttle, Wish, parse_speeds

_HEADER = ("NODE", "SPEED", "THROTTLE", "PROCESSES", "HOME")
_MEANS = {
    Throttle.CGROUP: "slowed down by control groups",
    Throttle.DUTY_CYCLE: "slowed down by pausing processes",
}
_OUTCOMES = {
    Outcome.MADE: "the lab is up",
    Outcome.CHANGED: "the lab has changed",
    Outcome.WAS_UP: "the lab was up already",
}


@click.group(cls=CommandGroup)
def lab() -> None:
    """Create simulated nodes on this machine.

    The nodes have different speeds and may have simulated GPUs. While the lab is up, every ugro command with this
    UGRO_HOME uses it.

    \b
    Example:
      ugro lab up --speeds 1,0.5,0.25
    """


@lab.command()
@click.option("--nodes", type=int, help="Number of nodes, 1 to 64.  [default: one for each speed, else 3]")
@click.option("--speeds", help="Share of one core per node; the last one repeats.  [default: 1,0.5,0.25]")
@click.option("--gpus", type=int, help="Simulated GPUs on each node.  [default: 0]")
@click.option("--no-cgroups", is_flag=True, help="Slow nodes down by pausing processes, not with control groups.")
@json_option
@pass_session
def up(session: Session, nodes: int | None, speeds: str | None, gpus: int | None, no_cgroups: bool) -> int:
    """Create the lab, or change it.

    A node of speed 1 may use one whole core, 0.25 a quarter of one. Without the right to create control groups, nodes
    are slowed down by pausing their processes. A change stops what runs on the lab.
    """
    wish = Wish(nodes, parse_speeds(speeds) if speeds is not None else None, gpus, no_cgroups)
    made = find_lab(session)
    outcome = made.up(wish)
    code = show_health(session.output, made)
    _tell(session.output, outcome, made.shape())
    return code


@lab.command()
@json_option
@pass_session
def down(session: Session) -> None:
    """Stop all processes of the lab and remove it.

    Also removes what a crash has left behind. The agent continues, and this machine is its only node again.
    """
    found = find_lab(session)
    was_there = found.down()
    if session.output.is_json:
        session.output.document({"lab": None})
    session.output.note("the lab is down" if was_there else "no lab was up")
    if was_there and found.has_agent():
        session.output.note("the agent continues, with this machine as its only node; end it: ugro agent stop")


@lab.command()
@json_option
@pass_session
def status(session: Session) -> None:
    """Show the lab's nodes and their processes."""
    found = find_lab(session)
    shape = found.shape()
    if session.output.is_json:
        session.output.document({"lab": describe(found, shape)})
    elif shape is not None:
        session.output.table(_HEADER, _rows(found, shape))
    else:
        session.output.note("no lab is up; create one: ugro lab up")
    if found.is_left_over():
        session.output.warn("parts of a lab are left", "remove them: ugro lab down")


def find_lab(session: Session, home: StateDir | None = None) -> Lab:
    if session.cluster is not None:
        raise UsageError("a lab has a cluster file of its own", hint="run it without --cluster")
    return Lab(
        home or StateDir.find(os.environ), log_level=session.log_level, on_wait=session.output.progress
    )


def show_health(output: Output, lab: Lab) -> int:
    """Shows the lab's health; returns 5 if a node cannot be reached."""
    with lab.client() as client:
        reports = client.health()
    if output.is_json:
        output.document({"lab": describe(lab, lab.shape())})
    else:
        health.show(output, reports)
    return 5 if any(report.status is Status.UNREACHABLE for report in reports) else 0


def describe(lab: Lab, shape: Shape | None) -> dict[str, object] | None:
    if shape is None:
        return None
    homes = lab.processes()
    nodes = [
        {
            "name": node.name,
            "speed": node.speed,
            "home": node.home,
            "throttle": node.throttle,
            "pids": sorted(pid for pid, home in homes.items() if home == node.home),
        }
        for node in shape.nodes
    ]
    return {"gpus": shape.gpus, "nodes": nodes}


def _rows(lab: Lab, shape: Shape) -> list[list[Cell]]:
    homes = list(lab.processes().values())
    return [
        [
            Cell(node.name, "bold"),
            Cell(f"{node.speed:g}", is_number=True),
            Cell(node.throttle),
            Cell(str(homes.count(node.home)), is_number=True),
            Cell(node.home),
        ]
        for node in shape.nodes
    ]


def _tell(output: Output, outcome: Outcome, shape: Shape | None) -> None:
    if shape is None:  # removed by another process meanwhile
        return
    output.note(f"{_OUTCOMES[outcome]}: {_speeds(shape)}, {_MEANS[shape.nodes[0].throttle]}")
    output.note("try: ugro health; ugro exec @all -- hostname; when you are done: ugro lab down")
    if os.environ.get("UGRO_CLUSTER"):
        output.warn("UGRO_CLUSTER names another cluster file", "to use the lab: unset UGRO_CLUSTER")


def _speeds(shape: Shape) -> str:
    if len(shape.nodes) > 8:
        return f"{len(shape.nodes)} nodes of speeds from {min(shape.speeds):g} to {max(shape.speeds):g}"
    return f"nodes of speed {', '.join(f'{speed:g}' for speed in shape.speeds)}"

"""``ugro node setup``: makes a Python environment on nodes ahead of time, and compares the versions there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ugro.cli import candidates
from ugro.cli.doctor import SIGNS
from ugro.cli.jobs.options import environment_options
from ugro.cli.output import Cell, Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.core.env_report import SHORT, NodeVersions, Setup, SetupStep
from ugro.core.errors import Interrupted
from ugro.core.finding import Grade
from ugro.core.support.quantity import format_duration, format_size

_HEADER = ("", "NODE", "PYTHON", "TORCH", "CUDA", "NCCL", "DRIVER", "OTHERS", "SIZE", "TIME", "NOTE")
_SPARE = ("TIME", "OTHERS", "SIZE")
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
    calls = session.client(uses_nodes=True).environments
    try:
        for update in calls.setup(nodes, file=file, fields=given):
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
    output.table(_HEADER, [_row(one) for one in done.nodes], spare=_SPARE)
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


def _row(one: NodeVersions) -> list[Cell]:
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

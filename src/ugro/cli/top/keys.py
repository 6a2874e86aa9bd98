"""What a key of ``ugro top`` does to what is shown and selected, and what the agent is asked for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ugro.cli.jobs import describe
from ugro.cli.top.view import SORTS, Item, Seen
from ugro.core.job import Job

UP, DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j")
ESCAPE, TAB, ENTER = "\x1b", "\t", ("\n", "\r")
HELP = (
    "↑ ↓     select a node or a job",
    "Tab     the first job, or back to the nodes",
    "c       cancel the selected job",
    "l       logs of the selected job; n shows the next rank, q returns",
    "d  r    drain the selected node, or resume it",
    "s       sort nodes by name, use, memory or temperature",
    "space   pause, or continue",
    "Esc     select nothing",
    "q       quit",
)


@dataclass(frozen=True, slots=True)
class Act:
    """What the agent is asked for."""

    kind: Literal["cancel", "drain", "resume"]
    target: str  # a job's id, or a node's name
    question: str = ""  # to confirm first


@dataclass(frozen=True, slots=True)
class LogView:
    job: int
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Controls:
    sort: str = "name"
    is_paused: bool = False
    is_over: bool = False
    has_help: bool = False
    selected: Item | None = None
    asked: Act | None = None
    log: LogView | None = None
    message: str = ""


def pressed(controls: Controls, key: str, items: Sequence[Item], seen: Seen) -> tuple[Controls, Act | None]:
    """``items`` in the order in which they are shown."""
    now = replace(controls, message="")
    if now.asked is not None:
        is_meant = key in ("y", "Y")
        return replace(now, asked=None, message="" if is_meant else "nothing was done"), now.asked if is_meant else None
    if now.has_help:
        return replace(now, has_help=False), None
    if now.log is not None:
        return replace(now, log=_log_after(now.log, key)), None
    return _changed(now, key, items, seen)


def footer(controls: Controls, seen: Seen) -> str:
    """The line at the bottom: a question, a message, or the keys that have an effect now."""
    if controls.asked is not None:
        return f"{controls.asked.question} y/N"
    if controls.message:
        return controls.message
    if controls.has_help:
        return "any key returns"
    if controls.log is not None:
        return "q back" + ("  n next rank" if controls.log.ranks > 1 else "")
    return _keys(controls, seen)


def _keys(controls: Controls, seen: Seen) -> str:
    pause = "continue" if controls.is_paused else "pause"
    rest = f"q quit  ↑↓ select  s sort: {controls.sort}  space {pause}  ? help"
    if controls.selected is None:
        return rest
    if controls.selected.kind == "job":
        return f"job {controls.selected.name}: c cancel  l logs   {rest}"
    is_drained = any(one.name == controls.selected.name and one.drained is not None for one in seen.nodes)
    return f"{controls.selected.name}: {'r resume' if is_drained else 'd drain'}   {rest}"


def _changed(now: Controls, key: str, items: Sequence[Item], seen: Seen) -> tuple[Controls, Act | None]:
    if key in UP or key in DOWN:
        return replace(now, selected=_neighbour(now.selected, items, -1 if key in UP else 1)), None
    if key == TAB:
        return replace(now, selected=_other_kind(now.selected, items)), None
    if key in ("c", "l", *ENTER):
        return _with_job(now, key, seen), None
    if key in ("d", "r"):
        return _with_node(now, key, seen)
    return _shown(now, key), None


def _shown(now: Controls, key: str) -> Controls:
    if key == "s":
        return replace(now, sort=SORTS[(SORTS.index(now.sort) + 1) % len(SORTS)])
    if key == " ":
        return replace(now, is_paused=not now.is_paused)
    if key in ("?", "h"):
        return replace(now, has_help=True)
    if key == "q" or (key == ESCAPE and now.selected is None):
        return replace(now, is_over=True)
    return replace(now, selected=None) if key == ESCAPE else now


def _neighbour(selected: Item | None, items: Sequence[Item], step: int) -> Item | None:
    if not items:
        return None
    if selected not in items:
        return items[0] if step > 0 else items[-1]
    return items[max(0, min(len(items) - 1, items.index(selected) + step))]


def _other_kind(selected: Item | None, items: Sequence[Item]) -> Item | None:
    wanted = "node" if selected is not None and selected.kind == "job" else "job"
    return next((item for item in items if item.kind == wanted), selected)


def _with_job(now: Controls, key: str, seen: Seen) -> Controls:
    chosen = now.selected.name if now.selected and now.selected.kind == "job" else None
    job = next((one for one in seen.jobs if str(one.id) == chosen), None)
    if job is None:
        return replace(now, message="select a job first: ↑ ↓")
    if key == "c":
        return replace(now, asked=Act("cancel", str(job.id), f"cancel {_named(job)}?"))
    return replace(now, log=LogView(job.id, 0, describe.ranks(job)))


def _named(job: Job) -> str:
    nodes = f" on {', '.join(job.held.node_names)}" if job.held else ""
    return f"job {job.id} {job.spec.name} of {job.user}, {job.state}{nodes}"


def _with_node(now: Controls, key: str, seen: Seen) -> tuple[Controls, Act | None]:
    chosen = now.selected.name if now.selected and now.selected.kind == "node" else None
    if chosen is None:
        return replace(now, message="select a node first: ↑ ↓"), None
    if key == "r":
        return now, Act("resume", chosen)
    count = len([job for job in seen.jobs if job.held and chosen in job.held.node_names])
    running = f"; {count} job{'s continue' if count > 1 else ' continues'} there" if count else ""
    question = f"drain {chosen}? No new job starts there{running}."
    return replace(now, asked=Act("drain", chosen, question)), None


def _log_after(log: LogView, key: str) -> LogView | None:
    if key in ("q", "l", ESCAPE):
        return None
    return replace(log, rank=(log.rank + 1) % log.ranks) if key == "n" else log

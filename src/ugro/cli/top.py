"""``ugro top``: the cluster in a terminal, live."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Literal

import click

from ugro.cli.health import check_interval
from ugro.cli.jobs import describe
from ugro.cli.jobs.document import job_document
from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.cli.top_view import SORTS, Group, Item, Seen, groups, headline, lines
from ugro.cli.untrusted import TerminalFilter
from ugro.client.client import Client
from ugro.client.job_logs import LogChoice
from ugro.features.alerts.operations import ListAlerts
from ugro.features.services.operations import ListServices
from ugro.features.training.operations import ListHeadlines
from ugro.kernel.agent.operations import DrainNode, ResumeNode
from ugro.kernel.jobs.model import FINAL_STATES, WAITING_STATES, Job, JobState
from ugro.kernel.jobs.operations import CancelJob
from ugro.kernel.support.errors import UgroError, Unreachable

# --- keys -------------------------------------------------------------------------------------------------------------
# What a key of ``ugro top`` does to what is shown and selected, and what the agent is asked for. Pure.


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


# --- command ----------------------------------------------------------------------------------------------------------


_MOST_JOBS = 200
_LIVE = tuple(state for state in JobState if state not in FINAL_STATES)
_KEY = re.compile(r"\x1b[\[O][A-Z]|.", re.DOTALL)
_DONE = {
    "cancel": "job {target} is stopping",
    "drain": "{target} takes no new jobs",
    "resume": "{target} takes jobs again",
}


@click.command()
@click.option("--interval", type=float, default=2.0, show_default=True, help="Seconds between refreshes, 0.2 to 3600.")
@click.option("--sort", type=click.Choice(SORTS), default="name", show_default=True, help="Sort nodes by this.")
@click.option("--once", is_flag=True, help="Print once and exit; the default without a terminal.")
@json_option
@pass_session
def top(session: Session, interval: float, sort: str, once: bool) -> None:
    """Show nodes, GPUs, jobs, services and alerts, live.

    Keys: the arrow keys select a node or a job; c cancels the job, l shows its logs; d drains the node, r resumes it;
    s changes the order, space pauses, ? shows all keys, q quits.
    """
    check_interval(interval)
    client, output = session.client(), session.output
    output.progress("probing the nodes")
    seen = look(client)
    if output.is_json:
        jobs = [job_document(job) for job in seen.jobs]
        found = list(seen.headlines.values())
        rest = {"alerts": seen.alerts, "headlines": found, "services": seen.services}
        output.document({"nodes": seen.nodes, "jobs": jobs, **rest})
    elif once or not output.can_redraw:
        output.text(headline(seen))
        output.drawn(lines(output, seen, sort))
    else:
        _Screen(output, client, interval, sort).run(seen)


def look(client: Client) -> Seen:
    nodes = client.health()
    jobs = sorted(client.jobs.newest(_MOST_JOBS, states=_LIVE), key=_place)
    alerts = client.ask(ListAlerts(limit=0)).alerts
    is_running = any(job.state is JobState.RUNNING for job in jobs)
    found = {one.job: one for one in client.ask(ListHeadlines()).headlines} if is_running else {}
    services = client.ask(ListServices()).services
    return Seen(client.agent().cluster_name, nodes, jobs, alerts, found, services)


def _place(job: Job) -> tuple[bool, int]:
    """Running jobs before waiting ones; the oldest first."""
    return job.state in WAITING_STATES, job.id


class _Screen:
    def __init__(self, output: Output, client: Client, interval_s: float, sort: str) -> None:
        self._output = output
        self._client = client
        self._interval_s = interval_s
        self._controls = Controls(sort=sort)
        self._first = 0  # line that is shown
        self._trouble = ""

    def run(self, seen: Seen) -> None:
        with suppress(KeyboardInterrupt), self._output.whole_screen(), _keys_at_once() as has_keys:
            due = time.monotonic() + self._interval_s
            while not self._controls.is_over:
                drawn = self._draw(seen)
                keys = self._await_keys(due, has_keys)
                items = [group.item for group in drawn if group.item is not None]
                has_acted = any([self._press(key, items, seen) for key in keys])
                if has_acted or (not keys and not self._controls.is_paused):
                    seen = self._look(seen)
                if has_acted or not keys:
                    due = time.monotonic() + self._interval_s

    def _press(self, key: str, items: list[Item], seen: Seen) -> bool:
        """True if something was done that the next look shows."""
        self._controls, act = pressed(self._controls, key, items, seen)
        if act is None:
            return False
        self._controls = replace(self._controls, message=self._done(act))
        return True

    def _done(self, act: Act) -> str:
        try:
            if act.kind == "cancel":
                self._client.ask(CancelJob(act.target))
            elif act.kind == "drain":
                self._client.ask(DrainNode(act.target))
            else:
                self._client.ask(ResumeNode(act.target))
        except UgroError as error:
            return f"error: {error}"
        return _DONE[act.kind].format(target=act.target)

    def _look(self, before: Seen) -> Seen:
        """Keeps the last state, with a message, while the agent cannot be reached."""
        try:
            seen = look(self._client)
        except Unreachable as error:
            self._trouble = f"   {error.message}"
            return before
        self._trouble = ""
        return seen

    # --- drawing -----------------------------------------------------------------------------------------------

    def _draw(self, seen: Seen) -> list[Group]:
        controls = self._controls
        drawn = groups(self._output, seen, controls.sort)
        if controls.selected is not None and all(group.item != controls.selected for group in drawn):
            controls = self._controls = replace(controls, selected=None)  # it has ended
        title = f"{headline(seen)}   {time.strftime('%H:%M:%S')}{self._trouble}"
        body = self._body(drawn)
        self._output.redraw([self._output.cut(title), "", *body], self._output.cut(footer(controls, seen)))
        return drawn

    def _body(self, drawn: list[Group]) -> list[str]:
        controls, output = self._controls, self._output
        if controls.has_help:
            return [output.cut(line) for line in HELP]
        if controls.log is not None:
            return self._log_lines(controls.log)
        shown: list[str] = []
        for group in drawn:
            own = list(group.lines)
            if group.item is not None and group.item == controls.selected:
                self._keep_in_sight(len(shown), len(shown) + len(own) - 1)
                own[0] = output.highlighted(own[0])
            shown += own
        self._first = max(0, min(self._first, len(shown) - 1))
        return shown[self._first :]

    def _keep_in_sight(self, first: int, last: int) -> None:
        room = max(1, self._output.room - 3)  # below the title, and above the count of further lines
        self._first = min(first if first > 1 else 0, max(self._first, last - room + 1))

    def _log_lines(self, log: LogView) -> list[str]:
        room = max(1, self._output.room - 4)
        try:
            pieces = self._client.jobs.logs(log.job, LogChoice(ranks=(log.rank,), tail=room))
            content = b"".join(piece.content for piece in pieces)
        except UgroError as error:
            return [self._output.cut(f"error: {error}")]
        harmless = TerminalFilter(is_dumb=True)
        text = (harmless.feed(content) + harmless.end()).decode(errors="replace").rstrip("\n")
        # Of a progress bar only its last state.
        written = [line.rstrip("\r").rpartition("\r")[2].expandtabs() for line in text.split("\n")]
        title = f"job {log.job}, rank {log.rank} of {log.ranks}: its last lines"
        return [self._output.cut(title), *(self._output.cut(line) for line in written[-room:])]

    # --- keys --------------------------------------------------------------------------------------------------

    def _await_keys(self, until: float, has_keys: bool) -> list[str]:
        """Keys that were pressed; none if it is time to refresh."""
        left_s = until - time.monotonic()
        if not select.select([sys.stdin] if has_keys else [], [], [], max(0.0, left_s))[0]:
            return []
        # Empty: the terminal is gone. Several keys: typed while the screen was drawn.
        found: list[str] = _KEY.findall(os.read(sys.stdin.fileno(), 64).decode(errors="replace"))
        if not found:
            self._controls = replace(self._controls, is_over=True)
        return found


@contextmanager
def _keys_at_once() -> Iterator[bool]:
    """Reads keys without Enter and without echo; yields False if stdin is not a terminal."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield False
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin, termios.TCSADRAIN)  # keeps what was typed before
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)

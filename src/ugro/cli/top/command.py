"""``ugro top``: the cluster in a terminal, live."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

from ugro.cli.health import check_interval
from ugro.cli.jobs.document import job_document
from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.cli.top.view import SORTS, Curve, Seen, headline, lines
from ugro.client.client import Client
from ugro.core.errors import Unreachable
from ugro.core.job import FINAL_STATES, WAITING_STATES, Job, JobState

_MOST_JOBS = 200
_MOST_CURVES = 8  # of the newest trainings
_BINS = 24
_LIVE = tuple(state for state in JobState if state not in FINAL_STATES)
_KEYS = "q quit  s sort: {sort}  ↑↓ scroll  space {pause}"
_KEY = re.compile(r"\x1b[\[O][A-Z]|.", re.DOTALL)
_UP, _DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j")


@click.command()
@click.option("--interval", type=float, default=2.0, show_default=True, help="Seconds between refreshes, 0.2 to 3600.")
@click.option("--sort", type=click.Choice(SORTS), default="name", show_default=True, help="Sort nodes by this.")
@click.option("--once", is_flag=True, help="Print once and exit; the default without a terminal.")
@json_option
@pass_session
def top(session: Session, interval: float, sort: str, once: bool) -> None:
    """Show nodes, GPUs, jobs and alerts, live.

    Keys: q quits, s changes the order, the arrow keys scroll, space pauses.
    """
    check_interval(interval)
    client, output = session.client(), session.output
    output.progress("probing the nodes")
    seen = look(client)
    if output.is_json:
        jobs = [job_document(job) for job in seen.jobs]
        output.document({"nodes": seen.nodes, "jobs": jobs, "alerts": seen.alerts})
    elif once or not output.can_redraw:
        output.text(headline(seen))
        output.drawn(lines(output, seen, sort))
    else:
        _Screen(output, client, interval, sort).run(seen)


def look(client: Client) -> Seen:
    nodes = client.health()
    jobs = sorted(client.jobs.newest(_MOST_JOBS, states=_LIVE), key=_place)
    alerts, _ = client.alerts(0)
    running = [job for job in jobs if job.state is JobState.RUNNING][:_MOST_CURVES]
    found = {job.id: client.jobs.loss(job.id, _BINS) for job in running}
    losses = {job: Curve(values) for job, values in found.items() if values}
    return Seen(client.agent().cluster_name, nodes, jobs, alerts, losses)


def _place(job: Job) -> tuple[bool, int]:
    """Running jobs before waiting ones; the oldest first."""
    return job.state in WAITING_STATES, job.id


class _Screen:
    def __init__(self, output: Output, client: Client, interval_s: float, sort: str) -> None:
        self._output = output
        self._client = client
        self._interval_s = interval_s
        self._sort = sort
        self._first = 0  # line that is shown
        self._is_paused = False
        self._trouble = ""

    def run(self, seen: Seen) -> None:
        with suppress(KeyboardInterrupt), self._output.whole_screen(), _keys_at_once() as has_keys:
            is_wanted = True
            while is_wanted:
                self._draw(seen)
                is_wanted, is_due = self._await_key(time.monotonic() + self._interval_s, has_keys)
                if is_due and not self._is_paused:
                    seen = self._look(seen)

    def _look(self, before: Seen) -> Seen:
        """Keeps the last state, with a message, while the agent cannot be reached."""
        try:
            seen = look(self._client)
        except Unreachable as error:
            self._trouble = f"   {error.message}"
            return before
        self._trouble = ""
        return seen

    def _draw(self, seen: Seen) -> None:
        drawn = lines(self._output, seen, self._sort)
        self._first = max(0, min(self._first, len(drawn) - 1))
        keys = _KEYS.format(sort=self._sort, pause="continue" if self._is_paused else "pause")
        title = f"{headline(seen)}   {time.strftime('%H:%M:%S')}{self._trouble}"
        self._output.redraw([self._output.cut(title), "", *drawn[self._first :]], keys)

    def _await_key(self, until: float, has_keys: bool) -> tuple[bool, bool]:
        """Whether to continue, and whether it is time to refresh."""
        while (left_s := until - time.monotonic()) > 0:
            if not select.select([sys.stdin] if has_keys else [], [], [], left_s)[0]:
                break
            # Empty: the terminal is gone. Several keys: typed while the screen was drawn.
            keys = _KEY.findall(os.read(sys.stdin.fileno(), 64).decode(errors="replace")) or ["q"]
            if not {"q", "\x03", "\x1b"}.isdisjoint(keys):
                return False, False
            if any([self._handled(key) for key in keys]):
                return True, False
        return True, True

    def _handled(self, key: str) -> bool:
        if key == "s":
            self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]
        elif key == " ":
            self._is_paused = not self._is_paused
        elif key in _UP:
            self._first -= 1
        elif key in _DOWN:
            self._first += 1
        else:
            return False
        return True


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

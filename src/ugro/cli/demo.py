"""``ugro demo``: UGRO at work on this machine alone. Each step shows one thing; the last one cleans up."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import click

from ugro.cli import health
from ugro.cli.lab import find_lab
from ugro.cli.output import Cell, Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.core.errors import UgroError
from ugro.core.quantity import format_duration
from ugro.core.statedir import StateDir
from ugro.lab.enter import MARK
from ugro.lab.lab import Lab
from ugro.lab.measure import Pace, measure
from ugro.lab.shape import Wish

_SPEEDS = (1.0, 0.5, 0.25)
_HEADER = ("NODE", "SPEED", "WORK/S", "OF FASTEST", "")
_BAR_WIDTH = 40
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command()
@click.option("--keep", is_flag=True, help="Leave the nodes up, in your own UGRO_HOME, to go on with.")
@json_option
@pass_session
def demo(session: Session, keep: bool) -> None:
    """Show UGRO at work on this machine alone: three unequal nodes, how they do, how fast they are.

    Nothing is left behind, also after Ctrl-C.
    """
    started = time.monotonic()
    output = session.output
    with contextlib.ExitStack() as stack:
        lab = find_lab(session) if keep else stack.enter_context(_passing_lab(session))
        _make_nodes(output, lab)
        _show_health(output, lab)
        paces = _show_paces(output, lab)
    elapsed_s = time.monotonic() - started
    if output.is_json:
        output.document({"demo": {"nodes": _documents(paces), "seconds": round(elapsed_s, 3), "kept": keep}})
    _say_goodbye(output, keep, elapsed_s)


# --- the steps -------------------------------------------------------------------------------------------------


def _make_nodes(output: Output, lab: Lab) -> None:
    gpus = 1 if shutil.which("cc") else 0
    output.note(f"Three nodes on this machine: a whole core, half of one, a quarter of one{_with_gpus(gpus)}.")
    lab.up(Wish(len(_SPEEDS), _SPEEDS, gpus))


def _show_health(output: Output, lab: Lab) -> None:
    output.note("\nHow they do, as `ugro health` shows it:\n")
    with lab.client() as client:
        reports = client.health()
    if not output.is_json:
        health.show(output, reports)
    if unreachable := [report for report in reports if report.facts is None]:
        first = unreachable[0]
        raise UgroError(first.error or "does not answer", subject=first.name, hint=first.hint)


def _show_paces(output: Output, lab: Lab) -> list[Pace]:
    output.note("\nThe same work on all three at once, as `ugro exec @all` runs it:\n")
    output.progress("measuring for some seconds")
    with lab.client() as client:
        paces = measure(client)
    if not output.is_json:
        output.table(_HEADER, _rows(paces))
    return paces


def _say_goodbye(output: Output, keep: bool, elapsed_s: float) -> None:
    if keep:
        output.note(f"\nDone in {format_duration(elapsed_s)}. The nodes stay up until: ugro lab down")
        output.note("Try: ugro health --watch; ugro exec @all -- uptime; ugro lab status")
        return
    output.note(f"\nDone in {format_duration(elapsed_s)}; the nodes are gone again. To go on by yourself:")
    output.note("  ugro lab up        nodes like these, to try things on")
    output.note("  ugro init          a cluster.yaml from your SSH hosts")
    output.note("  ugro health        how they do")


# --- a lab that passes -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _passing_lab(session: Session) -> Iterator[Lab]:
    """In a state directory of its own, with an agent of its own; both end with it, whatever happens."""
    before = {number: signal.signal(number, _end) for number in _ENDS}
    home = StateDir(Path(tempfile.mkdtemp(prefix="ugro-demo-")))
    lab = find_lab(session, home)
    # The agent carries the lab's mark too: it is ended even if it has hardly begun and cannot be asked yet.
    os.environ[MARK] = str(lab.root / "agent")
    try:
        yield lab
    except UgroError:
        _quote_agent(session.output, home)
        raise
    finally:
        _ignore_ends()
        session.output.progress("taking the nodes down")
        try:
            lab.down(with_agent=True)
        finally:
            del os.environ[MARK]
            shutil.rmtree(home.path, ignore_errors=True)
            for number, handler in before.items():
                signal.signal(number, handler)


def _quote_agent(output: Output, home: StateDir) -> None:
    """Its files are gone by the time anybody could read them."""
    if home.errors.exists() and (lines := home.errors.read_text(errors="replace").strip().splitlines()):
        output.note(f"the agent's last words: {lines[-1]}")


def _end(number: int, frame: FrameType | None) -> None:
    _ignore_ends()  # a second Ctrl-C must not keep the first from cleaning up
    sys.exit(128 + number)


def _ignore_ends() -> None:
    for number in _ENDS:
        signal.signal(number, signal.SIG_IGN)


# --- tables ----------------------------------------------------------------------------------------------------


def _rows(paces: Sequence[Pace]) -> list[list[Cell]]:
    return [
        [
            Cell(pace.node, "bold"),
            Cell(f"{speed:g}", is_number=True),
            Cell(f"{pace.rounds_per_s:.0f}", is_number=True),
            Cell(f"{ratio:.2f}", is_number=True),
            Cell("█" * max(1, round(ratio * _BAR_WIDTH)), "good"),
        ]
        for pace, speed, ratio in _compared(paces)
    ]


def _documents(paces: Sequence[Pace]) -> list[dict[str, object]]:
    return [
        {"name": pace.node, "speed": speed, "work_per_s": round(pace.rounds_per_s, 1), "ratio": round(ratio, 4)}
        for pace, speed, ratio in _compared(paces)
    ]


def _compared(paces: Sequence[Pace]) -> Iterator[tuple[Pace, float, float]]:
    fastest = max(pace.rounds_per_s for pace in paces)
    for pace, speed in zip(paces, _SPEEDS, strict=True):
        yield pace, speed, pace.rounds_per_s / fastest


def _with_gpus(gpus: int) -> str:
    return ", each with a pretend GPU of its own kind" if gpus else ""

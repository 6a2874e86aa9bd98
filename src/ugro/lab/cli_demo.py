"""``ugro demo``: shows UGRO on this machine alone, step by step, and cleans up."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click

from ugro.cli import health
from ugro.cli.jobs.document import job_document
from ugro.cli.jobs.status import status
from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.kernel.jobs.operations import Details, GetJob
from ugro.kernel.support.errors import TimedOut, UgroError
from ugro.kernel.support.quantities import format_duration
from ugro.kernel.support.state_dir import StateDir
from ugro.lab.cli import find_lab
from ugro.lab.demo_training import (
    Comparison,
    StepTime,
    Watch,
    document,
    has_torch,
    launch,
    show_command,
    show_results,
    show_step_times,
    step_times,
    verdict,
)
from ugro.lab.enter import MARK
from ugro.lab.lab import Lab
from ugro.lab.nodes import Wish

_SPEEDS = (1.0, 0.5, 0.25)
_LIMIT_S = 360  # usually a minute and a half; longer on a busy machine
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command()
@click.option("--accident", is_flag=True, help="Run another demo: a rank is killed, and the job recovers.")
@click.option("--keep", is_flag=True, help="Keep the simulated nodes in your own UGRO_HOME afterwards.")
@click.option("--epochs", type=click.IntRange(1), metavar="N", help="Epochs of the GPT training; default: 3.")
@click.option("--gentle", is_flag=True, help="Take no priority over other programs on this machine.")
@json_option
@pass_session
def demo(session: Session, accident: bool, keep: bool, epochs: int | None, gentle: bool) -> None:
    """Train on three unequal simulated nodes on this machine.

    Trains a small GPT twice, with equal shares for all nodes and with shares by measured speed, and shows the gain.
    With --accident, or without PyTorch, a training in plain Python runs instead: one of its ranks is killed, and the
    job resumes from its checkpoint. The demo takes one or two minutes and removes everything afterwards, also on
    Ctrl-C.
    """
    started = time.monotonic()
    output = session.output
    with contextlib.ExitStack() as stack:
        lab = find_lab(session) if keep else stack.enter_context(_temporary_lab(session))
        stack.enter_context(_within(_LIMIT_S))
        _make_nodes(output, lab, takes_precedence=not (keep or gentle))
        client = stack.enter_context(lab.client())
        _show_health(output, client)
        is_balanced = not accident and _has_torch(output)
        shown = _balance(output, lab, client, epochs) if is_balanced else _train(session, lab, client)
    elapsed_s = time.monotonic() - started
    if output.is_json:
        output.document({"demo": {**shown, "seconds": round(elapsed_s, 3), "kept": keep}})
    _say_goodbye(output, keep, elapsed_s)


# --- the steps -------------------------------------------------------------------------------------------------


def _make_nodes(output: Output, lab: Lab, *, takes_precedence: bool) -> None:
    gpus = 1 if shutil.which("cc") else 0
    output.note(f"Three nodes on this machine: one core, half a core, a quarter of a core{_with_gpus(gpus)}.")
    if takes_precedence:
        output.note("They take priority over other programs meanwhile, so that the comparison is fair.")
    lab.up(Wish(len(_SPEEDS), _SPEEDS, gpus, takes_precedence=takes_precedence))


def _with_gpus(gpus: int) -> str:
    return "; each with a simulated GPU" if gpus else ""


def _show_health(output: Output, client: Client) -> None:
    show_command(output, "ugro health")
    reports = client.health()
    if not output.is_json:
        health.show(output, reports)
    if unreachable := [report for report in reports if report.facts is None]:
        first = unreachable[0]
        raise UgroError(first.error or "does not answer", subject=first.name, hint=first.hint)


def _has_torch(output: Output) -> bool:
    if has_torch():
        return True
    output.note("", "PyTorch is not installed: the training below is plain Python, with equal shares.")
    output.note("For the balanced training: pip install torch; ugro demo")
    return False


def _balance(output: Output, lab: Lab, client: Client, epochs: int | None) -> dict[str, object]:
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > cores:
        output.note("", f"This machine is busy (load {busy:.0f} on {cores} cores): the figures vary more.")
    output.note("")
    output.note("One command trains a small GPT on all three nodes. First, all nodes get equal shares of each batch;")
    output.note("then each gets a share that fits its speed, which is measured during the training.")
    trials = Comparison(output, client, len(_SPEEDS), epochs).run()
    if not output.is_json:
        output.note("", "Average time of a step: █ computing, ░ waiting for slower nodes.", "")
        show_results(output, trials, _speeds(lab))
        output.note("")
        for line in verdict(trials):
            output.note(line)
    return document(trials)


def _train(session: Session, lab: Lab, client: Client) -> dict[str, object]:
    output = session.output
    output.note("", "One command trains a small neural network on all three nodes:")
    job = Watch(output, lab, client).follow(launch(output, client, nodes=len(_SPEEDS)))
    times = step_times(client, job)
    if not output.is_json:
        _show_end(session, lab, times)
    return _document(client.ask(GetJob(str(job.id))), times)


def _show_end(session: Session, lab: Lab, times: Sequence[StepTime]) -> None:
    output = session.output
    show_command(output, "ugro status")
    inside = _LabSession(session.cluster, session.log_level, output, lab)
    status.main([], prog_name="ugro status", obj=inside, standalone_mode=False)
    output.note("")
    output.note("Average time of a step. All ranks get equal shares, so the slowest sets the pace. With ugro.train,")
    output.note("which needs PyTorch, each rank gets a share that fits its speed.", "")
    show_step_times(output, times, _speeds(lab))


def _say_goodbye(output: Output, keep: bool, elapsed_s: float) -> None:
    if keep:
        output.note("", f"Done in {format_duration(elapsed_s)}. The nodes stay up; remove them: ugro lab down")
        output.note("Try: ugro events last; ugro logs last --attempt all; ugro launch YOURS.py --nodes 3")
        return
    output.note("", f"Done in {format_duration(elapsed_s)}; the nodes are removed. What to do next:")
    output.note("  ugro lab up        create nodes like these")
    output.note("  ugro init          write cluster.yaml from your SSH hosts")
    output.note("  ugro launch        train your own script: any that torchrun can run; ugro.train balances it")


@dataclass(slots=True)
class _LabSession(Session):
    """Makes a command use the lab, whatever cluster the user has."""

    lab: Lab

    def new_client(self, *, any_cluster: bool = False) -> Client:
        return self.lab.client()


def _speeds(lab: Lab) -> dict[str, float]:
    shape = lab.shape()
    return {node.name: node.speed for node in shape.nodes} if shape else {}


def _document(details: Details, times: Sequence[StepTime]) -> dict[str, object]:
    return {"job": job_document(details.job, details.attempts), "steps": list(times)}


# --- a temporary lab -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _temporary_lab(session: Session) -> Iterator[Lab]:
    """With its own state directory and agent; both are always removed."""
    before = {number: signal.signal(number, _end) for number in _ENDS}
    home = StateDir(Path(tempfile.mkdtemp(prefix="ugro-demo-")))
    lab = find_lab(session, home)
    # The agent carries the lab's mark too, so that it is stopped even if it does not answer yet.
    os.environ[MARK] = str(lab.root / "agent")
    try:
        yield lab
    except UgroError:
        _quote_agent(session.output, home)
        raise
    finally:
        _ignore_ends()
        session.output.progress("removing the nodes")
        try:
            lab.down(with_agent=True)
        finally:
            del os.environ[MARK]
            shutil.rmtree(home.path, ignore_errors=True)
            for number, handler in before.items():
                signal.signal(number, handler)


def _quote_agent(output: Output, home: StateDir) -> None:
    """Because its files are removed."""
    if home.errors.exists() and (lines := home.errors.read_text(errors="replace").strip().splitlines()):
        output.note(f"last line of the agent's errors: {lines[-1]}")


def _end(number: int, frame: FrameType | None) -> None:
    _ignore_ends()  # a second Ctrl-C must not keep the first from cleaning up
    sys.exit(128 + number)


def _ignore_ends() -> None:
    for number in _ENDS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _within(limit_s: float) -> Iterator[None]:
    """Ends the demo if something hangs."""
    before = signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _give_up(number: int, frame: FrameType | None) -> None:
    raise TimedOut(f"the demo has not ended within {_LIMIT_S} s", hint="is this machine very busy? try again")

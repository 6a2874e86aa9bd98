"""The balanced training of ``ugro demo``: the same GPT twice on unequal nodes, with equal and with measured shares.

The two run one after the other, because they would compete for the cores. All figures are measured by the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from ugro.cli.jobs.describe import sentence
from ugro.cli.jobs.logs import Prefixed
from ugro.cli.output import Cell, Output
from ugro.client.client import Client
from ugro.client.job_logs import LogChoice, LogPiece
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.support.errors import UgroError
from ugro.lab import train
from ugro.lab.lab import Lab

# --- training ---------------------------------------------------------------------------------------------------------
# The training of ``ugro demo --accident``: launches it, kills a rank, follows it to its end, compares the ranks.


_HEADER = ("RANK", "NODE", "SPEED", "COMPUTES", "WAITS", "")
_BAR_WIDTH = 44
_PID = re.compile(r"pid (\d+):")
_TIMES = re.compile(r"of each step ([\d.]+) ms computing, ([\d.]+) ms waiting")


@dataclass(frozen=True, slots=True)
class StepTime:
    """The average time of a step on one rank."""

    rank: int
    node: str
    compute_s: float
    wait_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.wait_s


def show_command(output: Output, text: str) -> None:
    """Prints a command as if the user had typed it."""
    if not (output.is_quiet or output.is_json):
        output.raw(f"\n{output.styled(f'$ {text}', 'bold', sys.stderr)}\n\n".encode(), to_stderr=True)


def script(name: str) -> str:
    """The path of a script of this package, relative to the current directory if it is below it."""
    path = Path(train.__file__).with_name(name)
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def launch(output: Output, client: Client, *, nodes: int) -> Job:
    file = script(Path(train.__file__).name)
    show_command(output, f"ugro launch {shlex.quote(file)} --nodes {nodes}")
    return client.jobs.submit(fields={"script": file, "nodes": str(nodes)})


class Watch:
    """Follows a job to its end, and kills its last rank when half of the training is done."""

    def __init__(self, output: Output, lab: Lab, client: Client) -> None:
        self._output = output
        self._lab = lab
        self._client = client
        self._lines = Prefixed(output)
        self._first_rank = b""  # what it wrote in the first attempt
        self._has_killed = False

    def follow(self, job: Job) -> Job:
        for seen in self._client.jobs.follow(job.id):
            if isinstance(seen, LogPiece):
                self._show(seen)
                self._disturb_if_half_done(job, seen)
            else:
                job = seen
                self._say(job)
        self._lines.close()
        if job.state is not JobState.SUCCEEDED:
            raise UgroError(sentence(job), hint="try again; ugro demo --keep keeps the nodes for inspection")
        return job

    def _show(self, piece: LogPiece) -> None:
        if not self._output.is_json:
            self._lines.piece(piece)

    def _say(self, job: Job) -> None:
        if job.state is JobState.RECOVERING:
            self._output.note(sentence(job), "")
            self._output.progress(f"job {job.id} waits until then")
        elif job.state is JobState.STARTING:
            if job.attempt > 1:
                self._output.note(f"job {job.id} starts again: attempt {job.attempt}", "")
            self._output.progress(f"job {job.id} starts: {job.reason}")

    # --- the accident ------------------------------------------------------------------------------------------

    def _disturb_if_half_done(self, job: Job, piece: LogPiece) -> None:
        if not self._has_killed and (piece.attempt, piece.rank) == (1, 0):
            self._first_rank += piece.content
            if f"epoch {train.EPOCHS // 2:2} of".encode() in self._first_rank:
                self._kill_last_rank(job)

    def _kill_last_rank(self, job: Job) -> None:
        logs = written(self._client, job)
        rank = max(logs)
        node, text = logs[rank]
        found = _PID.search(text)
        # Kills only processes that carry the lab's mark, whatever a log says.
        if found is None or (pid := int(found[1])) not in self._lab.processes():
            return  # not collected yet; tried again after the next line of rank 0
        self._output.note("", f"Now a simulated accident: rank {rank} on {node} is killed.")
        show_command(self._output, f"kill -9 {pid}")
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
        self._has_killed = True


# --- afterwards ------------------------------------------------------------------------------------------------


def written(client: Client, job: Job) -> dict[int, tuple[str, str]]:
    """By rank: its node, and its log of the newest attempt."""
    logs: dict[int, tuple[str, bytes]] = {}
    for piece in client.jobs.logs(job.id, LogChoice()):
        before = logs.get(piece.rank, ("", b""))[1]
        logs[piece.rank] = (piece.node, before + piece.content)
    return {rank: (node, content.decode(errors="replace")) for rank, (node, content) in sorted(logs.items())}


def step_times(client: Client, job: Job) -> list[StepTime]:
    return [
        StepTime(rank, node, float(found[1]) / 1000, float(found[2]) / 1000)
        for rank, (node, text) in written(client, job).items()
        if (found := _TIMES.search(text))
    ]


def show_step_times(output: Output, times: Sequence[StepTime], speeds: dict[str, float]) -> None:
    output.table(_HEADER, list(_rows(sorted(times, key=lambda time: time.node), speeds)))


def _rows(times: Sequence[StepTime], speeds: dict[str, float]) -> Iterator[list[Cell]]:
    longest_s = max(time.total_s for time in times)
    for time in times:
        computing = round(time.compute_s / longest_s * _BAR_WIDTH)
        waiting = round(time.wait_s / longest_s * _BAR_WIDTH)
        yield [
            Cell(str(time.rank), is_number=True),
            Cell(time.node, "bold"),
            Cell(f"{speeds[time.node]:g}", is_number=True),
            Cell(_milliseconds(time.compute_s), is_number=True),
            Cell(_milliseconds(time.wait_s), is_number=True),
            Cell("█" * computing + "░" * waiting, "good"),
        ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


# --- balance ----------------------------------------------------------------------------------------------------------


MODES = ("off", "adaptive")
_TITLES = {"off": "equal shares", "adaptive": "balanced"}
_SCRIPT = "train_gpt.py"
_STEP = re.compile(r"step (\d+) of (\d+): loss ([\d.]+), ([\d.]+) samples/s, waiting ([\d.]+%)")
_PLAN = re.compile(r"from step (\d+): (.*)")
_HALF = "{:>11}  {:>7}  {:>7}"
_BALANCE_BAR_WIDTH = 26
_SAME_LOSS = 0.005  # rounding differs with the order of sums, and training amplifies it


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run, as its ranks measured it; lists have one item per rank."""

    steps: int
    measured_steps: int  # the last ones: the first, in which shares are found, are not counted
    samples_per_s: float
    waiting_ratio: float
    final_loss: float
    nodes: list[str]
    shares: list[int]
    computing_s: list[float]
    waiting_s: list[float]
    seen: list[int]  # how often a sample was seen: least, most


@dataclass(frozen=True, slots=True)
class Trial:
    job: Job
    result: Result


def has_torch() -> bool:
    """Whether this Python has it; the lab's nodes use the same."""
    return find_spec("torch") is not None


class Comparison:
    def __init__(self, output: Output, client: Client, nodes: int, epochs: int | None = None) -> None:
        self._output = output
        self._client = client
        self._nodes = nodes
        self._args = [] if epochs is None else ["--epochs", str(epochs)]
        self._progress = Progress(output)
        self.trials: dict[str, Trial] = {}

    def run(self) -> dict[str, Trial]:
        for mode in MODES:
            self.trials[mode] = self._train(mode)
        return self.trials

    def _train(self, mode: str) -> Trial:
        file = script(_SCRIPT)
        words = ["ugro", "launch", file, "--nodes", str(self._nodes), "--balance", mode]
        show_command(self._output, shlex.join([*words, *(["--", *self._args] if self._args else [])]))
        fields = {"script": file, "args": self._args, "nodes": str(self._nodes), "balance": mode}
        job = self._client.jobs.submit(fields=fields)
        self._output.progress("the ranks start: slow nodes take a while to load PyTorch")
        written = b""
        result: Result | None = None
        for seen in self._client.jobs.follow(job.id):
            if not isinstance(seen, LogPiece):
                job = seen
            elif seen.rank == 0:
                *lines, written = (written + seen.content).split(b"\n")
                for line in lines:
                    result = self._progress.read(mode, line.decode(errors="replace")) or result
        if job.state is not JobState.SUCCEEDED or result is None:
            raise UgroError(sentence(job), hint="try again; ugro demo --keep keeps the nodes for inspection")
        return Trial(job, result)


class Progress:
    """Reads what rank 0 prints: shows the steps of both runs side by side, and returns its result at the end."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._halves: dict[int, str] = {}  # what the first run reported, by step

    def read(self, mode: str, line: str) -> Result | None:
        if found := _STEP.fullmatch(line):
            self._show_steps(mode, *found.groups())
        elif found := _PLAN.fullmatch(line):
            if not self._halves:
                self._show_titles()
            self._show(f"from step {found[1]}: {found[2]}")
        elif line.startswith("result "):
            return Result(**json.loads(line.removeprefix("result ")))
        return None

    def _show_titles(self) -> None:
        names = _HALF.format("samples/s", "waiting", "loss")
        width = len(names)
        titles = "   ".join(f"{_TITLES[mode].upper():>{width}}" for mode in MODES)
        for line in (f"{'':>9}{titles}", f"{'':>9}{names}   {names}"):
            self._show(self._output.styled(line, "dim"))

    def _show_steps(self, mode: str, step: str, steps: str, loss: str, speed: str, waiting: str) -> None:
        half = _HALF.format(f"{float(speed):.0f}", f"{float(waiting[:-1]):.0f} %", f"{float(loss):.3f}")
        before = ""
        if mode == MODES[0]:
            self._halves[int(step)] = half
        else:
            before = f"{self._halves.get(int(step), ''):>{len(half)}}   "
        self._show(f"{step:>3} of {steps}{before}{half}")

    def _show(self, line: str) -> None:
        if not self._output.is_json:
            self._output.raw(f"{line}\n".encode())


# --- afterwards -------------------------------------------------------------------------------------------------


def gain(trials: dict[str, Trial]) -> float:
    equal, balanced = (trials[mode].result.samples_per_s for mode in MODES)
    return balanced / equal


def document(trials: dict[str, Trial]) -> dict[str, object]:
    runs = {mode: {"job": trial.job.id, **asdict(trial.result)} for mode, trial in trials.items()}
    return {"runs": runs, "gain": gain(trials)}


def verdict(trials: dict[str, Trial]) -> list[str]:
    equal, balanced = (trials[mode].result for mode in MODES)
    begun = balanced.steps - balanced.measured_steps
    lines = [f"{gain(trials):.2f} times as many samples per second, measured after the first {begun} steps."]
    if {*equal.seen, *balanced.seen} == {equal.seen[0]}:
        lines.append(f"In both, every sample was seen once per epoch, {equal.seen[0]} times in all.")
    difference = abs(equal.final_loss - balanced.final_loss)
    learned = "Both learn the same: the" if difference < _SAME_LOSS else "The"
    return [*lines, f"{learned} losses of the last steps differ by {difference:.5f}."]


def show_results(output: Output, trials: dict[str, Trial], speeds: dict[str, float]) -> None:
    ranks = _ranks(trials, speeds)
    output.table(("NODE", "SPEED", "EQUAL", "WAITS", "", "BALANCED", "STILL WAITS", ""), list(ranks))
    output.note("")
    output.table(("RUN", "SHARES", "SAMPLES/S", "WAITING", "LOSS", "GAIN"), list(_summary(trials)))


def _ranks(trials: dict[str, Trial], speeds: dict[str, float]) -> Iterator[list[Cell]]:
    longest_s = max(
        computing + waiting
        for trial in trials.values()
        for computing, waiting in zip(trial.result.computing_s, trial.result.waiting_s, strict=True)
    )
    for node, speed in speeds.items():
        row = [Cell(node, "bold"), Cell(f"{speed:g}", is_number=True)]
        for mode in MODES:
            row += _rank(trials[mode].result, node, longest_s)
        yield row


def _rank(result: Result, node: str, longest_s: float) -> list[Cell]:
    rank = result.nodes.index(node)
    computing, waiting = result.computing_s[rank], result.waiting_s[rank]
    done, idle = (round(part / longest_s * _BALANCE_BAR_WIDTH) for part in (computing, waiting))
    bar = "█" * done + "░" * idle
    return [
        Cell(str(result.shares[rank]), is_number=True),
        Cell(f"{waiting * 1000:.0f} ms", is_number=True),
        Cell(bar, "good"),
    ]


def _summary(trials: dict[str, Trial]) -> Iterator[list[Cell]]:
    for mode, trial in trials.items():
        result = trial.result
        yield [
            Cell(_TITLES[mode], "bold"),
            Cell(" / ".join(str(share) for share in result.shares)),
            Cell(f"{result.samples_per_s:.0f}", is_number=True),
            Cell(f"{result.waiting_ratio:.0%}", is_number=True),
            Cell(f"{result.final_loss:.4f}", is_number=True),
            Cell("" if mode == MODES[0] else f"× {gain(trials):.2f}", "good", is_number=True),
        ]

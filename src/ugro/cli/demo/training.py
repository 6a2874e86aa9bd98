"""The training of ``ugro demo --accident``: launches it, kills a rank, follows it to its end, compares the ranks."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ugro.cli.jobs.describe import sentence
from ugro.cli.jobs.log_printer import Prefixed
from ugro.cli.output import Cell, Output
from ugro.client.client import Client
from ugro.client.job_logs import LogChoice, LogPiece
from ugro.core.errors import UgroError
from ugro.core.job import Job, JobState
from ugro.lab import train
from ugro.lab.lab import Lab

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

"""Many small jobs, and one: UGRO's queue against others', in turn, in one run.

UGRO's time ends when its client has received the end of every job. By then every output is on disk, in the
database; its file is created when it is first read.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.bars import Bar, Row, fastest, print_rows
from bench.peers_jobs import CLOCK, Peer, check, peers
from ugro.client.client import Client
from ugro.kernel.jobs.model import HOLDING_STATES, WAITING_STATES, Job, JobState

_STARTS = 5  # single jobs in each round
_LIMIT_S = 600.0
_OURS = "ugro"

Throughput = Callable[[int, Path], float]
Latency = Callable[[Path], float]


@dataclass(slots=True)
class Contestant:
    """A way to submit jobs, and its measurements so far."""

    queue: str
    name: str
    run: Throughput | None
    start_one: Latency | None
    throughput: Row = field(init=False)
    latency: Row = field(init=False)

    def __post_init__(self) -> None:
        self.throughput = Row(self.name)
        self.latency = Row(self.name)


def measure(count: int, rounds: int) -> list[Bar]:
    with tempfile.TemporaryDirectory(prefix="bench") as folder, ExitStack() as stack:
        found = peers()
        contestants = [*stack.enter_context(_ugro(Path(folder)))]
        for peer in found:
            contestants += _opened(peer, Path(folder), stack)
        for _ in range(rounds):
            for contestant in contestants:
                _measure_once(contestant, count, Path(folder))
    _print(contestants, [peer for peer in found if peer.missing], count)
    return _bars(contestants, count)


def _opened(peer: Peer, folder: Path, stack: ExitStack) -> list[Contestant]:
    if peer.missing:
        return []
    own = folder / peer.name
    own.mkdir()
    ways = stack.enter_context(peer.open(own))
    # A queue's later ways are for many jobs at once; a single job uses the first.
    return [Contestant(peer.name, way.name, way.run, way.start_one if way is ways[0] else None) for way in ways]


def _measure_once(contestant: Contestant, count: int, folder: Path) -> None:
    def fresh() -> Path:
        return Path(tempfile.mkdtemp(dir=folder, prefix="out"))

    if contestant.run is not None:
        contestant.throughput.seconds.append(contestant.run(count, fresh()))
        _progress(f"{contestant.name}: {count / contestant.throughput.seconds[-1]:.0f} jobs/s")
    if contestant.start_one is not None:
        contestant.latency.seconds += [contestant.start_one(fresh()) for _ in range(_STARTS)]
        _progress(f"{contestant.name}: starts after {min(contestant.latency.seconds[-_STARTS:]) * 1e3:.1f} ms")


# --- UGRO ---------------------------------------------------------------------------------------------------------


@contextmanager
def _ugro(folder: Path) -> Iterator[list[Contestant]]:
    cluster = folder / "cluster.yaml"
    cluster.write_text(f"nodes:\n  here:\n    transport: local\n    remote_root: {folder / 'node'}\n")
    home = folder / "home"
    with Client(home=home, cluster=cluster) as client:
        empty = folder / "empty"  # as for the peers, no code is sent
        empty.mkdir()
        queue = _UgroQueue(client, home, empty)
        try:
            client.health()  # start the agent and open its link, as a user's first command does
            yield list(queue.contestants())
        finally:
            client.stop_agent()


class _UgroQueue:
    def __init__(self, client: Client, home: Path, empty: Path) -> None:
        self._client = client
        self._home = home
        self._empty = empty
        self._command = shutil.which("ugro", path=str(Path(sys.executable).parent)) or "ugro"

    def contestants(self) -> Iterator[Contestant]:
        yield Contestant(_OURS, "ugro, one submit each", self._one_by_one, self._start_one)
        yield Contestant(_OURS, "ugro, submitted together", self._together, None)
        yield Contestant(_OURS, "ugro run -d", None, self._start_by_command)

    def _one_by_one(self, count: int, _: Path) -> float:
        started = time.perf_counter()
        jobs = [self._client.jobs.submit(fields=self._fields("echo", str(number))) for number in range(count)]
        return self._until_all_ended(jobs, started)

    def _together(self, count: int, _: Path) -> float:
        started = time.perf_counter()
        jobs = self._client.jobs.submit_many([self._fields("echo", str(number)) for number in range(count)])
        return self._until_all_ended(jobs, started)

    def _until_all_ended(self, jobs: Sequence[Job], started: float) -> float:
        left = ids = {job.id for job in jobs}
        while left:
            self._client.jobs.wait(max(left), timeout_s=_LIMIT_S)
            alive = self._client.jobs.newest(None, states=WAITING_STATES | HOLDING_STATES)
            left = ids & {job.id for job in alive}
            if time.perf_counter() - started > _LIMIT_S:
                raise RuntimeError(f"ugro: {len(left)} of {len(ids)} jobs have not ended")
        seconds = time.perf_counter() - started
        if wrong := [job for job in self._client.jobs.newest(len(ids)) if job.state is not JobState.SUCCEEDED]:
            raise RuntimeError(f"ugro: {len(wrong)} jobs did not succeed: {wrong[0]}")
        check(_OURS, len(ids), [output_of(self._client, number) for number in ids])
        return seconds

    def _start_one(self, _: Path) -> float:
        started = time.time()
        job = self._client.jobs.submit(fields=self._fields(*CLOCK))
        self._client.jobs.wait(job.id, timeout_s=_LIMIT_S)
        return float(output_of(self._client, job.id)) - started

    def _start_by_command(self, _: Path) -> float:
        started = time.time()
        argv = [self._command, "run", "-d", "--cpus", "0", "--", *CLOCK]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self._home), "UGRO_HOME": str(self._home)}
        subprocess.run(argv, env=environment, check=True, capture_output=True, timeout=_LIMIT_S, cwd=self._empty)
        job = self._client.jobs.wait("last", timeout_s=_LIMIT_S)
        return float(output_of(self._client, job.id)) - started

    def _fields(self, *command: str) -> dict[str, object]:
        return {"command": list(command), "cpus": "0", "workdir": str(self._empty)}


def output_of(client: Client, job: int) -> str:
    return b"".join(piece.content for piece in client.jobs.logs(job)).decode()


# --- results ------------------------------------------------------------------------------------------------------


def _print(contestants: Sequence[Contestant], missing: Sequence[Peer], count: int) -> None:
    absent = [Row(peer.name, remark=f"not installed: {peer.missing}") for peer in missing]
    ran = [one.throughput for one in contestants if one.throughput.seconds]
    for row in ran:
        row.remark = f"{count / row.median_s:.0f} jobs/s"
    print_rows(f"{count:,} jobs, from the first submit to the last output", [*ran, *absent])
    print_rows("one job, from submit to its first deed (no bar)", [*_started(contestants), *absent])


def _started(contestants: Sequence[Contestant]) -> list[Row]:
    ours = next(one.latency for one in contestants if one.queue == _OURS)
    rows = [one.latency for one in contestants if one.latency.seconds]
    for one in contestants:
        if one.queue != _OURS and one.latency.seconds:
            one.latency.remark = f"ugro takes {ours.median_s / one.latency.median_s:.2f} of it"
    return rows


def _bars(contestants: Sequence[Contestant], count: int) -> list[Bar]:
    """Each queue by its faster way to submit many jobs."""
    queues: dict[str, list[Row]] = {one.queue: [] for one in contestants}
    for one in contestants:
        queues[one.queue].append(one.throughput)
    ours = fastest(queues.pop(_OURS))
    assert ours is not None
    found = [row for rows in queues.values() if (row := fastest(rows))]
    return [Bar(f"{count:,} jobs", ours.median_s, peer.median_s, peer.name, 1.0) for peer in found]


def _progress(text: str) -> None:
    print(text, file=sys.stderr)

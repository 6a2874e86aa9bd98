"""A chaos run: jobs handed in to real sshds, and faults of every kind meanwhile. Then all is healed, and judged.

    python -m tests.proof.chaos --seed 7 --seconds 600 --nodes 10

The schedule comes from the seed and is written down, with what each step hit, as JSON lines; ``--replay FILE`` does
those steps again, also when some lines were taken out to find the one that matters.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.proof import schedule
from tests.proof.faults import Step, Target, possible_kinds, root_of
from tests.proof.schedule import Size
from tests.rig import agent as rig
from tests.rig import disk, netns
from tests.rig.disk import SmallDisk
from tests.rig.judge import Book, Final, Ledger, Verdict, judge, missing_files, orphans
from tests.rig.netns import NetnsFarm
from tests.rig.sshd import Farm, SshdFarm
from tests.rig.waiting import end_all_with_variable, wait_until
from ugro import Client
from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.operations import CancelJob
from ugro.kernel.support.errors import InSafeMode, NotFound, Unreachable

T = TypeVar("T")
_COMMANDS_AT_ONCE = 4
# An agent that starts slowly is killed again and again before it answers. What ends safe mode waits for every node,
# and each new agent asks them all again.
_ANSWER_S = 600.0
_QUIET_S = 20.0
_FILES_S = 60.0  # a node that could not be asked is asked again after a while
_AGAIN_S = 0.1
_LOOK_S = 0.25
_YOUNG = 4
_LAST = 200  # steps that are shown when a run is cut short
_DISK_BYTES = 128 << 20  # a node with less than 100 MiB left gets no jobs
_EVERY_NTH_HAS_A_SMALL_DISK = 3


@dataclass
class Report:
    seed: int
    seconds: float
    verdict: Verdict
    jobs: int
    states: Counter[str]
    faults: Counter[str]
    settled_s: float
    surprises: list[str] = field(default_factory=list)  # jobs that had every chance, and did not succeed

    @property
    def complaints(self) -> list[str]:
        return [*self.verdict.complaints, *(f"surprise: {text}" for text in self.surprises)]

    def to_text(self) -> str:
        v = self.verdict
        states = ", ".join(f"{count} {state}" for state, count in self.states.most_common())
        faults = ", ".join(f"{count} × {kind}" for kind, count in self.faults.most_common())
        lines = [
            f"seed {self.seed}, {self.seconds:g} s of faults, settled {self.settled_s:.1f} s after the last",
            f"jobs {self.jobs} ({states}), attempts {v.attempts}",
            f"faults {self.faults.total()}: {faults}",
            f"lost {len(v.lost)}, doubled {len(v.doubled)}, overlapping {len(v.overlapping)}, "
            f"orphans {len(v.orphans)}, untrue {len(v.untrue)}",
            f"logs: {v.whole_logs} whole, {v.log_bytes} bytes compared, {len(v.logs)} wrong",
            f"files that ranks made: {len(v.files)} missing",
            *self.complaints,
        ]
        return "\n".join(lines)


class Chaos:
    def __init__(self, folder: Path, farm: Farm[Any], disks: dict[str, SmallDisk]) -> None:
        self.home = folder / "u"
        self.home.mkdir()
        self.farm = farm
        self.cluster = farm.cluster_yaml()
        self.ledger = Ledger(folder)
        self.book = Book()
        self.finals: dict[str, Final] = {}
        self.kinds = possible_kinds()
        self.target = Target(self.home, self.cluster, self.ledger, self.book, farm.nodes, disks)
        self.record: list[str] = []
        self._hits: Counter[str] = Counter()
        self._began = time.monotonic()
        self._undo: list[tuple[float, int, str, Callable[[], None]]] = []
        self._reasons: dict[str, str] = {}

    # --- the run ------------------------------------------------------------------------------------------------

    def run(self, steps: list[Step]) -> None:
        with ThreadPoolExecutor(_COMMANDS_AT_ONCE) as pool:
            commands: list[Future[None]] = [pool.submit(self._wake)]
            commands[0].result()
            self._began = time.monotonic()
            for number, step in enumerate(steps):
                self._undo_until(step.at_s)
                self._wait_for(step.at_s)
                if step.kind == "submit":
                    commands.append(pool.submit(self._submit, step, number))
                elif step.kind == "cancel":
                    commands.append(pool.submit(self._cancel, step))
                else:
                    self._inflict(step, number)
            self._undo_until(float("inf"))
            for command in commands:
                command.result()

    def settle(self, timeout_s: float) -> float:
        """Until every job that was acknowledged is final; how long that took. What is not, the judge calls lost."""
        began = time.monotonic()
        while time.monotonic() < began + timeout_s:
            for token in self.book.jobs.keys() - self.finals.keys():
                self._look_at(token)
            if self.finals.keys() == self.book.jobs.keys():
                break
            time.sleep(_LOOK_S)
        return time.monotonic() - began

    def report(self, seed: int, seconds: float, settled_s: float) -> Report:
        verdict = judge(self.book, self.ledger, self.finals, self.home)
        roots = [root_of(node) for node in self.farm.nodes]
        with suppress(AssertionError):
            wait_until(lambda: not orphans(self.ledger, roots), _QUIET_S)
        verdict.orphans += orphans(self.ledger, roots)
        with suppress(AssertionError):
            wait_until(lambda: not missing_files(self.book, self.ledger, self.home), _FILES_S)
        verdict.files += missing_files(self.book, self.ledger, self.home)
        states = Counter(final.state for final in self.finals.values())
        report = Report(seed, seconds, verdict, len(self.book.jobs), states, self._hits, settled_s)
        report.surprises = [f"{token} {final.state}: {self._reasons.get(token)}" for token, final in self._surprises()]
        return report

    def seen(self) -> str:
        waiting = [f"{token} (job {self.book.jobs[token]}): {self._reasons.get(token)}"
                   for token in self.book.jobs.keys() - self.finals.keys()]
        parts = ["--- not final", *waiting, "--- runs", *rig.run_folders(self.farm.directory)[:40], "--- agent.log",
                 rig.log_tail(self.home, 40)]
        return "\n".join(parts)

    def _surprises(self) -> Iterator[tuple[str, Final]]:
        for token, final in self.finals.items():
            expected = "failed" if token.startswith("failing") else "succeeded"
            if final.state != expected and not (final.state == "cancelled" and token in self.book.cancelled):
                yield token, final

    # --- commands -----------------------------------------------------------------------------------------------

    def _submit(self, step: Step, number: int) -> None:
        task, more = schedule.task(step, number, len(self.farm.nodes))
        self.book.asked(task)
        fields = {**self.ledger.fields(task), **more}
        job = self._ask(lambda client: client.jobs.submit(fields=fields, env={}, key=task.token))
        self.book.acknowledged(task, job.id)
        self._note("acknowledged", f"{task.token} is job {job.id}")

    def _cancel(self, step: Step) -> None:
        tokens = list(self.book.jobs)[-_YOUNG:]  # older ones are over
        if not tokens:
            return
        token = tokens[int(step.pick * len(tokens))]
        try:
            job = self._ask(lambda client: client.ask(CancelJob(str(self.book.jobs[token]))))
        except NotFound:  # newer than a state that was put back, or lost: the judge says which
            self._note("missed", f"cancel {token}")
            return
        if not job.is_final:
            self.book.was_cancelled(token)
        self._note("cancelled", f"{token}, {job.state}")

    def _look_at(self, token: str) -> None:
        try:
            job: Job = self._ask(lambda client: client.jobs.get(self.book.jobs[token]))
        except NotFound as error:
            self._reasons[token] = str(error)
            if self.book.forgive(token, self.ledger):
                self._note("gone", f"{token} is newer than the state that was put back")
            return
        self._reasons[token] = f"{job.state} in attempt {job.attempt}: {job.reason}"
        if job.is_final:
            # As a user does: only then what small commands wrote is in files, at which the judge looks.
            self._ask(lambda client: list(client.jobs.logs(job.id)))
            if "after this state was saved" in job.reason:
                self.book.settled.add(token)
            self.finals[token] = Final(str(job.state), job.attempt, job.exit_code)

    def _wake(self) -> None:
        self._ask(lambda client: client.health())

    def _ask(self, question: Callable[[Client], T]) -> T:
        deadline = time.monotonic() + _ANSWER_S
        while True:
            try:
                with Client(home=self.home, cluster=self.cluster) as client:
                    return question(client)
            except (Unreachable, InSafeMode):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_AGAIN_S)

    # --- faults -------------------------------------------------------------------------------------------------

    def _inflict(self, step: Step, number: int) -> None:
        hit = self.kinds[step.kind].inflict(self.target, step)
        self._note("hit" if hit else "missed", hit.text if hit else step.kind, step)
        if hit is None:
            return
        self._hits[step.kind] += 1
        if hit.undo is not None:
            heapq.heappush(self._undo, (step.at_s + step.length_s, number, step.kind, hit.undo))

    def _undo_until(self, at_s: float) -> None:
        while self._undo and self._undo[0][0] <= at_s:
            due_s, _, kind, undo = heapq.heappop(self._undo)
            self._wait_for(due_s)
            undo()
            self._note("undone", kind)

    def _wait_for(self, at_s: float) -> None:
        time.sleep(max(0.0, self._began + at_s - time.monotonic()))

    def _note(self, event: str, text: str, step: Step | None = None) -> None:
        entry: dict[str, Any] = {"t": round(time.monotonic() - self._began, 3), "event": event, "text": text}
        self.record.append(json.dumps({**entry, **({"step": asdict(step)} if step else {})}))


@contextmanager
def chaos(nodes: int) -> Iterator[Chaos]:
    """Sshds with a cable each where that can be had, some with a small disk; at the end nothing of it is left."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="c"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        kind: type[Farm[Any]] = NetnsFarm if netns.available() is None else SshdFarm
        farm = kind(folder / "f", nodes)
        disks = _small_disks(farm, stack) if disk.available() is None else {}
        for fault in possible_kinds().values():
            fault.prepare(farm.nodes, stack)
        stack.enter_context(farm)
        made = Chaos(folder, farm, disks)
        stack.callback(end_all_with_variable, "TEST_LEDGER", [str(made.ledger.path)])
        stack.callback(rig.end_agent, made.home)
        yield made


def _small_disks(farm: Farm[Any], stack: ExitStack) -> dict[str, SmallDisk]:
    disks = {}
    for node in farm.nodes[::_EVERY_NTH_HAS_A_SMALL_DISK]:
        made = disks[node.name] = SmallDisk(root_of(node), _DISK_BYTES)
        made.mount()
        stack.callback(made.unmount)
    return disks


def run(
    seed: int, size: Size, steps: list[Step], settle_s: float, keep: Path | None = None
) -> tuple[Report, Chaos]:
    """``keep``: a folder for what the ranks and the agent wrote, if there are complaints."""
    with chaos(size.nodes) as made:
        try:
            made.run(steps)
        except BaseException:
            sys.stderr.write(made.seen() + "\n" + "\n".join(made.record[-_LAST:]) + "\n")
            raise
        settled_s = made.settle(settle_s)
        report = made.report(seed, size.seconds, settled_s)
        if report.complaints:
            sys.stderr.write(made.seen() + "\n")
            _keep([made.ledger.path, *made.home.glob("agent.log*"), *made.home.glob("state.db*")], keep)
    return report, made


def _keep(files: list[Path], folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(file, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.7, help="seconds from one job or fault to the next")
    parser.add_argument("--settle", type=float, default=300, help="seconds for all jobs to end after the last fault")
    parser.add_argument("--record", type=Path, help="where steps and what they hit are written; default: a new file")
    parser.add_argument("--replay", type=Path, help="do the steps of such a file instead of drawing them")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for key in [key for key in os.environ if key.startswith(("UGRO_", "SSH_"))]:
        del os.environ[key]
    size = Size(chosen.nodes, chosen.seconds, chosen.pause, chosen.pause)
    steps = schedule.draw(chosen.seed, size, possible_kinds())
    if chosen.replay:
        steps = schedule.read(chosen.replay.read_text())
    record = chosen.record or Path(tempfile.mkdtemp(prefix="chaos")) / f"seed-{chosen.seed}.jsonl"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(schedule.write(steps))
    _say(f"seed {chosen.seed}: {len(steps)} steps in {chosen.seconds:g} s on {chosen.nodes} sshds, written to {record}")
    report, made = run(chosen.seed, size, steps, chosen.settle, record.with_suffix(".kept"))
    with record.open("a") as file:
        file.writelines(f"{line}\n" for line in made.record)
    _say(report.to_text())
    sys.exit(1 if report.complaints else 0)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

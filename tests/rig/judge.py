"""The judge of jobs: what their ranks wrote down themselves, the kernel's locks and /proc, against what UGRO says.

``Book`` is the test's own record of what it asked for. ``judge`` takes the states that UGRO ended with and looks for
every contradiction: jobs lost or doubled, attempts that overlapped, processes left, logs and files that are not whole.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from tests.rig import witness
from tests.rig.waiting import is_alive, processes_with_variable
from ugro.node.runs.logs import MOST_BYTES

MARK = "UGRO_RUN_DIR"
_ANSWERED_S = 1.0  # an answer is noted here at most so long after the agent gave it


@dataclass(frozen=True)
class Entry:
    event: str
    token: str
    job: int
    attempt: int
    rank: int
    pid: int
    ticks: int
    clock_s: float
    word: str

    @property
    def is_alive(self) -> bool:
        return is_alive(self.pid) and _ticks(self.pid) == self.ticks


@dataclass(frozen=True)
class Task:
    """What a test asks for: the ranks' behaviour, which the judge can foretell."""

    token: str
    ranks: int = 1
    lines: int = 5
    pause_s: float = 0.0
    codes: tuple[int, ...] = (0,)
    leaves_child: bool = False
    hides_child: bool = False
    makes_file: bool = False

    def words(self) -> list[str]:
        codes = ",".join(map(str, self.codes))
        wanted = {"child": self.leaves_child, "hidden": self.hides_child, "file": self.makes_file}
        flags = [flag for flag, is_on in wanted.items() if is_on]
        return [self.token, str(self.lines), f"{self.pause_s:g}", codes, *flags]


def now_s() -> float:
    """By the clock of the ledger."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Ledger:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger"
        self.path.touch()
        Path(f"{self.path}.held").mkdir()

    @property
    def env(self) -> dict[str, str]:
        return {witness.LEDGER: str(self.path)}

    def fields(self, task: Task) -> dict[str, object]:
        """Of a submit: one process, or a rank on each of several nodes."""
        program = str(Path(witness.__file__))
        shared: dict[str, object] = {"name": task.token, "env": self.env, "stop_grace": "1s", "sync": False}
        if task.ranks == 1:
            return {**shared, "command": [sys.executable, "-I", "-S", program, *task.words()]}
        # The program itself, not through a shell: what its node has as Python runs it.
        return {**shared, "script": program, "args": task.words(), "launcher": "ddp", "nodes": str(task.ranks)}

    def entries(self) -> list[Entry]:
        found = []
        for line in self.path.read_text().splitlines():
            event, token, job, attempt, rank, pid, ticks, clock_s, *words = line.split(" ")
            numbers = (int(job), int(attempt), int(rank), int(pid), int(ticks))
            found.append(Entry(event, token, *numbers, float(clock_s), " ".join(words)))
        return found

    def alive(self) -> list[Entry]:
        """Ranks and their children that live now."""
        return [entry for entry in self.entries() if entry.event in ("begin", "child") and entry.is_alive]

    def held(self) -> list[str]:
        return witness.held(str(self.path))

    def end_all(self) -> None:
        """After a test that failed: nothing of it may stay."""
        for entry in self.alive():
            with suppress(ProcessLookupError):
                os.kill(entry.pid, signal.SIGKILL)


class Book:
    """What was asked for and acknowledged; safe to write from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.tasks: dict[str, Task] = {}
        self.jobs: dict[str, int] = {}  # by token, of submits that were acknowledged
        self.cancelled: set[str] = set()  # cancels that were acknowledged
        self.complaints: list[str] = []
        self._acknowledged_s: dict[str, float] = {}
        self._given: dict[int, str] = {}  # by id, also of jobs that are gone
        self._restores: list[tuple[float, float]] = []
        self._undecided_s: float | None = None  # since when the state that was put back knows nothing
        self.settled: set[str] = set()  # that ended after a copy of the state was made which was put back since

    def asked(self, task: Task) -> None:
        with self._lock:
            self.tasks[task.token] = task

    def acknowledged(self, task: Task, job: int) -> None:
        with self._lock:
            self._acknowledged_s.setdefault(task.token, now_s())
            if self.jobs.setdefault(task.token, job) != job:
                self.complaints.append(f"{task.token} was job {self.jobs[task.token]} and is now {job}")
            if (first := self._given.setdefault(job, task.token)) != task.token:
                self.complaints.append(f"{task.token} got the id of {first}: {job}")

    def known_until(self, *, is_undecided: bool) -> float:
        """What a copy that is made now knows of. ``is_undecided``: it is one of a state in safe mode, which knows what
        it knew when it was put back, and nothing of what is adopted later.
        """
        return self._undecided_s if is_undecided and self._undecided_s is not None else now_s()

    def was_put_back(self, saved_s: float) -> None:
        with self._lock:
            self._undecided_s = saved_s

    def was_restored(self, saved_s: float, back_s: float) -> None:
        """The state as of ``saved_s`` was put back at ``back_s``, and the user has decided by now."""
        with self._lock:
            self._restores.append((saved_s, back_s))
            self._undecided_s = None if self._undecided_s == saved_s else self._undecided_s

    def forgive(self, token: str, ledger: Ledger) -> bool:
        """Of a job that UGRO does not know any more. What a copy of the state was too old for is gone by definition:
        a job that was acknowledged after the copy was made, and of which no node had anything when it was put back.
        One that ran then had to be adopted, and none that was acknowledged later may be gone.
        """
        at_s, own = self._acknowledged_s[token], [entry for entry in ledger.entries() if entry.token == token]
        backs_s = [back_s for saved_s, back_s in self._restores if saved_s <= at_s <= back_s + _ANSWERED_S]
        if not any(not _ran_at(back_s, own) for back_s in backs_s) or any(entry.is_alive for entry in own):
            return False
        with self._lock:
            self.jobs.pop(token, None)
            self.tasks.pop(token, None)
        return True

    def was_cancelled(self, token: str) -> None:
        with self._lock:
            self.cancelled.add(token)


@dataclass(frozen=True)
class Final:
    """How UGRO says that a job ended."""

    state: str
    attempt: int
    exit_code: int | None = None


@dataclass
class Verdict:
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    overlapping: list[str] = field(default_factory=list)
    untrue: list[str] = field(default_factory=list)  # what UGRO says and the ledger does not
    orphans: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # what a rank made and is not here
    attempts: int = 0
    whole_logs: int = 0
    log_bytes: int = 0

    @property
    def complaints(self) -> list[str]:
        kinds = ("lost", "doubled", "overlapping", "untrue", "orphans", "logs", "files")
        return [f"{kind}: {text}" for kind in kinds for text in getattr(self, kind)]


def judge(book: Book, ledger: Ledger, finals: Mapping[str, Final], home: Path) -> Verdict:
    """``finals`` by token, for every submit that was acknowledged; ``home``: where UGRO brought the logs."""
    verdict = Verdict(doubled=list(book.complaints))
    entries = ledger.entries()
    _judge_starts(verdict, entries)
    for token, task in book.tasks.items():
        if token in book.jobs:
            own = [entry for entry in entries if entry.token == token]
            _judge_job(verdict, book, task, own, finals.get(token))
    _judge_logs(verdict, book, entries, home)
    return verdict


def _ran_at(moment_s: float, own: list[Entry]) -> bool:
    """Whether some rank had begun well before, and said something well after that."""
    spans: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for entry in own:
        spans[entry.job, entry.attempt, entry.rank].append(entry.clock_s)
    return any(min(times) < moment_s - _ANSWERED_S and max(times) > moment_s for times in spans.values())


def processes_of_runs(roots: Iterable[Path]) -> list[int]:
    """Everything that carries a run's mark below one of these nodes' folders."""
    wanted = [os.fsencode(f"{MARK}={root.resolve()}/") for root in roots]
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(variable.startswith(mark) for variable in variables for mark in wanted) and is_alive(pid):
                found.append(pid)
    return found


def orphans(ledger: Ledger, roots: Iterable[Path]) -> list[str]:
    """What lives on after all is over: by mark, by the ledger's own word, by inherited environment and by locks."""
    marked = {*processes_of_runs(roots), *processes_with_variable(witness.LEDGER, [str(ledger.path)])}
    named = {entry.pid for entry in ledger.alive()}
    return [f"{pid} {_command(pid)}" for pid in sorted(marked | named) if is_alive(pid)] + ledger.held()


def missing_files(book: Book, ledger: Ledger, home: Path) -> list[str]:
    """What ranks made in their working directories, and is not whole in the folders of their jobs."""
    makers = [entry for entry in ledger.entries() if entry.event == "end" and entry.token in book.tasks]
    missing = []
    for entry in makers:
        if book.tasks[entry.token].makes_file:
            attempt = home / "jobs" / str(entry.job) / f"attempt_{entry.attempt}"
            name = witness.file_of(entry.rank)
            found = [*attempt.glob(f"output/{name}"), *attempt.glob(f"nodes/*/{name}")]
            if [path.read_bytes() for path in found] != [witness.content_of(entry.token, entry.rank)]:
                missing.append(f"{name} of {entry.token} (job {entry.job}, attempt {entry.attempt}): {found or 'none'}")
    return missing


def _judge_starts(verdict: Verdict, entries: list[Entry]) -> None:
    begins = Counter((entry.job, entry.attempt, entry.rank) for entry in entries if entry.event == "begin")
    verdict.attempts = len({start[:2] for start in begins})
    verdict.doubled += [f"job %d attempt %d rank %d began {count} times" % start
                        for start, count in begins.items() if count > 1]
    by_token = defaultdict(set)
    for entry in entries:
        by_token[entry.token].add(entry.job)
    verdict.doubled += [f"{token} ran as jobs {sorted(jobs)}" for token, jobs in by_token.items() if len(jobs) > 1]
    verdict.overlapping += [f"{entry.token} (job {entry.job}) rank {entry.rank} of attempt {entry.attempt} began while "
                            f"{entry.word} was held" for entry in entries if entry.event == "clash"]
    verdict.overlapping += _overlaps(entries)


def _overlaps(entries: list[Entry]) -> list[str]:
    """By the clock all share: no attempt says anything after a later one has begun."""
    first_begin: dict[tuple[int, int], float] = {}
    last_word: dict[tuple[int, int], float] = {}
    for entry in entries:
        key = (entry.job, entry.attempt)
        if entry.event == "begin":
            first_begin[key] = min(entry.clock_s, first_begin.get(key, entry.clock_s))
        last_word[key] = max(entry.clock_s, last_word.get(key, entry.clock_s))
    return [
        f"job {job}: attempt {attempt} lived {last_word[job, attempt] - begun:.3f} s into attempt {later}"
        for (job, attempt) in last_word
        for (other, later), begun in first_begin.items()
        if other == job and later > attempt and last_word[job, attempt] > begun
    ]


def _judge_job(verdict: Verdict, book: Book, task: Task, own: list[Entry], final: Final | None) -> None:
    if final is None:
        verdict.lost.append(f"{task.token} (job {book.jobs[task.token]}) was acknowledged and has no final state")
        return
    attempts = {entry.attempt for entry in own}
    if any(attempt > final.attempt for attempt in attempts):
        verdict.untrue.append(f"{task.token} says attempt {final.attempt} and the ledger has {sorted(attempts)}")
    if final.state == "succeeded":
        ends = {entry.rank: entry.word for entry in own if entry.event == "end" and entry.attempt == final.attempt}
        if ends != dict.fromkeys(range(task.ranks), "0"):
            verdict.untrue.append(f"{task.token} succeeded in attempt {final.attempt}, whose ranks ended as {ends}")
    if task.token in book.cancelled and final.state == "failed":
        verdict.untrue.append(f"{task.token} was cancelled and is called {final.state}")


def _judge_logs(verdict: Verdict, book: Book, entries: list[Entry], home: Path) -> None:
    ended = {(entry.job, entry.attempt, entry.rank) for entry in entries if entry.event == "end"}
    for entry in entries:
        if entry.event != "begin" or entry.token not in book.tasks:
            continue
        task = book.tasks[entry.token]
        expected = witness.log_of(task.token, entry.rank, task.lines)
        file = home / "jobs" / str(entry.job) / f"attempt_{entry.attempt}" / "logs" / f"rank_{entry.rank}.log"
        found = file.read_bytes() if file.exists() else b""
        is_whole = (entry.job, entry.attempt, entry.rank) in ended
        verdict.log_bytes += len(found)
        verdict.whole_logs += is_whole
        if entry.token in book.settled and not file.exists() and len(expected) <= MOST_BYTES:
            continue  # the log of a small command was in the state alone
        if not (found == expected if is_whole else expected.startswith(found)):
            place = next((at for at, (one, two) in enumerate(zip(found, expected, strict=False)) if one != two), None)
            how = "differs" if place is not None else "is cut" if file.exists() else "is missing"
            verdict.logs.append(f"{file.relative_to(home)} of {task.token} {how} at {place or len(found)}; "
                                f"{len(found)} of {len(expected)} bytes are there")


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return ""


def _ticks(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return -1

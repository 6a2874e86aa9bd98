"""The judge of runs: what ranks wrote down themselves, and /proc. Never what UGRO says of itself.

Each rank of a test is ``RANK_PROGRAM``. It appends a line when it begins, holds a lock as a GPU would be held, and
writes down every child it makes, so that also one without any environment is found again.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rig.waiting import is_alive, processes_with_variable, wait_until

VARIABLE = "TEST_LEDGER"

# argv: what to do, and its arguments. Runs on any Python 3.
RANK_PROGRAM = r'''
import fcntl, os, signal, sys, time

LEDGER = os.environ["TEST_LEDGER"]
RUN = os.environ["UGRO_RUN"]

def note(*words):
    fd = os.open(LEDGER, os.O_WRONLY | os.O_APPEND)
    os.write(fd, (" ".join(str(word) for word in words) + "\n").encode())
    os.close(fd)

def note_process(kind):
    with open("/proc/self/stat", "rb") as stat:
        ticks = stat.read().rpartition(b")")[2].split()[19].decode()
    note(kind, RUN, os.environ.get("RANK", "?"), os.getpid(), ticks)

def hold():
    # Held as long as this rank or anything it left behind lives.
    fd = os.open(LEDGER + ".held." + os.environ.get("RANK", "0"), os.O_RDWR | os.O_CREAT, 0o666)
    os.set_inheritable(fd, True)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        note_process("clash")

def sleep():
    while True:
        time.sleep(3600)

def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

def child(kind, setsid=False, double=False, empty_env=False):
    pid = os.fork()
    if pid:
        if double:
            os.waitpid(pid, 0)
        return
    if setsid:
        os.setsid()
    if double and os.fork():
        os._exit(0)
    deaf()
    note_process(kind)
    if "bare" in kind:  # not even its log and its working directory
        os.chdir("/")
        nothing = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            os.dup2(nothing, fd)
    if empty_env:
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c",
            "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nwhile True: time.sleep(3600)"], {})
    sleep()

def hostile(*kinds):
    for kind in kinds or ("plain", "setsid", "double", "setsid-double", "empty", "empty-double"):
        child(kind, "setsid" in kind, "double" in kind, "empty" in kind)
    deaf()
    note("ready", RUN)
    sleep()

def hop(pause_s):
    # Never the same process for long: each forks the next and ends.
    if os.fork() == 0:
        os.setsid()
        deaf()
        for _ in range(20000):
            time.sleep(float(pause_s))
            if os.fork():
                os._exit(0)
        os._exit(0)
    note("ready", RUN)
    sleep()

def exit_with(code):
    os._exit(int(code))

def wait_for(path, code="0"):
    note("ready", RUN)
    while not os.path.exists(path):
        time.sleep(0.01)
    os._exit(int(code))

def say(text, code="0"):
    os.write(1, text.encode())
    os._exit(int(code))

def ready_for_sigterm():
    # Blocked and waited for: a handler would not run if the signal came just before a sleep began.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    note("ready", RUN)
    signal.sigwait({signal.SIGTERM})

def polite(code):
    ready_for_sigterm()
    note("asked", RUN)
    os._exit(int(code))

def saving():
    # As one that on SIGTERM writes a checkpoint with the help of a child.
    helper = os.fork()
    if helper == 0:
        sleep()
    ready_for_sigterm()
    time.sleep(0.3)
    note("saved", RUN, "alone" if os.waitpid(helper, os.WNOHANG)[0] else "together")
    os._exit(0)

def write_lines(count, pause_s, room="0"):
    for number in range(int(count)):
        # With a room, the last line comes when there is some in the log: as long as we live, that may be emptied.
        while int(room) and number == int(count) - 1 and os.fstat(1).st_size > int(room) - 1000:
            os.write(1, b"more\n")
            time.sleep(0.01)
        os.write(1 + number % 2, b"line %08d %s\n" % (number, b"x" * (number * 7919 % 300)))
        time.sleep(float(pause_s))

def flood(mebibytes, rate_mebibytes):
    block = (b"y" * 1023 + b"\n") * 1024
    started = time.monotonic()
    for number in range(int(mebibytes)):
        os.write(1, block)
        time.sleep(max(0.0, started + (number + 1) / float(rate_mebibytes) - time.monotonic()))
    os.write(1, b"the last line\n")

def fill(path, code):
    # A disk that is full before the run is written down is another story.
    while not os.path.exists(os.path.join(os.environ["UGRO_RUN_DIR"], "state.json")):
        time.sleep(0.01)
    block = b"z" * 65536
    try:
        with open(path, "wb", 0) as file:
            while True:
                file.write(block)
    except OSError:
        pass
    note("full", RUN, os.statvfs(path).f_bavail)
    os._exit(int(code))

def eat(cgroup):
    with open(cgroup, "w") as tasks:
        tasks.write(str(os.getpid()))
    held = []
    while True:
        held.append(b"m" * (1 << 20))

def kill_self(number):
    os.kill(os.getpid(), int(number))

def environment():
    for key in sorted(os.environ):
        os.write(1, (key + "=" + os.environ[key] + "\n").encode("utf-8", "surrogateescape"))
    with open("/proc/self/oom_score_adj") as file:
        os.write(1, ("cwd=%s sid=%d pid=%d oom=%s" % (os.getcwd(), os.getsid(0), os.getpid(), file.read())).encode())

note_process("start")
hold()
globals()[sys.argv[1]](*sys.argv[2:])
'''


@dataclass(frozen=True)
class Entry:
    """A process that wrote itself down; its start time tells it from a later one with the same pid."""

    kind: str
    run: str
    rank: str
    pid: int
    ticks: int

    @property
    def is_alive(self) -> bool:
        return is_alive(self.pid) and _ticks(self.pid) == self.ticks


class Ledger:
    def __init__(self, folder: Path) -> None:
        self.may_start_again = False  # ranks of elastic runs may, one process after the other
        self.path = folder / "ledger"
        self.path.touch()
        self.path.chmod(0o666)
        self.program = folder / "rank.py"
        self.program.write_text(RANK_PROGRAM)

    def rank(self, number: int, *words: Any, env: dict[str, str] | None = None, python: str = "") -> dict[str, Any]:
        """A rank for a spec."""
        variables = {VARIABLE: str(self.path), "RANK": str(number), **(env or {})}
        argv = [python or sys.executable, "-I", "-S", str(self.program), *map(str, words)]
        return {"rank": number, "argv": argv, "env": variables}

    def sleeping(self, ranks: int = 2, **more: Any) -> dict[str, Any]:
        """A spec whose ranks run until they are ended."""
        return {"ranks": [self.rank(number, "sleep") for number in range(ranks)], "grace_s": 1, **more}

    def lines(self, word: str) -> list[str]:
        return [line for line in self.path.read_text().splitlines() if line.split()[0] == word]

    def entries(self) -> list[Entry]:
        fields = [line.split() for line in self.path.read_text().splitlines()]
        return [Entry(kind, run, rank, int(pid), int(ticks)) for kind, run, rank, pid, ticks in
                (entry for entry in fields if len(entry) == 5)]

    def starts(self, run: str | None = None) -> list[Entry]:
        """Of ranks, by the run's mark (``agent/job.attempt``), or of all."""
        return [entry for entry in self.entries() if entry.kind == "start" and run in (None, entry.run)]

    def clashes(self) -> list[Entry]:
        """Ranks that began while another attempt's held the GPU."""
        return [entry for entry in self.entries() if entry.kind == "clash"]

    def judge(self) -> None:
        """What must hold whatever happened: no rank started twice, no two attempts at once."""
        assert self.clashes() == []
        if self.may_start_again:
            return
        counts = Counter((entry.run, entry.rank) for entry in self.starts())
        assert [start for start, count in counts.items() if count > 1] == []

    def alive_of(self, run: str) -> list[Entry]:
        return [entry for entry in self.entries() if entry.run == run and entry.is_alive]

    def alive(self) -> list[int]:
        written = {entry.pid for entry in self.entries() if entry.is_alive}
        return sorted(written | set(processes_with_variable(VARIABLE, [str(self.path)])))

    def held(self) -> list[str]:
        """The GPUs, as it were, that somebody still has. Exact: also of processes that no look at /proc would catch."""
        return [file.name for file in self.path.parent.glob("ledger.held.*") if _is_locked(file)]

    def expect_nothing_alive(self, timeout_s: float = 10) -> None:
        left = [*self.alive(), *self.held()]
        if left:
            wait_until(lambda: not [*self.alive(), *self.held()], timeout_s, f"{left}; {self.path.read_text()}")

    def end_all(self) -> None:
        """After a test that failed: nothing of it may stay."""
        for entry in self.entries():
            if entry.is_alive:
                os.kill(entry.pid, signal.SIGKILL)


def _is_locked(file: Path) -> bool:
    with file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _ticks(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return -1

"""A rank that bears witness: it writes down that it began and ended, holds what it was given, and logs what is known.

Run as a program it is the rank of a test's job; the judge imports it for ``log_of``. Standard library of any Python 3.
What it writes is not UGRO's, and nothing here asks UGRO: a line in the ledger and a lock of the kernel's are the proof.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator

LEDGER = "TEST_LEDGER"  # the file; its locks lie beside it, in a folder of that name and ".held"
_LONGEST_FILLER = 200
_LINES_OF_FILE = 50
_HIDDEN = "import signal, time\nfor deaf_to in (1, 2, 15): signal.signal(deaf_to, signal.SIG_IGN)\ntime.sleep(1e6)"


def line_of(token: str, rank: int, number: int) -> bytes:
    filler = b"x" * (number * 7919 % _LONGEST_FILLER)
    return b"%s %d %08d %s\n" % (token.encode(), rank, number, filler)


def log_of(token: str, rank: int, lines: int) -> bytes:
    """All that a rank writes that is not ended before its time."""
    return b"".join(line_of(token, rank, number) for number in range(lines))


def file_of(rank: int) -> str:
    return f"made_by_{rank}"


def content_of(token: str, rank: int) -> bytes:
    """Of the file that a rank makes before its end."""
    return log_of(token, rank, _LINES_OF_FILE)


class Witness:
    def __init__(self, token: str) -> None:
        self.path = os.environ[LEDGER]
        self.token = token
        self.job = os.environ["UGRO_JOB"]
        self.attempt = int(os.environ["UGRO_ATTEMPT"])
        self.rank = int(os.environ.get("RANK", "0"))

    def note(self, event: str, *words: object) -> None:
        with open("/proc/self/stat", "rb") as stat:
            ticks = stat.read().rpartition(b")")[2].split()[19].decode()
        clock_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        who = (self.token, self.job, self.attempt, self.rank, os.getpid(), ticks, f"{clock_s:.6f}")
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, (" ".join(map(str, (event, *who, *words))) + "\n").encode())
        os.close(fd)

    def hold(self) -> None:
        """For life, and for that of all children: this attempt, against any other; and each device, against anybody."""
        folder = self.path + ".held"
        own = f"attempt.{self.job}.{self.attempt}"
        with looking(self.path):
            self._lock(os.path.join(folder, own), fcntl.LOCK_SH)
            others = [name for name in os.listdir(folder) if name.startswith(f"attempt.{self.job}.") and name != own]
            clashes = [name for name in others if _is_locked(os.path.join(folder, name))]
            for index in filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")):
                device = f"device.{os.environ['UGRO_NODE']}.{index}"
                if not self._lock(os.path.join(folder, device), fcntl.LOCK_EX):
                    clashes.append(device)
        for name in clashes:
            self.note("clash", name)

    def log(self, lines: int, pause_s: float) -> None:
        for number in range(lines):
            _write_all(1 + number % 2, line_of(self.token, self.rank, number))
            time.sleep(pause_s)

    def make_file(self) -> None:
        """In the working directory, as most programs do."""
        with open(file_of(self.rank), "wb") as file:
            file.write(content_of(self.token, self.rank))

    def leave_child(self) -> None:
        """One that left the session, does not hear SIGTERM, and would live for ever."""
        if os.fork() == 0:
            os.setsid()
            for deaf_to in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(deaf_to, signal.SIG_IGN)
            self.note("child")
            while True:
                time.sleep(3600)

    def hide_child(self) -> None:
        """One that nothing tells whose it is: no parent, no session, no environment. It says so in the ledger first."""
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            return
        os.setsid()
        if os.fork():
            os._exit(0)
        self.note("child")
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", _HIDDEN, f"hidden-of-{self.token}"], {})

    @staticmethod
    def _lock(path: str, how: int) -> bool:
        """Never closed: the kernel gives it back when the last process that has it is gone."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.set_inheritable(fd, True)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextlib.contextmanager
def looking(ledger: str) -> Iterator[None]:
    """A look at a lock takes it for a moment: one at a time, so that nobody takes a look for a holder."""
    fd = os.open(ledger, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def held(ledger: str) -> list[str]:
    """What somebody still has: attempts and devices."""
    folder = ledger + ".held"
    with looking(ledger):
        return [name for name in sorted(os.listdir(folder)) if _is_locked(os.path.join(folder, name))]


def _is_locked(path: str) -> bool:
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _write_all(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


def main(token: str, lines: str, pause_s: str, codes: str, *flags: str) -> None:
    """``codes``: how each attempt ends, such as 7,7,0; the last one holds for all that follow."""
    witness = Witness(token)
    witness.note("begin", os.environ.get("UGRO_NODE", "?"))
    witness.hold()
    if "child" in flags:
        witness.leave_child()
    if "hidden" in flags:
        witness.hide_child()
    try:
        witness.log(int(lines), float(pause_s))
        if "file" in flags:
            witness.make_file()
    except OSError as error:
        witness.note("cut", error.errno)
        os._exit(1)
    of_attempt = [int(code) for code in codes.split(",")]
    code = of_attempt[min(witness.attempt, len(of_attempt)) - 1]
    witness.note("end", code)
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])

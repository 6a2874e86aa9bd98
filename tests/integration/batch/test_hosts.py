"""The engine of jobs and its real hosts, without a cluster between them: what arrives is cut, lost, or nonsense."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

import ugro
from ugro.features.batches.jobs_engine import BOOT, SOCKET, HostJob, JobsEngine, Seat
from ugro.kernel.support.errors import Unreachable

pytest.importorskip("cloudpickle")
INVALID = {
    "no message": struct.pack("<IQ", 1, 3) + b"abc",
    "a part larger than any memory": struct.pack("<IQ", 1, 1 << 62),
}


class Stream:
    """A connection to a host. ``spoil``: what is read next is something else."""

    def __init__(self, path: Path, *, is_cut: bool) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise Unreachable(f"nothing listens: {error}") from error
        self._is_cut = is_cut  # after the greeting of the host, before ours
        self._has_read = False
        self._instead = b""

    def recv(self, most: int) -> bytes:
        if self._is_cut and self._has_read:
            raise Unreachable("cut")
        self._has_read = True
        with suppress(OSError):
            if piece := self._socket.recv(most):
                return piece
        instead, self._instead = self._instead, b""
        return instead

    def sendall(self, piece: bytes) -> None:
        if self._is_cut:
            return
        try:
            self._socket.sendall(piece)
        except OSError as error:
            raise Unreachable("cut") from error

    def spoil(self, content: bytes) -> None:
        self._instead = content
        self.abort()

    def abort(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class Hosts:
    """Processes of this machine in place of jobs. Follows the Protocol ``Cluster``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.streams: list[Stream] = []
        self.cuts_next = False

    def submit(self, seats: Sequence[Seat]) -> list[int]:
        for number, _ in enumerate(seats):
            (self._folder / str(number)).mkdir()
            env = {**os.environ, "UGRO_RUN_DIR": str(self._folder / str(number))}
            self._processes.append(subprocess.Popen([sys.executable, "-c", BOOT], env=env))
        return list(range(len(seats)))

    def look(self, job: int) -> HostJob:
        code = self._processes[job].poll()
        return HostJob(is_over=code is not None, is_running=code is None, reason=f"exit code {code}")

    def dial(self, node: str, job: int) -> Stream:
        stream = Stream(self._folder / str(job) / SOCKET, is_cut=self.cuts_next)
        self.cuts_next = False
        self.streams.append(stream)
        return stream

    def end(self, jobs: Sequence[int], grace_s: float) -> None:
        for job in jobs:
            with suppress(subprocess.TimeoutExpired):
                self._processes[job].wait(grace_s)
            self._processes[job].kill()
            self._processes[job].wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets are in it."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def added(number: int, more: int) -> int:
    return number + more


@pytest.mark.parametrize("content", INVALID.values(), ids=INVALID.keys())
def test_after_nonsense_and_a_lost_greeting_the_host_begins_again(folder: Path, content: bytes) -> None:
    hosts = Hosts(folder)
    with ugro.Pool(engine=JobsEngine(hosts, [Seat("n001", 1)])) as pool:
        # What is shared is withdrawn in the end: with that, the host knows that its answers have arrived.
        assert list(pool.map(added, range(10), shared={"more": 1})) == list(range(1, 11))
        hosts.cuts_next = True
        hosts.streams[-1].spoil(content)
        assert list(pool.map(str, range(10))) == [str(number) for number in range(10)]
        assert not hosts.cuts_next


def test_a_host_to_which_no_pool_comes_ends_and_is_not_tried_again(folder: Path) -> None:
    env = {**os.environ, "UGRO_RUN_DIR": str(folder), "UGRO_POOL_PATIENCE_S": "0.1"}
    done = subprocess.run(
        [sys.executable, "-c", BOOT], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "no pool has connected\n")


def test_ctrl_c_while_a_pool_starts_leaves_no_host(folder: Path) -> None:
    class Interrupted(Hosts):
        def dial(self, node: str, job: int) -> Stream:
            raise Unreachable("not yet")

    class Engine(JobsEngine):
        def start(self) -> int:
            super().start()
            raise KeyboardInterrupt

    hosts = Interrupted(folder)
    with pytest.raises(KeyboardInterrupt):
        ugro.Pool(engine=Engine(hosts, [Seat("n001", 1)]))
    assert hosts.look(0).is_over

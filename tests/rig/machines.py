"""A laptop and a master on one machine: two homes, a real sshd between them, and the same paths with other files.

What the laptop calls ``project`` is another folder on the master: who looks for a path on the wrong side is noticed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from tests.rig.sshd import SshdFarm, SshdNode
from tests.rig.waiting import descendants, end_all_with_variable

UGRO = Path(sys.executable).parent / "ugro"
DECOY = "print('a file of the master was read', flush=True)\nraise SystemExit(7)\n"
_LIMIT_S = 120
# Laid over the folder of the same path, for this process and its children alone.
_ENTER = 'mount --bind "$0" "$1" && cd "$1" && shift && exec "$@"'


class Running:
    """A command under way; what it has said so far is in ``out`` and ``err``, by lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.out: list[str] = []
        self.err: list[str] = []
        self._threads = [
            threading.Thread(target=_read, args=(stream, lines), daemon=True)
            for stream, lines in ((process.stdout, self.out), (process.stderr, self.err))
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> int:
        """Its exit code; all that it said has been read."""
        code = self.process.wait(_LIMIT_S)
        for thread in self._threads:
            thread.join(_LIMIT_S)
        return code

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def says(self, text: str) -> bool:
        return any(text in line for line in list(self.err))


def _read(stream: IO[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line)  # each is seen as it comes


@dataclass
class Machines:
    farm: SshdFarm
    laptop: Path  # its home
    project: Path  # a path on both
    files: Path  # what the laptop has there

    @property
    def master(self) -> SshdNode:
        return self.farm.nodes[0]

    @property
    def jump(self) -> SshdNode:
        """Another machine, which forwards connections."""
        return self.farm.nodes[1]

    @property
    def env(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("UGRO_", "SSH_"))}
        return {**kept, "HOME": str(self.laptop), "UGRO_MASTER_SSH_CONFIG": str(self.farm.ssh_config)}

    def argv(self, *words: str) -> list[str]:
        """A command on the laptop, in the project."""
        if not can_lay_over():
            return list(words)
        return ["unshare", "--mount", "sh", "-c", _ENTER, str(self.files), str(self.project), *words]

    def ugro(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        argv = self.argv(str(UGRO), *words)
        whole = {**self.env, **(env or {})}
        return subprocess.run(argv, env=whole, cwd=self._cwd, capture_output=True, text=True, timeout=_LIMIT_S)

    @contextmanager
    def running(self, *words: str) -> Iterator[Running]:
        """The same while it runs; it is killed at the end."""
        argv, pipe = self.argv(str(UGRO), *words), subprocess.PIPE
        with subprocess.Popen(argv, env=self.env, cwd=self._cwd, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                yield Running(process)
            finally:
                for pid in [process.pid, *descendants([process.pid])]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def on_master(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = self.farm.ssh_argv(self.master, ".local/bin/ugro", *words)
        return subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S)

    @property
    def _cwd(self) -> Path:
        return Path("/") if can_lay_over() else self.files

    def cut(self) -> None:
        """All connections break; commands on the master see that their pipes close."""
        self.master.kill_sessions(commands=False)


@contextmanager
def machines(directory: Path) -> Iterator[Machines]:
    laptop, project, files = directory / "laptop", directory / "project", directory / "files"
    for folder in (laptop, project, files):
        folder.mkdir(parents=True)
    with SshdFarm(directory / "farm", 2) as farm:
        programs = farm.nodes[0].home / ".local" / "bin"
        programs.mkdir(parents=True)
        (programs / "ugro").symlink_to(UGRO)
        try:
            yield Machines(farm, laptop, project if can_lay_over() else files, files)
        finally:
            end_all_with_variable("HOME", [str(laptop)])
            shutil.rmtree(laptop, ignore_errors=True)


@cache
def can_lay_over() -> bool:
    """Whether a process may have folders of its own at a path."""
    argv = ["unshare", "--mount", "sh", "-c", "mount --bind /tmp /mnt"]
    try:
        return subprocess.run(argv, capture_output=True, timeout=_LIMIT_S, check=False).returncode == 0
    except OSError:
        return False

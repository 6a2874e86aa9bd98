"""An agent as a process of a test's own: started with or without a crash point, killed, frozen, and started again."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

from tests.rig.waiting import is_alive, wait_until

_READY_S = 30
_END_S = 20


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Nothing of the user's own UGRO, none of his ssh agent, and another home: nodes of this machine use it, too."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("UGRO_", "SSH_"))}
    return {**kept, "UGRO_HOME": str(home), "HOME": str(home), **(extra or {})}


class AgentProcess:
    def __init__(
        self,
        home: Path,
        cluster: Path,
        env: Mapping[str, str] | None = None,
        *,
        descriptors: tuple[int, int] | None = None,
    ) -> None:
        """``descriptors``: how many it may have open, and how many it may ask for."""
        self.home = home
        ready, theirs = os.pipe()
        argv = [sys.executable, "-m", "ugro.kernel.agent", "--home", str(home), "--cluster", str(cluster)]
        with (home / "agent.said").open("ab") as said:
            self.process = subprocess.Popen(
                [*argv, "--ready-fd", str(theirs)],
                env=environment(home, env),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[theirs],
                start_new_session=True,
            )
        if descriptors is not None:  # it looks at them much later
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, descriptors)
        os.close(theirs)
        self._ready = ready

    def wait_ready(self) -> bool:
        """False when it died before it was ready, as one with a crash point may."""
        text, answer = b"", {"state": "starting"}
        deadline = time.monotonic() + _READY_S
        try:
            while answer["state"] == "starting":
                readable, _, _ = select.select([self._ready], [], [], max(0.0, deadline - time.monotonic()))
                assert readable, f"the agent was not ready within {_READY_S} s: {log_tail(self.home)}"
                part = os.read(self._ready, 4096)
                if not part:
                    return False
                text += part
                if text.endswith(b"\n"):
                    answer = json.loads(text.splitlines()[-1])
        finally:
            os.close(self._ready)
        assert answer["state"] == "ready", answer
        return True

    @property
    def was_killed(self) -> bool:
        return self.process.poll() == -signal.SIGKILL

    @property
    def stands_still(self) -> bool:
        return is_paused(self.process.pid)

    def let_go(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """In good order, if it can."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)
        self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_END_S)


def holder(home: Path) -> int | None:
    """The agent of a state directory, whoever started it."""
    try:
        pid = int(json.loads((home / "agent.lock").read_text())["pid"])
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError, KeyError):
        return None
    return pid if os.fsencode(home) in command and is_alive(pid) else None


def is_paused(pid: int | None) -> bool:
    """Stopped at a crash point, or by a test."""
    return pid is not None and _state(pid) == "T"


def end_agent(home: Path) -> None:
    """Whatever it was doing: it keeps no truth that is not on disk."""
    if (pid := holder(home)) is not None:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), _END_S, f"agent {pid} to be gone")


def log_tail(home: Path, lines: int = 25) -> str:
    with suppress(OSError):
        return "\n".join((home / "agent.log").read_text(errors="replace").splitlines()[-lines:])
    return "there is no agent.log"


def run_folders(root: Path) -> list[str]:
    """The run directories of all nodes below ``root`` with what is in them: for a test that must say what it saw."""
    runs = sorted(root.glob("**/.ugro/agents/*/runs/*"))
    return [f"{run.relative_to(root)}: {' '.join(sorted(entry.name for entry in run.iterdir()))}" for run in runs]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "X"


def events(home: Path) -> list[str]:
    """What the agent wrote down of its jobs, oldest first; for people."""
    if not (home / "state.db").exists():
        return ["there is no state.db"]
    with closing(sqlite3.connect(f"file:{home / 'state.db'}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT at, job, attempt, kind, text FROM events ORDER BY seq").fetchall()
    return [" ".join(str(part) for part in row) for row in rows]

"""The reaper: the parent of a supervisor. When its supervisor is killed, it ends all processes that are left.

It adopts them then, whatever they did to get away. Until that time it makes exit records durable, off the
supervisor's path; it holds no lock.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import Dict, List, NoReturn, Optional

from ugro.remote.process import process_tree, terminate
from ugro.remote.process.execute import close_all_but
from ugro.remote.state.rundir import AgentDir, RunDir

# An agent that has heard of an exit has the run removed soon; then nothing has to be durable.
_SYNC_S = 0.3
_LIMIT_S = 30.0
_PAUSE_S = 0.01
_NAMES_AT_ONCE = 32  # fewer bytes than a pipe takes whole or not at all


class ExitSync:
    """The supervisor's side."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._due: List[RunDir] = []

    def add(self, run: RunDir) -> None:
        """Its exit record, before long; the reaper hears of it with the next ``flush``."""
        self._due.append(run)

    def flush(self) -> None:
        """Several at once: the reaper is woken less often."""
        while self._due:
            some, self._due = self._due[:_NAMES_AT_ONCE], self._due[_NAMES_AT_ONCE:]
            try:
                os.write(self._pipe, b"".join(run.name.encode() + b"\n" for run in some))
            except OSError:  # it is slow, or gone
                for run in some:
                    with contextlib.suppress(OSError):
                        run.make_exit_last()


def fork(agent: AgentDir) -> ExitSync:
    """Returns in the supervisor; this process becomes its reaper."""
    heard, say = os.pipe()
    process_tree.become_subreaper()
    supervisor = os.fork()
    if supervisor != 0:
        _watch(agent, supervisor, heard)
    os.close(heard)
    os.set_blocking(say, False)
    return ExitSync(say)


def _watch(agent: AgentDir, supervisor: int, heard: int) -> NoReturn:
    try:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # the supervisor acts on those
        close_all_but([heard])
        due = _sync_until_closed(agent, heard)
        os.waitpid(supervisor, 0)
        _end_all()
        for name in due:
            _sync(agent, name)
    finally:
        os._exit(0)


def _sync_until_closed(agent: AgentDir, heard: int) -> Dict[str, float]:
    """What is left to do."""
    due: Dict[str, float] = {}
    rest = b""
    while True:
        now = time.monotonic()
        pause_s: Optional[float] = max(0.0, min(due.values()) - now) if due else None
        if select.select([heard], [], [], pause_s)[0]:
            part = os.read(heard, 65536)
            if not part:
                return due
            *names, rest = (rest + part).split(b"\n")
            due.update((name.decode(), now + _SYNC_S) for name in names)
        for name in [name for name, at in due.items() if at <= now]:
            del due[name]
            _sync(agent, name)


def _sync(agent: AgentDir, name: str) -> None:
    run = agent.named(name)
    if run is not None:
        with contextlib.suppress(OSError):  # removed; or it can be read, which is all we can do on such a disk
            run.make_exit_last()


def _end_all() -> None:
    """Nothing is left by a supervisor that ended by itself."""
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        process_tree.reap()
        if not terminate.has_children():
            return
        for pid in {*terminate.children(), *process_tree.descendants(os.getpid())}:
            terminate.kill_child(pid)
        time.sleep(_PAUSE_S)

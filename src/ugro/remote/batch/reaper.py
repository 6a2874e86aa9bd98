"""The warden: the parent of a keeper. It makes the last words of runs last, and ends all that is left when its keeper
is killed.

Ranks that are started quickly do not die with the process that started them. Below a warden, which adopts them then,
they do, with all they started, whatever those did to get away. It is idle otherwise, and holds no lock.
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

# An agent that has heard a last word has the run removed soon; then there is nothing that has to last.
_SYNC_S = 0.3
_LIMIT_S = 30.0
_PAUSE_S = 0.01
_TOLD_AT_ONCE = 32  # fewer bytes than a pipe takes whole or not at all


class Lasting:
    """The keeper's side."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._due: List[RunDir] = []

    def add(self, run: RunDir) -> None:
        """Its last word, before long; the warden hears of it with the next ``flush``."""
        self._due.append(run)

    def flush(self) -> None:
        """Woken once for several, it takes less from them."""
        while self._due:
            some, self._due = self._due[:_TOLD_AT_ONCE], self._due[_TOLD_AT_ONCE:]
            try:
                os.write(self._pipe, b"".join(run.name.encode() + b"\n" for run in some))
            except OSError:  # it is slow, or gone
                for run in some:
                    with contextlib.suppress(OSError):
                        run.make_exit_last()


def fork(agent: AgentDir, link: int) -> Lasting:
    """Returns in the keeper; this process becomes its warden. ``link`` is the keeper's alone."""
    heard, say = os.pipe()
    process_tree.become_subreaper()
    keeper = os.fork()
    if keeper != 0:
        _watch(agent, keeper, heard)
    os.close(heard)
    os.set_blocking(say, False)
    return Lasting(say)


def _watch(agent: AgentDir, keeper: int, heard: int) -> NoReturn:
    try:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # those are the keeper's to act on
        close_all_but([heard])
        due = _sync_until_closed(agent, heard)
        os.waitpid(keeper, 0)
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
    """Nothing is below a keeper that ended by itself."""
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        process_tree.reap()
        if not terminate.has_children():
            return
        for pid in {*terminate.children(), *process_tree.descendants(os.getpid())}:
            terminate.kill_child(pid)
        time.sleep(_PAUSE_S)

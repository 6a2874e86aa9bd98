"""`runs.watch`: what becomes of an agent's runs on this node, sent as it happens.

Each OUT frame is one JSON document. First all runs, in one document or more: ``{"now", "runs", "is_first": true,
"has_more"}``, the last of them with the agent's ``"mark"``. Then, when something changed, the runs that did and the
names of those that were removed: ``{"now", "runs", "gone"}``. A slow reader gets the latest status of each run, however
often that changed meanwhile.

The kernel says what to look at again. A supervisor that is killed says nothing, but its lock is closed with it.

It ends as refused when a newer generation of the agent has come: the agent was moved, and the old one must know.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any, Dict, List, Optional, Set, Tuple

from ugro.node import inotify, wire
from ugro.node.clock import moment
from ugro.node.inotify import Inotify
from ugro.node.program import Call
from ugro.node.runs import logs as inline_logs
from ugro.node.runs.fence import replaced
from ugro.node.runs.rundir import AgentDir, RunDir
from ugro.node.runs.supervisors import Supervisors

_RUNS_MASK = inotify.CREATE | inotify.MOVED_FROM | inotify.MOVED_TO | inotify.DELETE
_RUN_MASK = inotify.CREATE | inotify.MOVED_TO | inotify.CLOSE_WRITE
_TELLING = frozenset(("claim", "state.json", "exit.json", "lock"))
_SETTLE_S = 0.002  # what happens together is sent together
_GATHER_S = 0.02  # at least from one document to the next: when much happens, more of it is sent together
_POLL_S = 0.25  # where the kernel does not tell us
_LOOK_S = 2.0  # and where it does: between two looks at what lives, should we ever have been too quick for it
_REPLACED_S = 2.0  # between two looks whether a newer generation has come
_MOST_AT_ONCE = 64  # runs; others want to be served, too
# A run's status is below 100 KB, most of it the last lines of a log. A document is full with this, and fits a window.
_FULL_BYTES = wire.MAX_PAYLOAD // 8
_LEAST_CREDIT = wire.WINDOW // 2

Seen = Tuple[str, bool, int]  # a run's status, whether it was claimed, and how often its ranks have changed


def watch(call: Call, agent: AgentDir, generation: int) -> None:
    _Watching(call, agent, generation)


class _Watching:
    def __init__(self, call: Call, agent: AgentDir, generation: int) -> None:
        self._call = call
        self._agent = agent
        self._generation = generation
        self._credit = wire.WINDOW
        self._sent: Dict[str, Seen] = {}
        self._live: Set[str] = set()
        self._changed: Dict[str, None] = {}  # in the order in which it happened
        self._is_scheduled = False
        self._is_looking = False
        self._is_open = True
        self._next_at = 0.0
        self._supervisors = Supervisors.of(call.program, agent)
        self._supervisors.watch(self._note)
        self._folders = _Folders.of(agent)
        self._first: Optional[List[str]] = [run.name for run in agent.runs()]
        call.on_credit = self._grant
        call.on_cancel = self._finish
        if self._folders is not None:
            call.program.watch(self._folders.fd, self._hear)
        else:
            self._poll()
        call.program.after(_REPLACED_S, self._end_if_replaced)
        self._tell()

    def _grant(self, amount: int) -> None:
        if self._credit + amount > wire.WINDOW:
            raise wire.ProtocolError("call %d was granted more than it sent" % self._call.number)
        self._credit += amount
        if self._first is not None or self._changed:
            self._schedule(0.0)

    # --- what to look at ----------------------------------------------------------------------------------------

    def _hear(self) -> None:
        if self._folders is None:  # closed by an event of the same round
            return
        changed, is_all_uncertain = self._folders.changed()
        if is_all_uncertain:
            changed += [*self._sent, *(run.name for run in self._agent.runs())]
        self._note(changed)

    def _note(self, names: List[str]) -> None:
        self._changed.update(dict.fromkeys(names))
        if self._changed and self._credit >= _LEAST_CREDIT:
            self._schedule(max(_SETTLE_S, self._next_at - time.monotonic()))

    def _poll(self) -> None:
        if self._call.is_done:
            return
        names: Set[str] = set()
        with contextlib.suppress(FileNotFoundError):
            names.update(os.listdir(self._agent.runs_path))
        self._note([*(name for name in names ^ set(self._sent) if self._agent.named(name)), *sorted(self._live)])
        self._call.program.after(_POLL_S, self._poll)

    def _look_at_live(self) -> None:
        self._is_looking = False
        if not self._call.is_done:
            self._note(sorted(self._live))
            self._keep_looking()

    def _keep_looking(self) -> None:
        if self._live and not self._is_looking and self._folders is not None:
            self._is_looking = True
            self._call.program.after(_LOOK_S if self._folders.is_complete else _POLL_S, self._look_at_live)

    # --- telling ------------------------------------------------------------------------------------------------

    def _schedule(self, delay_s: float) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call.program.after(delay_s, self._tell)

    def _tell(self) -> None:
        self._is_scheduled = False
        if self._call.is_done or self._credit < _LEAST_CREDIT:
            return
        try:
            if self._first is not None:
                self._tell_first()
            else:
                self._tell_changes()
        except OSError as error:
            self._close()
            self._call.fail("os", str(error))
            return
        self._keep_looking()
        if self._first is not None or self._changed:
            self._schedule(0.0)

    def _tell_first(self) -> None:
        assert self._first is not None
        document = _Document()
        while self._first and document.has_room:
            self._add(document, self._first.pop(0))
        has_more = bool(self._first)
        if not has_more:
            self._first = None
        mark = {} if has_more else {"mark": self._agent.mark()}
        self._send(document.content(is_first=True, has_more=has_more, **mark))

    def _tell_changes(self) -> None:
        document = _Document()
        gone: List[str] = []
        for name in list(self._changed)[:_MOST_AT_ONCE]:
            if not document.has_room:
                break
            del self._changed[name]
            if not self._add(document, name) and name in self._sent:
                del self._sent[name]
                gone.append(name)
        if document.runs or gone:
            self._send(document.content(gone=gone))

    def _add(self, document: _Document, name: str) -> bool:
        """False when there is no such run (any more)."""
        has_sent_exit = self._sent.get(name, ("", False, 0))[0] == "exited"
        if not has_sent_exit and self._add_report(document, name):
            return True
        run = self._agent.named(name)
        if has_sent_exit and run is not None and run.exists():
            return True
        # Watched before it is looked at: what happens in between is then heard, and looked at again.
        is_there = run is not None and self._watch(run)
        if run is None or not is_there:
            self._unwatch(name)
            return False
        status = run.status()
        if status["status"] == "exited":
            logs = inline_logs.of_run(run, status["exit"])
            if logs is not None:
                status["logs"] = logs
        seen = (str(status["status"]), bool(status["is_claimed"]), _changes(status))
        if seen[0] == "exited":
            self._unwatch(name)
        # A run that nobody has claimed is no news: the caller of its start gets an answer.
        if seen != self._sent.get(name) and (seen[0] == "exited" or seen[1] or self._first is not None):
            self._sent[name] = seen
            document.add(status)
        return True

    def _add_report(self, document: _Document, name: str) -> bool:
        """In its supervisor's words; true when there is no need to look."""
        report = self._supervisors.report(name)
        if report is not None and (report.word, True, report.changes) != self._sent.get(name):
            self._sent[name] = (report.word, True, report.changes)
            document.add_text(report.text.decode("utf-8", "replace"))
        if report is not None and report.word == "exited":
            self._unwatch(name)
        return report is not None or self._supervisors.holds(name)

    def _watch(self, run: RunDir) -> bool:
        if os.path.exists(run.file("exit.json")):
            return True
        self._live.add(run.name)
        if self._folders is None:
            return run.exists()
        return self._folders.add(run)

    def _unwatch(self, name: str) -> None:
        self._live.discard(name)
        if self._folders is not None:
            self._folders.remove(name)

    def _send(self, payload: bytes) -> None:
        self._call.data(wire.OUT, payload)
        self._next_at = time.monotonic() + _GATHER_S
        self._credit -= len(payload)

    # --- the end ------------------------------------------------------------------------------------------------

    def _end_if_replaced(self) -> None:
        if self._call.is_done:
            return
        newest = 0
        with contextlib.suppress(OSError):  # a file server is away: the next look may tell
            newest = self._agent.newest_generation
        if newest > self._generation:
            error = replaced(self._generation, newest)
            self._close()
            self._call.fail(error.kind, str(error))
        self._call.program.after(_REPLACED_S, self._end_if_replaced)

    def _finish(self) -> None:
        self._close()
        self._call.finish({"now": moment()})

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._supervisors.unwatch(self._note)
        if self._folders is not None:
            self._call.program.unwatch(self._folders.fd)
            self._folders.close()
            self._folders = None


def _changes(status: Dict[str, Any]) -> int:
    found = (status["state"] or {}).get("changes", 0)
    return found if status["status"] == "running" and isinstance(found, int) else 0


class _Document:
    def __init__(self) -> None:
        self.runs: List[str] = []
        self._size = 0

    @property
    def has_room(self) -> bool:
        return self._size < _FULL_BYTES and len(self.runs) < _MOST_AT_ONCE

    def add(self, status: Dict[str, Any]) -> None:
        self.add_text(json.dumps(status, ensure_ascii=False, separators=(",", ":")))

    def add_text(self, text: str) -> None:
        self.runs.append(text)
        self._size += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))

    def content(self, **more: Any) -> bytes:
        head = json.dumps({"now": moment(), **more}, separators=(",", ":"))
        text = '%s,"runs":[%s]}' % (head[:-1], ",".join(self.runs))
        return text.encode("utf-8", "replace")


class _Folders:
    """The folders that the kernel watches for us: the one of all runs, and that of each run that is not over."""

    def __init__(self, agent: AgentDir) -> None:
        self._agent = agent
        self._inotify = Inotify()
        self._names: Dict[int, str] = {}
        self._watches: Dict[str, int] = {}
        self._all = self._inotify.add(agent.runs_path, _RUNS_MASK)
        self.is_complete = True  # False: there is a limit, and some run that lives is not watched

    @classmethod
    def of(cls, agent: AgentDir) -> Optional[_Folders]:
        try:
            return cls(agent)
        except OSError:
            return None

    @property
    def fd(self) -> int:
        return self._inotify.fd

    def add(self, run: RunDir) -> bool:
        """False when it is not there."""
        if run.name not in self._watches:
            try:
                number = self._inotify.add(run.path, _RUN_MASK)
            except FileNotFoundError:
                return False
            except OSError:
                self.is_complete = False
                return run.exists()
            self._watches[run.name] = number
            self._names[number] = run.name
        return run.exists()

    def remove(self, name: str) -> None:
        number = self._watches.pop(name, None)
        if number is not None:
            self._names.pop(number, None)
            self._inotify.remove(number)

    def changed(self) -> Tuple[List[str], bool]:
        """The names of runs to look at; true when it may be any."""
        found: List[str] = []
        is_all_uncertain = False
        for event in self._inotify.read():
            is_all_uncertain = is_all_uncertain or bool(event.mask & inotify.OVERFLOW)
            if event.watch == self._all:
                if self._agent.is_name(event.name):
                    found.append(event.name)
            elif event.name in _TELLING and event.watch in self._names:
                found.append(self._names[event.watch])
        return found, is_all_uncertain

    def close(self) -> None:
        self._inotify.close()

"""Which run does a process belong to? A supervisor has the trees of its runs below it, and each run ends with its own.

A supervisor adopts every process of its runs whose parent is gone. Such an orphan belongs to the run whose session it
is in, whose mark it carries, or in whose folder it works or has a file open, as its log. One that left all of these
belongs to one of the runs that were there when it began: it is ended with the last of those, so at once where a
supervisor has one run, and otherwise at the latest when it has none any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Dict, Iterator, List, Optional, Set

from ugro.node.process import process_tree, terminate
from ugro.node.process.terminate import Family, Place, Processes
from ugro.node.runs.rundir import MARK

_MARK = MARK.encode() + b"="


class Ownership:
    """All runs of a supervisor that are not over, by what tells their processes apart."""

    def __init__(self, *, adopts_orphans: bool) -> None:
        self.adopts_orphans = adopts_orphans
        self.helper = 0  # a child that is no run's
        self.meters: Set[int] = set()  # children that measure a run, and are not of it
        self.ranks: Dict[int, RunFamily] = {}  # by pid: those that are our own children, and run
        self._families: Dict[bytes, RunFamily] = {}
        self._sessions: Dict[int, RunFamily] = {}
        self._orphans: List[int] = []
        self._has_looked = False

    def add(self, family: RunFamily) -> None:
        self._families[family.mark] = family

    def begin(self, family: RunFamily, pid: int, started: int) -> None:
        """A rank of it has started."""
        family.ranks.append(pid)
        family.started = min(started, family.started or started)
        family.sessions.append(pid)
        self.ranks[pid] = self._sessions[pid] = family

    def remove(self, family: RunFamily) -> None:
        self._families.pop(family.mark, None)
        for session in family.sessions:
            self._sessions.pop(session, None)
        self.forget_look()

    def forget_look(self) -> None:
        """Once in each round of a supervisor: what was seen then holds for all that ended in it."""
        self._has_looked = False

    def orphans(self) -> List[int]:
        """Exact, whether or not a look at all of /proc would find them."""
        if not self._has_looked:
            self._has_looked = True
            self._orphans = self._look()
        return self._orphans

    def _look(self) -> List[int]:
        found: List[int] = []
        for _ in range(terminate.QUICK_ROUNDS):
            found = self._strangers()
            living = [pid for pid in found if not _is_collected(pid)]
            # One that has ended left us its children first: those are in the list when we look again.
            if len(living) == len(found):
                break
        return found

    def _strangers(self) -> List[int]:
        known = {self.helper, *self.meters}
        return [pid for pid in terminate.children() if pid not in self.ranks and pid not in known]

    def orphans_of(self, family: RunFamily) -> List[int]:
        return [pid for pid in self.orphans() if self._owner(pid, terminate.place(pid)) is family]

    def kill_quickly(self, family: RunFamily) -> None:
        """The newest first: an older one has perhaps ended, with another in its place."""
        for _ in range(terminate.QUICK_ROUNDS):
            orphans = self._strangers()
            for pid in reversed(orphans):
                place = terminate.place(pid)
                if self._owner(pid, place) is family:
                    terminate.kill_child(pid)
                    _kill_group(place.group)
            for pid in orphans:
                _is_collected(pid)
        self.forget_look()

    def _owner(self, pid: int, place: Place) -> Optional[RunFamily]:
        session, started = place.session, place.started
        owner = self._sessions.get(session)
        if owner is None:
            owner = self._marked(pid)
            if owner is not None and session not in (0, os.getsid(0)):
                # The process that began the session is the run's, and so are all in it, whatever they carry.
                self._sessions[session] = owner
                owner.sessions.append(session)
        if owner is None:
            # In the clock's ticks: one that began in the same tick may be its own.
            possible = [family for family in self._families.values() if family.started <= started]
            owner = possible[0] if len(possible) == 1 else _user_of_folder(pid, possible)
        return owner

    def _marked(self, pid: int) -> Optional[RunFamily]:
        for entry in process_tree.environment(pid):
            if entry.startswith(_MARK):
                return self._families.get(entry)
        return None


class RunFamily(Family):
    """The processes of one run, as its supervisor tells them from those of others."""

    def __init__(self, ownership: Ownership, mark: bytes) -> None:
        super().__init__(self._all)
        self.mark = mark
        self.ranks: List[int] = []
        self.sessions: List[int] = []
        self.started = 0
        self._ownership = ownership

    def is_empty(self) -> bool:
        if not self._ownership.adopts_orphans:  # then nothing but a look at /proc can tell
            return not self.find()
        return not self._running() and not self._ownership.orphans_of(self)

    def kill_quickly(self) -> None:
        self._ownership.kill_quickly(self)

    def _running(self) -> List[int]:
        return [pid for pid in self.ranks if self._ownership.ranks.get(pid) is self]

    def _all(self) -> Processes:
        self._ownership.forget_look()
        roots = [*self._running(), *self._ownership.orphans_of(self)]
        return {**terminate.with_start(roots), **terminate.below(roots), **terminate.marked(self.mark)}


def _user_of_folder(pid: int, possible: List[RunFamily]) -> Optional[RunFamily]:
    """The run in whose folder the process works, or has a file open."""
    folders = {os.path.realpath(family.mark[len(_MARK) :]) + b"/": family for family in possible}
    for path in _paths(pid):
        for folder, family in folders.items():
            if path.startswith(folder):
                return family
    return None


def _paths(pid: int) -> Iterator[bytes]:
    top = b"/proc/%d/" % pid
    with contextlib.suppress(OSError):  # it has ended
        yield os.readlink(top + b"cwd") + b"/"
        for name in os.listdir(top + b"fd"):
            with contextlib.suppress(FileNotFoundError):
                yield os.readlink(top + b"fd/" + name)


def _kill_group(group: int) -> None:
    """Its members are all of one session, so of one run; none of them gets away by forking meanwhile."""
    if group not in (0, os.getpgrp()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _is_collected(pid: int) -> bool:
    """Whether a child has ended; if so, nothing of it is left."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True

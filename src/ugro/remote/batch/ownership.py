"""Whose processes are those? A keeper has the trees of many runs below it, and each run ends with its own tree.

A keeper adopts every process of its runs whose parent is gone. Such a stranger belongs to the run whose session it is
in, or whose mark it carries. One that left both (a session of its own, an emptied environment, its parents gone)
belongs to one of the runs that were there when it began: it is ended with the last of those, at the latest when the
keeper has no run any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Dict, List, Optional

from ugro.remote.process import process_tree, terminate
from ugro.remote.process.terminate import Family, Place, Processes
from ugro.remote.state.rundir import MARK

_MARK = MARK.encode() + b"="


class Kin:
    """All runs of a keeper that are not over, by what tells their processes apart."""

    def __init__(self) -> None:
        self.ranks: Dict[int, KeptFamily] = {}  # by pid: those that are our own children, and run
        self._families: Dict[bytes, KeptFamily] = {}
        self._sessions: Dict[int, KeptFamily] = {}
        self._strangers: List[int] = []
        self._is_looked = False

    def add(self, family: KeptFamily) -> None:
        self._families[family.mark] = family

    def begin(self, family: KeptFamily, pid: int, started: int) -> None:
        family.rank, family.started = pid, started
        family.sessions.append(pid)
        self.ranks[pid] = self._sessions[pid] = family

    def remove(self, family: KeptFamily) -> None:
        self._families.pop(family.mark, None)
        for session in family.sessions:
            self._sessions.pop(session, None)
        self.forget_look()

    def forget_look(self) -> None:
        """Once in each round of a keeper: what was seen then holds for all that ended in it."""
        self._is_looked = False

    def strangers(self) -> List[int]:
        """Exact, whether or not a look at all of /proc would find them."""
        if not self._is_looked:
            self._is_looked = True
            self._strangers = self._look()
        return self._strangers

    def _look(self) -> List[int]:
        found: List[int] = []
        for _ in range(terminate.QUICK_ROUNDS):
            found = [pid for pid in terminate.children() if pid not in self.ranks]
            living = [pid for pid in found if not _is_collected(pid)]
            # One that has ended left us its children first: those are in the list when we look again.
            if len(living) == len(found):
                break
        return found

    def strangers_of(self, family: KeptFamily) -> List[int]:
        return [pid for pid in self.strangers() if self._owner(pid, terminate.place(pid)) is family]

    def kill_quickly(self, family: KeptFamily) -> None:
        """The newest first: an older one has perhaps ended, with another in its place."""
        for _ in range(terminate.QUICK_ROUNDS):
            strangers = [pid for pid in terminate.children() if pid not in self.ranks]
            for pid in reversed(strangers):
                place = terminate.place(pid)
                if self._owner(pid, place) is family:
                    terminate.kill_child(pid)
                    _kill_group(place.group)
            for pid in strangers:
                _is_collected(pid)
        self.forget_look()

    def _owner(self, pid: int, place: Place) -> Optional[KeptFamily]:
        session, started = place.session, place.started
        owner = self._sessions.get(session)
        if owner is None:
            owner = self._marked(pid)
            if owner is not None and session not in (0, os.getsid(0)):
                # Whoever began that session is one of its processes, and so are all in it, whatever they carry.
                self._sessions[session] = owner
                owner.sessions.append(session)
        if owner is None:
            # In the clock's ticks: one that began in the same tick may be its own.
            possible = [family for family in self._families.values() if family.started <= started]
            owner = possible[0] if len(possible) == 1 else None
        return owner

    def _marked(self, pid: int) -> Optional[KeptFamily]:
        for entry in process_tree.environment(pid):
            if entry.startswith(_MARK):
                return self._families.get(entry)
        return None


class KeptFamily(Family):
    """The processes of one run, as its keeper tells them from those of others."""

    def __init__(self, kin: Kin, mark: bytes) -> None:
        super().__init__(self._all)
        self.mark = mark
        self.rank = 0
        self.sessions: List[int] = []
        self.started = 0
        self._kin = kin

    def is_empty(self) -> bool:
        return self.rank not in self._kin.ranks and not self._kin.strangers_of(self)

    def kill_quickly(self) -> None:
        self._kin.kill_quickly(self)

    def _all(self) -> Processes:
        self._kin.forget_look()
        roots = self._kin.strangers_of(self)
        if self.rank in self._kin.ranks:
            roots = [self.rank, *roots]
        return {**terminate.with_start(roots), **terminate.below(roots), **terminate.marked(self.mark)}


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

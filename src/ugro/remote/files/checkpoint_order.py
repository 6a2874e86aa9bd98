"""The order in which a job wrote its checkpoints on this node, and in which attempt it wrote each.

Times of files do not say it: a node's clock may be hours off, and may be set at any time. An entry that was not there
at the last look, or is another one now, gets the next number. A move from folder to folder does not make it another.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

from ugro.remote import durable
from ugro.remote.files.checkpoint_names import number


class Written(NamedTuple):
    attempt: int
    serial: int


class Entry(NamedTuple):
    """As it is now, and the attempt that wrote it unless that is known already."""

    name: str
    status: os.stat_result
    attempt: int
    folder: str = ""


class Order:
    """The caller holds a lock while it uses this."""

    def __init__(self, path: str) -> None:
        self._path = path
        content = durable.read_json(path)
        known = content.get("entries") if content else None
        self._known: Dict[str, List[Any]] = known if isinstance(known, dict) else {}
        self._begun = int((content or {}).get("begun") or 0)
        self._next = int((content or {}).get("next") or 1)
        self._has_changed = False

    def find(self, name: str, status: os.stat_result) -> Optional[Written]:
        """None: it was not noted, or is another one now."""
        known = self._known.get(name)
        return Written(*known[-2:]) if known is not None and known[:-2] == _identity(status) else None

    def note(self, entries: Iterable[Entry]) -> None:
        """Of several that are new, the times of their files decide: one clock wrote them, a moment ago."""
        new = [one for one in entries if self.find(one.name, one.status) is None]
        for one in sorted(new, key=lambda one: (one.attempt, number(one.name) or -1, one.status.st_mtime_ns, one.name)):
            self._known[one.name] = [*_identity(one.status), one.attempt, self._next]
            self._next += 1
            self._has_changed = True

    def begin(self, attempt: int, entries: Iterable[Entry]) -> None:
        """Before the attempt starts: what is there now is of earlier ones."""
        if attempt > self._begun:
            self._begun, self._has_changed = attempt, True
            self.note([one._replace(attempt=min(one.attempt, attempt - 1)) for one in entries])

    def forget_others(self, names: Iterable[str]) -> None:
        """These are all that are left."""
        kept = set(names)
        for name in [name for name in self._known if name not in kept]:
            del self._known[name]
            self._has_changed = True

    def save(self) -> None:
        """Not needed after a power cut, which ends the attempt, nor worth a failure: the disk may be full."""
        if self._has_changed:
            content = {"begun": self._begun, "next": self._next, "entries": self._known}
            with contextlib.suppress(OSError):
                durable.make_folder(os.path.dirname(self._path))
                durable.write_json(self._path, content, is_lasting=False)
            self._has_changed = False


def _identity(status: os.stat_result) -> List[int]:
    return [status.st_ino, status.st_mtime_ns]

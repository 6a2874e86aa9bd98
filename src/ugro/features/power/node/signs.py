"""What a source of signs of the machine's owner is, and when the last one was."""

from __future__ import annotations

import os
from typing import Any, Dict, List, NamedTuple, Optional, Protocol, Sequence, Tuple

from ugro.node import durable, foreign
from ugro.node.clock import boot_id, clock_s


class Sign(NamedTuple):
    """Somebody did something, so many seconds ago."""

    idle_s: float
    text: str


class Source(Protocol):
    @property
    def name(self) -> str: ...

    def look(self) -> Optional[Sign]:
        """The newest sign since the last look; at the first look, the newest that there is."""

    def blind(self) -> List[str]:
        """What it should look at and cannot, in words."""

    def can_look(self) -> bool: ...


class Record:
    """The newest sign, kept in a file: the next node program finds it there.

    By the clock of this boot. One of an earlier boot does not count.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.last: Optional[Tuple[float, str]] = _read(path)

    def note(self, sign: Sign) -> None:
        at = clock_s() - max(0.0, sign.idle_s)
        if self.last is None or at > self.last[0]:
            self.last = (at, sign.text)

    def save(self) -> None:
        if self.last is not None:
            at, text = self.last
            try:
                durable.write_json(self._path, {"boot_id": boot_id(), "clock_s": at, "sign": text}, is_lasting=False)
            except OSError:
                return  # a full disk: who looks again after a restart knows a little less


class Watch:
    """Looks at all sources, and says what is new."""

    def __init__(self, sources: Sequence[Source], record: Record, pulse_s: float) -> None:
        """``pulse_s``: while somebody goes on, that is said no more often."""
        self._sources = sources
        self._record = record
        self._pulse_s = pulse_s
        self._sent_at = float("-inf")
        self._sent: Optional[Tuple[Optional[float], List[str], List[str]]] = None

    def look(self) -> Optional[Dict[str, Any]]:
        """None: nothing is new, or that it goes on was said a moment ago."""
        for source in self._sources:
            sign = source.look()
            if sign is not None:
                self._record.note(sign)
        names = [source.name for source in self._sources if source.can_look()]
        blind = [text for source in self._sources for text in source.blind()]
        last = self._record.last
        news = (last[0] if last else None, names, blind)
        now = clock_s()
        is_first = self._sent is None or self._sent[1:] != news[1:]
        if news == self._sent or (not is_first and now - self._sent_at < self._pulse_s):
            return None
        self._sent, self._sent_at = news, now
        self._record.save()
        return {
            "idle_s": round(max(0.0, now - last[0]), 3) if last else None,
            "sign": last[1] if last else "",
            "sources": names,
            "blind": blind,
        }


def _read(path: str) -> Optional[Tuple[float, str]]:
    try:
        with open(path, encoding="utf-8") as file:
            found = foreign.parsed(file.read(4096))
        if found["boot_id"] == boot_id() and float(found["clock_s"]) <= clock_s():
            return float(found["clock_s"]), str(found["sign"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def read(path: str, most: int = 1 << 20) -> str:
    """Empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def listed(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []

"""How ranks meet at the end of a round, by the store that every process group has.

Together: all ranks report, in one exchange that fails at once if a rank is dead. Ranks that are done long before the
others ask them to end their round at the next step; what those leave is shared out again.

Loosely (``max_staleness`` > 0): ranks leave reports in the store. Those that are done wait some time for the others and
then decide who takes part. A rank that was left out sees the decision between two of its steps.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

from ugro.train.group import Group
from ugro.train.local.report import Report

_LOOK_S = 0.2
_SHORT_S, _LONG_S = 0.001, 0.02  # between two looks of a rank that waits
_KEPT = 4  # meetings whose keys are kept: a late rank may still read them
_PREFIX = "ugro_local"
_MADE = itertools.count()  # a process may train twice, and all ranks do so in the same order

Reports = list[Report | None]  # by rank; None: it was not there


class Meeting:
    def __init__(self, group: Group, max_staleness: int) -> None:
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store

        self._group = group
        self._store: Any = PrefixStore(f"{_PREFIX}/{next(_MADE)}", _get_default_store())
        self._kept = _KEPT + max_staleness
        self._next_look = 0.0

    # --- between steps ------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether to look at the store: not in every short step."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_S
        return True

    def is_cut(self, number: int) -> bool:
        """Whether this rank is to end its round now."""
        return self._has(f"cut/{number}") or self._has("stop")

    def cut(self, number: int) -> None:
        self._store.set(f"cut/{number}", "1")

    def stop(self) -> None:
        self._store.set("stop", "1")

    def is_decided(self, number: int) -> bool:
        return self._has(f"decision/{number}")

    # --- together -----------------------------------------------------------------------------------------------

    def together(self, number: int, report: Report, patience_s: float) -> Reports:
        self._store.add(f"done/{number}", 1)
        deadline, pause_s = time.monotonic() + patience_s, _SHORT_S
        while self._store.add(f"done/{number}", 0) < self._group.ranks:
            if time.monotonic() > deadline:
                self.cut(number)
                break
            time.sleep(pause_s)
            pause_s = min(_LONG_S, 1.5 * pause_s)
        found: Reports = [Report.of(text) for text in self._group.texts(report.text())]
        self._tidy(number)
        return found

    # --- loosely ------------------------------------------------------------------------------------------------

    def loosely(self, number: int, report: Report, patience_s: float) -> Reports:
        """The reports that the decision is about; without this rank's if that came too late."""
        self._store.set(self._report(number, self._group.rank), report.text())
        deadline, pause_s = time.monotonic() + patience_s, _SHORT_S
        while not self.is_decided(number):
            there = [rank for rank in range(self._group.ranks) if self._has(self._report(number, rank))]
            if len(there) == self._group.ranks or time.monotonic() > deadline:
                # The first decision counts.
                self._store.compare_set(f"decision/{number}", "", json.dumps(there))
                break
            time.sleep(pause_s)
            pause_s = min(_LONG_S, 1.5 * pause_s)
        return self.decided(number)

    def decided(self, number: int) -> Reports:
        found: Reports = [None] * self._group.ranks
        for rank in json.loads(self._store.get(f"decision/{number}")):
            found[rank] = Report.of(self._store.get(self._report(number, rank)).decode())
        self._tidy(number)
        return found

    def close(self) -> None:
        self._store = None

    def _tidy(self, number: int) -> None:
        old = number - self._kept
        if old < 0 or self._group.rank != 0:
            return
        reports = [self._report(old, rank) for rank in range(self._group.ranks)]
        for key in (f"cut/{old}", f"done/{old}", f"decision/{old}", *reports):
            self._store.delete_key(key)

    def _report(self, number: int, rank: int) -> str:
        return f"report/{number}/{rank}"

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

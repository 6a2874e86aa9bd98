"""Says whom a rank waits for between two steps: another may have left its loop early, or may still be in it.

Ranks leave a word in the store of the process group before they wait. A rank that has waited for long looks who has not
come. What hangs is left alone: somebody may only be slow.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ugro.core.support.quantity import format_duration
from ugro.policy.wording import names
from ugro.train.group import Group
from ugro.train.notices import Notices
from ugro.train.sampler import Progress

_KEY = "waiting"


class Patience:
    def __init__(self, group: Group, progress: Progress, limit_s: float, notices: Notices) -> None:
        self._group, self._progress, self._limit_s, self._notices = group, progress, limit_s, notices
        self._called = [f"rank {rank} ({name})" for rank, name in enumerate(group.nodes)]
        self._store = _store()
        self._count = 0  # of the times that ranks have met like this, alike on all of them

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        self._count += 1
        self._store.set(f"here/{self._group.rank}", str(self._count))
        timer = threading.Timer(self._limit_s, self._say)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self._notices.unsay(_KEY)

    def _say(self) -> None:
        others = [rank for rank in range(self._group.ranks) if rank != self._group.rank]
        try:
            absent = [rank for rank in others if not self._is_here(rank)]
        except RuntimeError:  # the store is gone, and with it the group
            return
        whom = names([self._called[rank] for rank in absent or others])
        self._notices.say(
            _KEY,
            f"{self._called[self._group.rank]} has waited {format_duration(self._limit_s)} for {whom}, after "
            f"{self._progress.step} steps: have they left their loops at different steps?",
        )

    def _is_here(self, rank: int) -> bool:
        key = f"here/{rank}"
        return bool(self._store.check([key])) and int(self._store.get(key)) >= self._count


def _store() -> Any:
    from torch.distributed import PrefixStore
    from torch.distributed.distributed_c10d import _get_default_store

    return PrefixStore("ugro_waiting", _get_default_store())

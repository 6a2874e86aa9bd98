"""One source under watch: what it listed last, and why it cannot be read if it cannot.

A source that fails is read again after a growing pause. What it listed before stays, because its failure says nothing
about its machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from datetime import UTC, datetime

from ugro.core.discovery import SourceState
from ugro.core.errors import UgroError
from ugro.nodes.discovery.candidates import Checked, Rules, check_offers
from ugro.nodes.discovery.source import Source, SourceDown
from ugro.policy.lifecycle.backoff import delay_s

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 60.0
_MOST_TEXT = 300


class SourceWatch:
    def __init__(self, source: Source, rules: Rules, on_change: Callable[[], None]) -> None:
        self.source = source
        self.rules = rules
        self.checked = Checked()
        self.error: UgroError | None = None
        self._read_at: datetime | None = None
        self._on_change = on_change
        self._answered = asyncio.Event()  # by a list or by an error
        self._failures = 0  # since it listed its machines
        self._task = self._start()

    @property
    def is_current(self) -> bool:
        """Whether ``checked`` is what the source says now."""
        return self._read_at is not None and self.error is None

    def state(self) -> SourceState:
        error = self.error
        return SourceState(
            name=self.source.name,
            place=self.source.place,
            found=len(self.checked.candidates),
            error=str(error) if error else None,
            hint=error.hint if error else None,
            read_at=self._read_at.isoformat(timespec="seconds") if self._read_at else None,
            refused=self.checked.refused,
        )

    def look_again(self) -> None:
        """Reads it now, unless it tells of changes itself."""
        if self.source.is_polled or self.error is not None:
            self._task.cancel()
            self._answered.clear()
            self._task = self._start()

    async def answered(self, timeout_s: float) -> None:
        """Returns once it has listed its machines or failed to, or after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._answered.wait()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._keep_reading(), name=f"watch {self.source.name}")

    async def _keep_reading(self) -> None:
        while True:
            # A task of its own: whatever a registry makes a library raise, the source is read again.
            reading = asyncio.create_task(self._read(), name=f"read {self.source.name}")
            try:
                await asyncio.wait([reading])
            finally:
                reading.cancel()
                await asyncio.wait([reading])
            self._note_end(reading)
            await asyncio.sleep(delay_s(self._failures, random.random(), base_s=1.0, cap_s=_LONGEST_PAUSE_S))

    async def _read(self) -> None:
        async with contextlib.aclosing(self.source.watch()) as lists:
            async for offers in lists:
                self._failures = 0
                self._take(check_offers(offers, self.source, self.rules))

    def _note_end(self, reading: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError() if reading.cancelled() else reading.exception()
        if error is None:
            return
        self._failures += 1
        if isinstance(error, SourceDown):
            self._fail(error)
            return
        # A bug, or a registry that makes a library fail in a new way.
        found = SourceDown(f"failed: {type(error).__name__}: {error}"[:_MOST_TEXT], hint="see: ugro agent logs")
        if self.error is None or self.error.message != found.message:
            log.error("reading %s ended by an error; it is read again", self.source.name, exc_info=error)
        self._fail(found)

    def _take(self, checked: Checked) -> None:
        has_changed = checked != self.checked or not self.is_current
        self.checked, self.error, self._read_at = checked, None, datetime.now(UTC)
        self._answered.set()
        if has_changed:
            log.info("%s lists %d machines", self.source.name, len(checked.candidates))
            self._on_change()

    def _fail(self, error: UgroError) -> None:
        if self.error is None or self.error.message != error.message:
            log.warning("%s cannot be read: %s", self.source.name, error)
        self.error = error
        self._answered.set()
        self._on_change()

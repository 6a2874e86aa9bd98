"""Sends metrics of nodes and jobs to other systems. What a server does not take now waits on disk, within a bound.

Points are in the spool before they are in the metric store: after a crash some are sent twice, with the same time, and
none is missing. A slow server holds back nobody but its own spool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ugro.features.alerts.channels import SendFailure
from ugro.features.trackers.config import ExportSection
from ugro.features.trackers.delivery import Delivery, Destination, Sample, Spool, destinations
from ugro.kernel.telemetry.curves import Points, SeriesKey
from ugro.kernel.telemetry.model import is_internal

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 60.0

Say = Callable[[str], Awaitable[None]]


@dataclass(slots=True)
class Figures:
    """Since the agent started."""

    sent: int = 0
    dropped: int = 0
    waiting: int = 0
    spool_bytes: int = 0
    problem: str | None = None


class Export:
    """One destination."""

    def __init__(self, folder: Path, name: str, say: Say) -> None:
        self.name = name
        self.figures = Figures()
        self._folder = folder
        self._say = say
        self._spool: Spool | None = None
        self._delivery: Delivery | None = None  # of the spool's oldest file, which stays until all of it was sent
        self._using = asyncio.Lock()  # of the spool
        self._failures = 0
        self._was_dropping = False

    async def take(self, samples: Sequence[Sample], limit: int) -> None:
        why = "its spool is full"
        async with self._using:
            try:
                dropped = await asyncio.to_thread(self._add, samples, limit)
            except OSError as error:  # a full disk: the metric store has them all the same
                dropped, why = len(samples), f"its spool cannot be written: {error.strerror}"
        await self._note_dropped(dropped, why)

    async def send_safely(self, destination: Destination, cluster: str) -> float:
        """As ``send``, also if its folder cannot be used now."""
        try:
            return await self.send(destination, cluster)
        except OSError as error:
            self._noted(f"export to {self.name}: its spool cannot be used: {error.strerror}")
            return float(2 ** min(self._failures, 8))

    async def send(self, destination: Destination, cluster: str) -> float:
        """Sends all that waits. Returns how many pauses to make before the next try; 0: it was taken."""
        async with self._using:
            await asyncio.to_thread(self._seal)
        while (delivery := await self._under_way()) is not None:
            try:
                outcome = await delivery.send_some(destination, cluster)
            except SendFailure as failure:
                self._noted(str(failure))
                return float(2 ** min(self._failures, 8))
            if delivery.is_done:
                await self._forget()
            self.figures.sent += outcome.sent
            await self._note_dropped(outcome.dropped, outcome.why_dropped)
        self._noted(None)
        return 0

    async def _under_way(self) -> Delivery | None:
        """The file that was begun, or the next one."""
        while self._delivery is None:
            async with self._using:
                samples = await asyncio.to_thread(self._oldest)
            if samples is None:
                return None
            self._delivery = Delivery(samples)
            if self._delivery.is_done:  # it has no whole line
                await self._forget()
        return self._delivery

    async def _forget(self) -> None:
        """All of its points were sent, or nobody takes them."""
        self._delivery = None
        async with self._using:
            await asyncio.to_thread(self._remove_oldest)

    def _noted(self, problem: str | None) -> None:
        if problem is not None and self._failures == 0:
            log.warning("metrics wait on disk: %s", problem)
        elif problem is None and self._failures:
            log.info("export to %s: it takes metrics again", self.name)
            self._was_dropping = False
        self._failures = self._failures + 1 if problem is not None else 0
        self.figures.problem = problem

    async def _note_dropped(self, count: int, why: str) -> None:
        if not count:
            return
        self.figures.dropped += count
        if not self._was_dropping:  # the figures have the rest
            self._was_dropping = True
            await self._say(f"export to {self.name}: {count} points were dropped: {why}")

    # --- in a thread --------------------------------------------------------------------------------------------

    def _made(self) -> Spool:
        if self._spool is None:
            self._spool = Spool(self._folder / self.name)
        return self._spool

    def _add(self, samples: Sequence[Sample], limit: int) -> int:
        dropped = self._made().add(samples, limit)
        self._measure()
        return dropped

    def _seal(self) -> None:
        self._made().seal()

    def _oldest(self) -> list[Sample] | None:
        """What it has is sent next."""
        spool = self._made()
        sealed = spool.oldest()
        spool.in_use = sealed.number if sealed is not None else None
        return spool.read(sealed) if sealed is not None else None

    def _remove_oldest(self) -> None:
        spool = self._made()
        if (sealed := spool.oldest()) is not None:
            spool.remove(sealed)
        spool.in_use = None
        self._measure()

    def _measure(self) -> None:
        spool = self._made()
        self.figures.waiting, self.figures.spool_bytes = spool.points, spool.size


class ExportService:
    def __init__(
        self, folder: Path, section: Callable[[], ExportSection], cluster: Callable[[], str], say: Say
    ) -> None:
        """``say``: what everybody should know, once."""
        self._section = section
        self._cluster = cluster
        names = ("influxdb", "otlp")
        self._exports = {name: Export(folder, name, say) for name in names}

    async def take(self, points: Mapping[SeriesKey, Points]) -> None:
        """To be called with all points, before they are in the metric store."""
        section = self._section()
        wanted = destinations(section)
        if not wanted:
            return
        samples = [sample for key, some in points.items() for sample in _samples(key, some)]
        for destination in wanted if samples else ():
            await self._exports[destination.name].take(samples, section.spool_limit)

    def figures(self) -> dict[str, Figures]:
        """Of those that are configured."""
        return {one.name: self._exports[one.name].figures for one in destinations(self._section())}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name in self._exports:
                group.create_task(self._run(name), name=f"export to {name}")

    async def _run(self, name: str) -> None:
        while True:
            section = self._section()
            found = next((one for one in destinations(section) if one.name == name), None)
            pauses = 0.0
            if found is not None:
                pauses = await self._exports[name].send_safely(found, self._cluster())
            await asyncio.sleep(min(_LONGEST_PAUSE_S, section.interval * max(1.0, pauses)))


def _samples(key: SeriesKey, points: Points) -> list[Sample]:
    if is_internal(key.key):
        return []
    rows = zip(points.times_ms, points.steps, points.values, strict=True)
    found = (Sample(*key, time_ms, step, value) for time_ms, step, value in rows)
    return [sample for sample in found if sample.is_sendable]

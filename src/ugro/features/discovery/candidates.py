"""From what a source says to candidates: names, addresses, ports and labels are checked, and all is bounded.

Anybody who can write to a registry writes these values. None of them may become an option of ssh, reach a shell, choose
the account that is logged in to (unless the user allows that), or fill the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from ugro.features.discovery.model import Candidate, SourceState
from ugro.kernel.config.kinds import BadValueError, shown
from ugro.kernel.config.schema import Config, NodeEntry
from ugro.kernel.config.section import HOST, LABEL, NODE_NAME, USER
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.moments import delay_s
from ugro.node.globs import Glob

# --- source -----------------------------------------------------------------------------------------------------------
# What a source of machines is. What it says is not trusted: ``candidates`` checks it.


Offers = Sequence["Offer"]


class SourceDown(UgroError):
    """A source cannot be read now. That says nothing about its machines."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a source says of one machine. Nothing of it is checked, not even its type."""

    name: object
    host: object = None  # without one: the name
    user: object = None
    port: object = None
    labels: object = ()


class Source(Protocol):
    @property
    def name(self) -> str:
        """Its key in the cluster file."""

    @property
    def place(self) -> str:
        """Where it looks, for people."""

    @property
    def is_polled(self) -> bool:
        """Whether it looks now and then, so that a look now may find more."""

    @property
    def may_name_users(self) -> bool:
        """Whether the user trusts it to choose the account that is logged in to."""

    def watch(self) -> AsyncGenerator[Offers]:
        """Yields all machines that it lists, at once and after every change. Raises SourceDown."""


# --- candidates -------------------------------------------------------------------------------------------------------


MOST_OFFERS = 1000
_MOST_LABELS = 16
_MOST_REFUSED = 20


@dataclass(frozen=True, slots=True)
class Rules:
    """What the cluster file says of all that is found."""

    match: tuple[str, ...] = ()
    user: str | None = None

    def admit(self, name: str) -> bool:
        return not self.match or any(Glob(pattern).fits(name) for pattern in self.match)


@dataclass(frozen=True, slots=True)
class Checked:
    candidates: tuple[Candidate, ...] = ()
    refused: tuple[str, ...] = ()  # sentences


def check_offers(offers: Sequence[Offer], source: Source, rules: Rules) -> Checked:
    found: dict[str, Candidate] = {}
    refused: list[str] = []
    for offer in offers[:MOST_OFFERS]:
        try:
            candidate = _candidate(offer, source, rules)
        except BadValueError as error:
            refused.append(f"{_named(offer)}: {error.message}")
            continue
        if not rules.admit(candidate.name):
            continue
        if candidate.name in found:
            refused.append(f"{candidate.name}: listed twice, the first is used")
        else:
            found[candidate.name] = candidate
    if len(offers) > MOST_OFFERS:
        refused.insert(0, f"{len(offers)} machines are listed, only the first {MOST_OFFERS} are used")
    more = [f"and {len(refused) - _MOST_REFUSED} more"] if len(refused) > _MOST_REFUSED else []
    return Checked(tuple(found.values()), (*refused[:_MOST_REFUSED], *more))


def spec_of(candidate: Candidate, config: Config) -> NodeSpec:
    """As the cluster file would have it, with what that says of all nodes."""
    host = None if candidate.host == candidate.name else candidate.host
    entry = NodeEntry(host=host, user=candidate.user, port=candidate.port, labels=candidate.labels)
    return replace(entry.spec(candidate.name, config), found_by=", ".join(candidate.sources) or "discovery")


def merged(of_sources: Iterable[Checked]) -> dict[str, Candidate]:
    """By name. A machine that several sources list is taken as the first of them has it."""
    found: dict[str, Candidate] = {}
    for checked in of_sources:
        for one in checked.candidates:
            known = found.get(one.name)
            found[one.name] = one if known is None else replace(known, sources=(*known.sources, *one.sources))
    return found


def _candidate(offer: Offer, source: Source, rules: Rules) -> Candidate:
    name = NODE_NAME.parse(offer.name)
    return Candidate(
        name=name,
        host=name if offer.host in (None, "") else HOST.parse(offer.host),
        user=_user(offer, source, rules),
        port=_port(offer.port),
        labels=_labels(offer.labels),
        sources=(source.name,),
    )


def _user(offer: Offer, source: Source, rules: Rules) -> str | None:
    if source.may_name_users and offer.user not in (None, ""):
        return USER.parse(offer.user)
    # The hosts of an ssh configuration have their users there.
    return None if source.name == "ssh_config" else rules.user


def _port(value: object) -> int | None:
    if value in (None, 0, ""):
        return None
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 6 else value
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 65535:
        raise BadValueError(f"expected a port from 1 to 65535, got {shown(value)}")
    return number


def _labels(value: object) -> tuple[str, ...]:
    if value in (None, ""):
        return ()
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or len(words) > _MOST_LABELS:
        raise BadValueError(f"expected at most {_MOST_LABELS} labels, got {shown(value)}")
    return tuple(dict.fromkeys(LABEL.parse(word) for word in words))


def _named(offer: Offer) -> str:
    return offer.name if isinstance(offer.name, str) and NODE_NAME.is_valid(offer.name) else shown(offer.name)


# --- watch ------------------------------------------------------------------------------------------------------------
# One source under watch: what it listed last, and why it cannot be read if it cannot.
#
# A source that fails is read again after a growing pause. What it listed before stays, because its failure says nothing
# about its machines.


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

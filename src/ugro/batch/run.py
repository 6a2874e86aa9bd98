"""One map: its items, what they cost, its results, and how far it is."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ugro.batch.errors import ItemFailed
from ugro.batch.frames import attempt, loaded, size_of
from ugro.batch.outputs import Answer, Ordered, Unordered
from ugro.batch.worker import UNREADABLE
from ugro.core.errors import UgroError
from ugro.policy.batching.aims import Aims
from ugro.policy.batching.ledger import Failed, Ledger, Piece
from ugro.policy.batching.slices import Cost, Sizes, SlotView, share_of, slice_size

_PULL_S = 0.02  # a slow input: what has arrived by then is sent
_RESULT_BYTES = 64  # that the smallest result takes here, beside its encoded ones


@dataclass(frozen=True, slots=True)
class Settings:
    is_ordered: bool = True
    retries: int = 1
    timeout_s: float | None = None  # of one item


@dataclass(frozen=True, slots=True)
class Death:
    """How the process of a slot ended, as the cause of a failure."""

    kind: str  # Died, TimedOut
    message: str
    node: str


@dataclass(frozen=True, slots=True)
class Progress:
    done: int
    failed: int
    total: int | None  # None: the input does not say it
    elapsed_s: float
    nodes: Mapping[str, int]  # items done on each

    @property
    def per_s(self) -> float:
        return self.done / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        return (self.total - self.done) / self.per_s if self.total is not None and self.done else None


class Run:
    def __init__(self, items: Iterable[Any], function: str, settings: Settings, aims: Aims) -> None:
        self.function = function  # the name under which it was published
        self.settings = settings
        self.aims = aims
        self.input_errors: list[Exception] = []
        is_sized = isinstance(items, Sequence)
        source = iter(items) if is_sized else _guarded(items, self.input_errors)
        self.ledger = Ledger(source, _length(items), settings.retries)
        self.outputs = Ordered() if settings.is_ordered else Unordered()
        self.costs: dict[int, Cost] = {}  # by slot
        self.overall = Cost()
        self.error: UgroError | None = None  # ends the map
        self.is_over = False
        self.is_pulling = False  # the input itself may use the pool
        self.loaded: set[int] = set()  # slots that have the function
        self._is_sized = is_sized
        self._arguments, self._results = Sizes(), Sizes()
        self._tally = _Tally()

    @property
    def is_finished(self) -> bool:
        return self.ledger.is_finished

    @property
    def progress(self) -> Progress:
        tally = self._tally
        total = self.ledger.taken if self.ledger.is_exhausted else self.ledger.length
        return Progress(tally.done, tally.failed, total, time.monotonic() - tally.began, dict(tally.nodes))

    def may_send(self, slots: int) -> bool:
        """Whether more results may come: the reader must keep up, and never waits for an item that is not sent."""
        if self.is_over or self.is_pulling or self.error is not None:
            return False
        outputs, aims = self.outputs, self.aims
        if outputs.needs(self.ledger.first_waiting):
            return True
        return outputs.buffered_bytes + self._expected_bytes() < aims.most_buffered_bytes and (
            outputs.ready <= aims.batches_ahead * slots
        )

    def _expected_bytes(self) -> int:
        per_item = self._results.bytes / self._results.items if self._results.items else 0.0
        return round(self.ledger.sent_items * per_item)

    def next_piece(self, slot: int, slots: Iterable[int], starting: int) -> Piece | None:
        cost = self.costs.setdefault(slot, Cost())
        own = cost if cost.items else self.overall
        costs = {number: self.costs.get(number, self.overall) for number in slots}
        share = share_of(slot, costs, self.overall, starting)
        view = SlotView(own, share, self.ledger.remaining, self._arguments, self._results)
        self.is_pulling = True
        try:
            return self.ledger.take(slice_size(view, self.aims), self._gauge())
        finally:
            self.is_pulling = False

    def _gauge(self) -> _Gauge | None:
        return None if self._is_sized and self._arguments.bytes else _Gauge(self.aims.most_bytes)

    @property
    def watched_bytes(self) -> int:
        """Of the results of a batch, until their size is known; then 0, as its items are counted."""
        return 0 if self._results.items else self.aims.most_bytes

    def expected_s(self, slot: int, items: int) -> float | None:
        """None: nothing is known yet."""
        cost = self.costs.get(slot)
        per_item_s = (cost and cost.per_item_s) or self.overall.per_item_s
        return None if per_item_s is None else items * per_item_s

    def note_sent(self, items: int, size_bytes: int) -> None:
        self._arguments.note(items, size_bytes)

    def answered(self, slot: int, node: str, head: Sequence[Any], parts: Sequence[Any]) -> None:
        batch, done, busy_s, failures, _ = head
        start = self.ledger.piece(batch).start
        size = size_of(parts)
        failed = frozenset(index for index, _ in failures)
        final = self.ledger.answered(batch, done, [(index, {**report, "node": node}) for index, report in failures])
        self.costs.setdefault(slot, Cost()).note(done, busy_s)
        self.overall.note(done, busy_s)
        self._results.note(done, size)
        self._tally.note(node, done - len(failed))
        self.outputs.add(Answer(start, done, failed, parts, size + done * _RESULT_BYTES))
        self.fail(final)

    def fail(self, failures: Iterable[Failed]) -> None:
        for one in failures:
            self._tally.done += 1
            self._tally.failed += 1
            self.outputs.fail(_failure(one))


@dataclass(slots=True)
class _Tally:
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    failed: int = 0
    nodes: Counter[str] = field(default_factory=Counter)

    def note(self, node: str, items: int) -> None:
        self.done += items
        self.nodes[node] += items


class _Gauge:
    """Whether enough items were taken: of an input that is slow, or whose items are large."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._deadline = time.perf_counter() + _PULL_S

    def __call__(self, item: Any) -> bool:
        self._left -= sys.getsizeof(item, 64)
        return self._left <= 0 or time.perf_counter() > self._deadline


def _guarded(items: Iterable[Any], errors: list[Exception]) -> Iterator[Any]:
    """The input's own error is raised to its caller, after the results of what came before it."""
    try:
        yield from items
    except Exception as error:  # noqa: BLE001  # raised later
        errors.append(error)


def _length(items: Iterable[Any]) -> int | None:
    try:
        return len(items)  # type: ignore[arg-type]  # it may have none
    except TypeError:
        return None


def _failure(failed: Failed) -> ItemFailed:
    cause = failed.cause
    if isinstance(cause, Death):
        return ItemFailed(failed.index, failed.item, cause.message, cause_kind=cause.kind, node=cause.node)
    kind, text = cause["kind"], cause["message"]
    message = text if kind in ("NotJson", "Unpicklable", UNREADABLE) else f"{kind}: {text}" if text else kind
    error = ItemFailed(
        failed.index, failed.item, message, cause_kind=kind, traceback=cause["traceback"], node=cause["node"]
    )
    if cause["pickle"] is not None:
        problem, original = attempt(loaded, [cause["pickle"]])
        error.__cause__ = original if problem is None and isinstance(original, BaseException) else None
    return error

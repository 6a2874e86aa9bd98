"""One map: its items, what they cost, its results, and how far it is."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ugro.features.batches.model import ItemFailed, Parts, ResultsUnreadable
from ugro.features.batches.rules import Aims, Cost, Failed, Ledger, Piece, Sizes, SlotView, share_of, slice_size
from ugro.features.batches.worker import UNREADABLE, attempt, loaded, size_of
from ugro.kernel.support.errors import UgroError

# --- outputs ----------------------------------------------------------------------------------------------------------
# Results on their way to the reader: in the order of the items, or as they come.
#
# Answers stay encoded until they are read, so what waits here has a known size, and objects exist only while
# they are used.


_FAILURE_BYTES = 2048  # of the exception and its item, without its traceback


@dataclass(frozen=True, slots=True)
class Answer:
    """The results of the items ``start`` to ``start + done``, without those that failed."""

    start: int
    done: int
    failed: frozenset[int]
    parts: Parts
    size_bytes: int

    @property
    def indices(self) -> Sequence[int]:
        whole = range(self.start, self.start + self.done)
        return [index for index in whole if index not in self.failed] if self.failed else whole

    def results(self) -> list[Any]:
        error, found = attempt(loaded, self.parts)
        if error is not None:
            what = f"the results of items {self.start} to {self.start + self.done - 1} cannot be loaded here"
            hint = "return plain values, or objects of a module that can be imported here"
            raise ResultsUnreadable(f"{what}: {type(error).__name__}: {error}", hint=hint) from error
        values: list[Any] = found
        return values


@dataclass(frozen=True, slots=True)
class Chunk:
    indices: Sequence[int]
    values: Sequence[Any]


class Unordered:
    def __init__(self) -> None:
        self._waiting: deque[Answer | ItemFailed] = deque()
        self.buffered_bytes = 0

    @property
    def ready(self) -> int:
        """Answers that could be read now."""
        return len(self._waiting)

    def needs(self, first_waiting: int) -> bool:
        """Whether the reader waits for that item."""
        return not self._waiting

    def add(self, answer: Answer) -> None:
        if answer.done > len(answer.failed):
            self._waiting.append(answer)
            self.buffered_bytes += answer.size_bytes

    def fail(self, failure: ItemFailed) -> None:
        self._waiting.append(failure)

    def next_chunk(self) -> Chunk | None:
        if not self._waiting:
            return None
        first = self._waiting.popleft()
        if isinstance(first, ItemFailed):
            return Chunk((first.index,), (first,))
        self.buffered_bytes -= first.size_bytes
        return Chunk(first.indices, first.results())


class Ordered:
    def __init__(self) -> None:
        self._next = 0
        self._answers: dict[int, Answer] = {}  # by their first item
        self._single: dict[int, tuple[Any, int]] = {}  # results and failures beside an item that is retried, and bytes
        self._single_bytes = 0
        self._answer_bytes = 0

    @property
    def buffered_bytes(self) -> int:
        return self._answer_bytes + self._single_bytes

    @property
    def ready(self) -> int:
        is_ready = self._next in self._answers or self._next in self._single
        return len(self._answers) if is_ready else 0

    def needs(self, first_waiting: int) -> bool:
        return first_waiting <= self._next

    def add(self, answer: Answer) -> None:
        if not answer.failed:
            self._answers[answer.start] = answer
            self._answer_bytes += answer.size_bytes
        elif answer.done > len(answer.failed):
            size_bytes = answer.size_bytes // (answer.done - len(answer.failed))
            for index, value in zip(answer.indices, answer.results(), strict=True):
                self._keep(index, value, size_bytes)

    def fail(self, failure: ItemFailed) -> None:
        self._keep(failure.index, failure, _FAILURE_BYTES + len(failure.traceback))

    def next_chunk(self) -> Chunk | None:
        if (answer := self._answers.pop(self._next, None)) is not None:
            self._answer_bytes -= answer.size_bytes
            self._next += answer.done
            return Chunk(answer.indices, answer.results())
        return self._singles()

    def _keep(self, index: int, value: Any, size_bytes: int) -> None:
        self._single[index] = value, size_bytes
        self._single_bytes += size_bytes

    def _singles(self) -> Chunk | None:
        first, values = self._next, []
        while self._next in self._single:
            value, size_bytes = self._single.pop(self._next)
            values.append(value)
            self._single_bytes -= size_bytes
            self._next += 1
        return Chunk(range(first, self._next), values) if values else None


# --- run --------------------------------------------------------------------------------------------------------------


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

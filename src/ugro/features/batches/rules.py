"""Decides what a map would take, how its items are cut, and who has which: every item ends in exactly one outcome.

Pure: it takes items from the input that it was given, and otherwise only keeps books. An item may be *run* more than
once (its process died before it could answer), but it has one result or one failure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean
from typing import Any

from ugro.features.batches.model import Bound, Estimate, Place, Prediction, Sample
from ugro.kernel.support.errors import NotFound, Unsatisfiable, UsageError
from ugro.kernel.support.quantities import format_duration, format_size

# --- aims -------------------------------------------------------------------------------------------------------------
# The aims of a map: how long a batch should take, and what bounds it.


@dataclass(frozen=True, slots=True)
class Aims:
    batch_s: float = 0.15  # work in a batch: long against its overhead, short against the whole
    least_s: float = 0.01  # work in a batch at the end, when the rest is shared out
    probe_items: int = 64  # in the first batch of a slot, as its cost is not known yet
    probe_s: float = 0.02  # after which a slot gives the rest of its first batch back
    most_bytes: int = 8 << 20  # of a batch's items, and of its results
    most_buffered_bytes: int = 64 << 20  # of results that wait for their reader
    batches_ahead: int = 4  # per slot: results that could be read and were not
    in_flight: int = 2  # batches per slot, so that none waits for the next one

    def budget_s(self, expected_s: float) -> float:
        """After which a slot gives the rest of a batch back: twice what was expected."""
        return min(2 * self.batch_s, max(2 * expected_s, self.probe_s))


# --- estimate ---------------------------------------------------------------------------------------------------------
# Whether it pays to share work out: what a few timed items say about all of them, on each place, with a reason.
#
# The time on a place is its start, and then the longest of: the work over its slots, the items through the driver, the
# data over its link, and the longest single item.


_WORTH = 1.2  # times faster than a simpler place
_WORTH_S = 1.0  # and so many seconds sooner


def predict(sample: Sample, place: Place) -> Prediction:
    mean_s, longest_s = fmean(sample.costs_s), max(sample.costs_s)
    each_s = mean_s / place.speed + place.slot_item_s
    slots = max(1, min(place.slots, sample.items))
    data_s = sample.data_bytes / place.bytes_per_s if place.bytes_per_s else 0.0
    tail_s = longest_s / place.speed / 2 if slots > 1 else 0.0
    parts = {
        Bound.WORK: sample.items * each_s / slots + tail_s + (data_s if place.is_here else 0.0),
        Bound.DRIVER: sample.items * place.driver_item_s,
        Bound.DATA: data_s,
        Bound.LONGEST: longest_s / place.speed if sample.items else 0.0,
    }
    bound = max(parts, key=lambda one: parts[one])
    return Prediction(place, place.start_s + parts[bound], bound)


def estimate(sample: Sample, places: Sequence[Place]) -> Estimate:
    """The first place is one core of this machine, without a pool."""
    predictions = tuple(predict(sample, place) for place in places)
    best = 0
    for number, one in enumerate(predictions):
        least = predictions[best].seconds
        if one.seconds * _WORTH <= least and one.seconds + _WORTH_S <= least:
            best = number
    return Estimate(sample, predictions, best, _reason(sample, predictions, best))


def _reason(sample: Sample, predictions: Sequence[Prediction], best: int) -> str:
    work = f"{format_duration(sample.work_s)} of work in {sample.items:,} item{'' if sample.items == 1 else 's'}"
    chosen, alone = predictions[best], predictions[0]
    if best == 0:
        others = [one for one in predictions[1:] if one.seconds < alone.seconds]
        if not others:
            return f"{work}: do it here, in a plain loop; {_why_not(predictions)}"
        quickest = min(others, key=lambda one: one.seconds)
        gain = format_duration(alone.seconds - quickest.seconds)
        return f"{work}: do it here, in a plain loop; {quickest.place.name} would save only {gain}"
    times = alone.seconds / chosen.seconds
    return f"{work}: {times:.1f} × on {chosen.place.name}{_bound_of(sample, chosen)}"


def _bound_of(sample: Sample, chosen: Prediction) -> str:
    if chosen.bound is Bound.DATA and chosen.place.bytes_per_s:
        speed = f"{8 * chosen.place.bytes_per_s / 1e9:.2g} Gbit/s"
        return f"; the data's {format_size(sample.data_bytes)} over {speed} are the bound"
    if chosen.bound is Bound.DRIVER:
        return "; the items themselves are the bound: put more work into each"
    if chosen.bound is Bound.LONGEST:
        return f"; the longest item, {format_duration(max(sample.costs_s))}, is the bound"
    return ""


def _why_not(predictions: Sequence[Prediction]) -> str:
    if len(predictions) < 2:
        return "there is no other place"
    least = min(predictions[1:], key=lambda one: one.seconds)
    share = least.place.start_s / least.seconds if least.seconds else 0.0
    if share > 0.5:
        return f"{least.place.name} needs {format_duration(least.place.start_s)} to start"
    return f"sharing the items out to {least.place.name} costs more than it saves"


# --- ledger -----------------------------------------------------------------------------------------------------------


_MOST_LOSSES = 10  # of machines that had the same items: then the items are looked at, too


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive items."""

    start: int
    items: Sequence[Any]
    failures: int = 0  # exceptions of each of its items
    deaths: int = 0  # of processes that had it
    losses: int = 0  # of machines that had it

    @property
    def stop(self) -> int:
        return self.start + len(self.items)

    @property
    def is_suspect(self) -> bool:
        """It may kill its process, so it runs alone on a slot."""
        return self.deaths > 0

    def part(self, start: int, stop: int) -> Piece:
        return replace(self, start=start, items=self.items[start - self.start : stop - self.start])


@dataclass(frozen=True, slots=True)
class Failed:
    """An item without a result, after its retries."""

    index: int
    item: Any
    cause: Any  # the caller's: what a worker reported, or how its process ended


@dataclass(slots=True)
class Ledger:
    source: Iterator[Any]
    length: int | None  # None: the input does not say it
    retries: int = 1
    taken: int = 0  # items from the input
    is_exhausted: bool = False
    _again: list[tuple[int, Piece]] = field(default_factory=list)  # a heap: the first items go first
    _again_items: int = 0
    _sent: dict[int, Piece] = field(default_factory=dict)
    _batches: int = 0

    @property
    def is_finished(self) -> bool:
        return self.is_exhausted and not self._again and not self._sent

    @property
    def remaining(self) -> int | None:
        """Items that nobody has; None: not known."""
        if self.is_exhausted:
            return self._again_items
        return None if self.length is None else max(0, self.length - self.taken) + self._again_items

    @property
    def sent_items(self) -> int:
        return sum(len(piece.items) for piece in self._sent.values())

    @property
    def first_waiting(self) -> int:
        """The lowest index that nobody has."""
        return self._again[0][0] if self._again else self.taken

    @property
    def next_is_suspect(self) -> bool:
        return bool(self._again) and self._again[0][1].is_suspect

    def take(self, count: int, is_enough: Callable[[Any], bool] | None = None) -> Piece | None:
        """The next items, at most so many; None if there are none now. What came back goes before what is new.

        ``is_enough`` is asked after each new item.
        """
        return self._returned(count) if self._again else self._new(count, is_enough)

    def _returned(self, count: int) -> Piece:
        """Neighbours that failed go together: when all items fail, their retries are batches, too."""
        pieces = [self._pop()]
        items = len(pieces[0].items)
        while items < count and self._again and _continues(pieces[-1], self._again[0][1]):
            pieces.append(self._pop())
            items += len(pieces[-1].items)
        joined = replace(pieces[0], items=[item for piece in pieces for item in piece.items])
        self.put_back(joined.part(joined.start + count, joined.stop))
        return joined.part(joined.start, min(joined.stop, joined.start + count))

    def _new(self, count: int, is_enough: Callable[[Any], bool] | None) -> Piece | None:
        if self.is_exhausted:
            return None
        items: list[Any] = []
        if is_enough is None:
            items.extend(islice(self.source, count))
            self.is_exhausted = len(items) < count
        else:
            for item in self.source:
                items.append(item)
                if is_enough(item) or len(items) == count:
                    break
            else:
                self.is_exhausted = True
        piece = Piece(self.taken, items)
        self.taken += len(items)
        return piece if items else None

    def sent(self, piece: Piece) -> int:
        """The number of its batch."""
        self._batches += 1
        self._sent[self._batches] = piece
        return self._batches

    def put_back(self, piece: Piece) -> None:
        if piece.items:
            heapq.heappush(self._again, (piece.start, piece))
            self._again_items += len(piece.items)

    def piece(self, batch: int) -> Piece:
        return self._sent[batch]

    def answered(self, batch: int, done: int, failures: Sequence[tuple[int, Any]]) -> list[Failed]:
        """The first ``done`` items were run; the others come back. ``failures``: index and cause of those that failed.

        Returns the failures that are final. The others are tried again, alone.
        """
        piece = self._sent.pop(batch)
        self.put_back(piece.part(piece.start + done, piece.stop))
        final = []
        for index, cause in failures:
            item = piece.part(index, index + 1)
            if item.failures >= self.retries:
                final.append(Failed(index, item.items[0], cause))
            else:
                self.put_back(replace(item, failures=item.failures + 1))
        return final

    def lost(self, batches: Sequence[int], at: int | None, cause: Any, *, is_innocent: bool = False) -> list[Failed]:
        """The process of a slot died with these batches, the oldest first.

        ``at``: the item that it had begun; None: not known, so the oldest batch is cut in halves that run alone until
        the item is found. ``is_innocent``: no item can have done it, as when a machine is lost; believed some times.
        """
        pieces = [self._sent.pop(batch) for batch in batches]
        final: list[Failed] = []
        for place, piece in enumerate(pieces):
            if is_innocent and piece.losses < _MOST_LOSSES:
                self.put_back(replace(piece, losses=piece.losses + 1))
            elif at is None and place > 0:
                self.put_back(piece)
            elif at is None:
                final += self._suspect(piece, cause)
            elif piece.start <= at < piece.stop:
                self.put_back(piece.part(piece.start, at))
                self.put_back(piece.part(at + 1, piece.stop))
                final += self._suspect(piece.part(at, at + 1), cause)
            else:
                self.put_back(piece)
        return final

    def _suspect(self, piece: Piece, cause: Any) -> list[Failed]:
        piece = replace(piece, deaths=piece.deaths + 1)
        if len(piece.items) > 1:
            middle = piece.start + len(piece.items) // 2
            self.put_back(replace(piece.part(piece.start, middle), deaths=1))
            self.put_back(replace(piece.part(middle, piece.stop), deaths=1))
            return []
        if piece.deaths > self.retries:
            return [Failed(piece.start, piece.items[0], cause)]
        self.put_back(piece)
        return []

    def unsendable(self, batch: int, failures: Sequence[Failed]) -> list[Failed]:
        """Some of its items cannot be sent; the others are sent without them. Returns the failures, which are final."""
        piece = self._sent.pop(batch)
        start = piece.start
        for failed in failures:
            self.put_back(piece.part(start, failed.index))
            start = failed.index + 1
        self.put_back(piece.part(start, piece.stop))
        return list(failures)

    def give_up(self) -> list[int]:
        """Nothing more is sent; returns the batches that are under way."""
        self.is_exhausted = True
        self._again.clear()
        self._again_items = 0
        return list(self._sent)

    def _pop(self) -> Piece:
        piece = heapq.heappop(self._again)[1]
        self._again_items -= len(piece.items)
        return piece


def _continues(piece: Piece, other: Piece) -> bool:
    is_alike = (piece.failures, piece.losses) == (other.failures, other.losses)
    return is_alike and piece.stop == other.start and not (piece.deaths or other.deaths)


# --- seats ------------------------------------------------------------------------------------------------------------
# On which nodes the hosts of a pool go, and how many slots each has.


@dataclass(frozen=True, slots=True)
class Candidate:
    node: str
    cores: int
    held_cores: int = 0  # by jobs
    problem: str | None = None  # why it cannot be used
    labels: tuple[str, ...] = ()

    @property
    def free_cores(self) -> int:
        return max(0, self.cores - self.held_cores)


@dataclass(frozen=True, slots=True)
class Wish:
    """``nodes``: how many, which (names and ``@label``), or None for all.

    Without ``slots`` and ``on_each`` there is a slot for each free core.
    """

    nodes: int | tuple[str, ...] | None = None
    slots: int | None = None  # in all
    on_each: int | None = None


def choose(candidates: Sequence[Candidate], wish: Wish) -> list[tuple[str, int]]:
    """The nodes with most free cores first. A node whose cores are all taken has one slot, which waits in the queue."""
    if isinstance(wish.nodes, tuple):
        chosen = list(dict.fromkeys(one for word in wish.nodes for one in _named(word, candidates)))
    else:
        chosen = _best(candidates, wish.nodes)
    if wish.slots is not None:
        return _shared_out(chosen, wish.slots)
    return [(one.node, wish.on_each or max(1, one.free_cores)) for one in chosen]


def _shared_out(nodes: Sequence[Candidate], slots: int) -> list[tuple[str, int]]:
    """Each slot goes where most cores are left for it; a node that gets none is left out."""
    if slots < 1:
        raise UsageError(f"a pool needs at least one worker, not {slots}")
    counts = dict.fromkeys((one.node for one in nodes), 0)
    for _ in range(slots):
        best = min(nodes, key=lambda one: (counts[one.node] + 1) / max(1, one.free_cores))
        counts[best.node] += 1
    return [(node, count) for node, count in counts.items() if count]


def _named(word: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    if word.startswith("@"):
        found = [one for one in candidates if word[1:] in one.labels]
        if not found:
            raise NotFound(f"no node has the label {word}", hint="see: ugro node ls")
        return _best(found, None)
    named = next((one for one in candidates if one.node == word), None)
    if named is None:
        raise NotFound(f"no node {word!r} in this cluster", hint="see: ugro node ls")
    if named.problem is not None:
        raise Unsatisfiable(named.problem, subject=word, hint=f"see: ugro health {word}")
    return [named]


def _best(candidates: Sequence[Candidate], count: int | None) -> list[Candidate]:
    usable = sorted((one for one in candidates if one.problem is None), key=lambda one: -one.free_cores)
    wanted = len(usable) if count is None else count
    if wanted < 1 and count is not None:
        raise UsageError(f"a pool needs at least one node, not {count}")
    if len(usable) < max(1, wanted):
        problems = "; ".join(f"{one.node}: {one.problem}" for one in candidates if one.problem is not None)
        text = f"{len(usable)} of {len(candidates)} nodes can be used, and {max(1, wanted)} are needed"
        raise Unsatisfiable(f"{text} ({problems})" if problems else text, hint="see: ugro health")
    return usable[:wanted]


# --- slices -----------------------------------------------------------------------------------------------------------
# How many items the next batch of a slot has.
#
# Slots are unequal and items are too. So the cost of an item is measured for each slot, a batch aims at the same time
# on all of them, and the last items are shared out by speed. A wrong guess is repaired by the slot, which gives back
# what it could not do in time.


_FORGETTING = 0.5  # of what was measured before, at each answer
_GROWTH = 16  # from one batch to the next: a few quick items say little about the others
_LEAST_COST_S = 1e-7


@dataclass(slots=True)
class Cost:
    """Of an item, on one slot or on all: recent answers count more."""

    items: float = 0.0
    seconds: float = 0.0
    largest: int = 0  # items of one answer

    def note(self, items: int, seconds: float) -> None:
        if items > 0:
            self.items = self.items * _FORGETTING + items
            self.seconds = self.seconds * _FORGETTING + seconds
            self.largest = max(self.largest, items)

    @property
    def per_item_s(self) -> float | None:
        return max(self.seconds / self.items, _LEAST_COST_S) if self.items else None


@dataclass(slots=True)
class Sizes:
    """Bytes of an item or of a result, the average of all that were seen."""

    items: int = 0
    bytes: int = 0

    def note(self, items: int, size: int) -> None:
        self.items += items
        self.bytes += size

    def most(self, limit_bytes: int) -> int | None:
        """Items that fit; None: not known."""
        return max(1, limit_bytes * self.items // self.bytes) if self.bytes else None


@dataclass(frozen=True, slots=True)
class SlotView:
    """What is known when the next batch of a slot is cut."""

    cost: Cost
    share: float  # of the speed of all slots
    remaining: int | None  # items that nobody has yet; None: an input that does not say its length
    arguments: Sizes
    results: Sizes


def slice_size(view: SlotView, aims: Aims) -> int:
    cost_s = view.cost.per_item_s
    if cost_s is None:
        size = float(aims.probe_items)
        if view.remaining is not None:  # every slot gets a part of few items
            size = min(size, view.remaining * view.share)
    else:
        size = min(aims.batch_s / cost_s, float(max(aims.probe_items, _GROWTH * view.cost.largest)))
        if view.remaining is not None:
            size = min(size, max(view.remaining * view.share / 2, aims.least_s / cost_s))
    for known in (view.arguments.most(aims.most_bytes), view.results.most(aims.most_bytes)):
        size = size if known is None else min(size, known)
    return max(1, int(size))


def takes_another(waiting_s: float | None, in_flight: int, aims: Aims) -> bool:
    """Whether a slot gets one more batch.

    ``waiting_s``: the work that it already has, None if its cost is not known. While the first is measured or long,
    a second one would only wait where others could begin with it.
    """
    if in_flight == 0:
        return True
    return in_flight < aims.in_flight and waiting_s is not None and waiting_s <= 1.5 * aims.batch_s


def share_of(slot: int, costs: Mapping[int, Cost], overall: Cost, starting: int) -> float:
    """The speed of a slot as a part of all; one that was not measured or is ``starting`` counts as an average one."""
    average_s = overall.per_item_s or 1.0
    speeds = {number: 1.0 / (cost.per_item_s or average_s) for number, cost in costs.items()}
    return speeds[slot] / (sum(speeds.values()) + starting / average_s)

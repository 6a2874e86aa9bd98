"""Who has which items: every item ends in exactly one outcome, whatever is given back, fails or dies.

Pure: it takes items from the input that it was given, and otherwise only keeps books. An item may be *run* more than
once (its process died before it could answer), but it has one result or one failure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

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

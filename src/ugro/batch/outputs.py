"""Results on their way to the reader: in the order of the items, or as they come.

Answers stay encoded until they are read, so what waits here has a known size, and objects exist only while
they are used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ugro.batch.engine import Parts
from ugro.batch.errors import ItemFailed, ResultsUnreadable
from ugro.batch.frames import attempt, loaded

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

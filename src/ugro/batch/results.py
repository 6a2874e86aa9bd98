"""What a map returns: an iterator over its results, which does the work while it is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

from ugro.batch.dispatch import Dispatcher
from ugro.batch.errors import ItemFailed
from ugro.batch.outputs import Chunk
from ugro.batch.run import Progress, Run
from ugro.core.errors import TimedOut, UgroError

R = TypeVar("R")


class Results(Generic[R]):
    """Iterate over it. An item that failed raises ``ItemFailed`` in its place, and ``next`` goes on with the others.

    ``close`` cancels what was not read.
    """

    def __init__(self, dispatcher: Dispatcher, run: Run, *, raises: bool, on_end: Callable[[], None]) -> None:
        self._dispatcher = dispatcher
        self._run = run
        self._raises = raises
        self._on_end = on_end
        self._values = _values(dispatcher, run, _nothing)  # knows nothing of us: who drops us, cancels

    def __iter__(self) -> Results[R]:
        return self

    def __next__(self) -> R:
        has_ended, is_hurried = True, False
        try:
            value: Any = next(self._values)
            has_ended = False
        except KeyboardInterrupt:
            is_hurried = True
            raise
        finally:
            if has_ended:
                self._cancel(is_hurried=is_hurried)
        if value.__class__ is ItemFailed and self._raises:
            raise value
        result: R = value
        return result

    @property
    def progress(self) -> Progress:
        return self._run.progress

    def with_indices(self, on_wait: Callable[[], None] | None = None) -> Iterator[tuple[int, R | ItemFailed]]:
        """Each result with the number of its item, and failures in place of results.

        ``on_wait`` is called before the next result is waited for, which may take long.
        """
        self._values = _values(self._dispatcher, self._run, on_wait or _nothing, with_indices=True)
        return cast(Iterator[tuple[int, R | ItemFailed]], self)

    def close(self) -> None:
        self._cancel(is_hurried=False)

    def __del__(self) -> None:
        self.close()

    def _cancel(self, *, is_hurried: bool) -> None:
        self._dispatcher.drop(self._run, is_hurried=is_hurried)
        on_end, self._on_end = self._on_end, _nothing
        on_end()


def _values(
    dispatcher: Dispatcher, run: Run, on_wait: Callable[[], None], *, with_indices: bool = False
) -> Iterator[Any]:
    """Looks at the engine now and then: a slow reader must not leave the slots without work."""
    clock = time.perf_counter
    for chunk in _chunks(dispatcher, run, on_wait):
        for value in zip(chunk.indices, chunk.values, strict=True) if with_indices else chunk.values:
            yield value
            if clock() > dispatcher.next_poll:
                dispatcher.pump(is_waiting=False)


def _chunks(dispatcher: Dispatcher, run: Run, on_wait: Callable[[], None]) -> Iterator[Chunk]:
    while True:
        chunk = run.outputs.next_chunk()
        if chunk is not None:
            yield chunk
        elif run.error is not None:
            raise run.error
        elif run.is_finished or run.is_over:
            if run.input_errors:
                raise run.input_errors[0]
            return
        else:
            on_wait()
            dispatcher.pump(is_waiting=True)


class Task(Generic[R]):
    """One call that was submitted."""

    def __init__(self, dispatcher: Dispatcher, results: Results[R], run: Run) -> None:
        self._dispatcher, self._results, self._run = dispatcher, results, run
        self._outcome: tuple[R | None, BaseException | None] | None = None

    def done(self) -> bool:
        self._dispatcher.pump(is_waiting=False)
        return self._outcome is not None or self._run.is_finished or self._run.error is not None

    def result(self, timeout_s: float | None = None) -> R:
        """Waits for it. After the timeout it goes on, and may be asked again."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while deadline is not None and not self.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimedOut(f"no result within {timeout_s:g} s")
            self._dispatcher.pump(is_waiting=True, at_most_s=left_s)
        if self._outcome is None:
            try:
                self._outcome = (next(self._results), None)
            except UgroError as error:
                self._outcome = (None, error)
        value, failure = self._outcome
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]  # None only if that is the result


def _nothing() -> None:
    return

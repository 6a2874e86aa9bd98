"""``ugro.Pool``: map a function over many items. Nobody chooses a chunk size."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from ugro.features.batches.dispatch import Dispatcher
from ugro.features.batches.model import Engine, FunctionUnusable, ItemFailed, PoolClosed
from ugro.features.batches.rules import Aims
from ugro.features.batches.run import Chunk, Progress, Run, Settings
from ugro.features.batches.worker import Applied, Starred, attempt, dumped
from ugro.kernel.support.errors import TimedOut, UgroError, UsageError

# --- results ----------------------------------------------------------------------------------------------------------
# What a map returns: an iterator over its results, which does the work while it is read.


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


# --- pool -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MapOptions:
    """``shared``: large inputs, carried once and given to each call by keyword."""

    shared: Mapping[str, Any] | None = None
    retries: int = 1  # of an item that fails
    timeout_s: float | None = None  # of one item; its process is ended
    errors: str = "raise"  # or "return": an ItemFailed in place of the result


class Pool:
    """Processes that run batches of items: on this machine (``engine="local"``), or on a Ray cluster.

    Use it in a ``with`` statement, and from one thread. Work is done while results are read.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        engine: str | Engine | None = None,
        address: str | None = None,  # of a Ray cluster, or "auto" inside a Ray driver
        aims: Aims | None = None,
    ) -> None:
        if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int)):
            raise UsageError(f"workers: expected a whole number, got {workers!r}", hint='ugro.Pool(4, engine="local")')
        if workers is not None and workers < 1:
            raise UsageError(f"a pool needs at least one worker, not {workers}")
        self._aims = aims or Aims()
        self._dispatcher: Dispatcher | None = _begun(_engine(engine, address, workers))
        self._functions: dict[bytes, str] = {}  # published, by their pickle

    @property
    def engine(self) -> str:
        return self._open().engine.name

    def start(self) -> int:
        """Waits until all its processes are ready, which no other call needs; returns how many."""
        return self._open().started()

    def map(self, function: Callable[..., R], items: Iterable[Any], /, **options: Any) -> Results[R]:
        """The results in the order of the items. Options: ``shared``, ``retries``, ``timeout_s``, ``errors``."""
        return self._results(function, items, options, is_ordered=True)

    def imap_unordered(self, function: Callable[..., R], items: Iterable[Any], /, **options: Any) -> Results[R]:
        """The results as they come."""
        return self._results(function, items, options, is_ordered=False)

    def starmap(self, function: Callable[..., R], items: Iterable[Iterable[Any]], /, **options: Any) -> Results[R]:
        """Each item is a tuple of arguments."""
        return self._results(Starred(function), items, options, is_ordered=True)

    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> Task[R]:
        """One call. For many small ones, use ``map``."""
        options = MapOptions(retries=0)
        results, run = self._begun(Applied(function), [(args, kwargs)], options, is_ordered=True)
        return Task(self._open(), results, run)

    def close(self) -> None:
        """Ends all processes; what was not read is lost."""
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _results(
        self, function: Callable[..., R], items: Iterable[Any], options: dict[str, Any], *, is_ordered: bool
    ) -> Results[R]:
        return self._begun(function, items, _checked(options), is_ordered=is_ordered)[0]

    def _begun(
        self, function: Callable[..., R], items: Iterable[Any], options: MapOptions, *, is_ordered: bool
    ) -> tuple[Results[R], Run]:
        dispatcher = self._open()
        shared = {word: self._publish(dispatcher, value, word) for word, value in (options.shared or {}).items()}
        name = self._publish_function(dispatcher, function, shared)
        run = Run(items, name, Settings(is_ordered, options.retries, options.timeout_s), self._aims)
        old = [*shared.values(), *([name] if shared else [])]
        results: Results[R] = Results(
            dispatcher, run, raises=options.errors == "raise", on_end=lambda: _forget(dispatcher, old)
        )
        dispatcher.add(run)
        return results, run

    def _publish_function(self, dispatcher: Dispatcher, function: Any, shared: Mapping[str, str]) -> str:
        if not callable(function):
            raise UsageError(f"the function is a {type(function).__name__}, which cannot be called")
        error, parts = attempt(dumped, (function, dict(shared)), dispatcher.engine.dumps)
        if error is not None:
            name = getattr(function, "__qualname__", type(function).__name__)
            hint = "it, or a variable that it uses, holds a lock, a file or a connection: open that inside the function"
            raise FunctionUnusable(f"the function {name} cannot be pickled: {error}", hint=hint) from error
        if shared:
            return dispatcher.engine.publish(parts)
        key = b"".join(map(bytes, parts))
        if key not in self._functions:
            self._functions[key] = dispatcher.engine.publish(parts)
        return self._functions[key]

    @staticmethod
    def _publish(dispatcher: Dispatcher, value: Any, word: str) -> str:
        error, parts = attempt(dumped, value, dispatcher.engine.dumps)
        if error is not None:
            raise FunctionUnusable(f"the shared value {word!r} cannot be pickled: {error}") from error
        return dispatcher.engine.publish(parts)

    def _open(self) -> Dispatcher:
        if self._dispatcher is None:
            raise PoolClosed("the pool is closed", hint="create another one")
        return self._dispatcher


def _begun(engine: Engine) -> Dispatcher:
    with contextlib.ExitStack() as unless_begun:
        unless_begun.callback(engine.close)  # what was started is ended, also by Ctrl-C
        dispatcher = Dispatcher(engine)
        unless_begun.pop_all()
    return dispatcher


def _forget(dispatcher: Dispatcher, names: list[str]) -> None:
    for name in names:
        dispatcher.forget(name)


def _checked(options: dict[str, Any]) -> MapOptions:
    known = MapOptions.__slots__
    if unknown := [name for name in options if name not in known]:
        raise UsageError(f"there is no option {unknown[0]!r}", hint=f"there are: {', '.join(known)}")
    found = MapOptions(**options)
    if found.errors not in ("raise", "return"):
        raise UsageError(f"errors={found.errors!r}: expected 'raise' or 'return'")
    if found.retries < 0 or (found.timeout_s is not None and found.timeout_s <= 0):
        raise UsageError("retries must be 0 or more, and timeout_s more than 0")
    return found


def _engine(wanted: str | Engine | None, address: str | None, workers: int | None) -> Engine:
    if wanted is None:
        wanted = "ray" if address or os.environ.get("RAY_ADDRESS") else "local"
    if not isinstance(wanted, str):
        return wanted
    if wanted == "local":
        from ugro.features.batches.local import LocalEngine

        return LocalEngine(workers)
    if wanted == "ray":
        from ugro.features.batches.ray_engine import RayEngine

        return RayEngine(address, workers)
    raise UsageError(f"unknown engine {wanted!r}", hint="there are: local, ray; for nodes: client.pool(nodes=3)")

"""``ugro.Pool``: map a function over many items. Nobody chooses a chunk size."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from ugro.batch.dispatch import Dispatcher
from ugro.batch.engine import Engine
from ugro.batch.errors import FunctionUnusable, PoolClosed
from ugro.batch.frames import attempt, dumped
from ugro.batch.results import Results, Task
from ugro.batch.run import Run, Settings
from ugro.batch.worker import Applied, Starred
from ugro.core.errors import UsageError
from ugro.policy.batching.aims import Aims

R = TypeVar("R")


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
        from ugro.batch.local import LocalEngine

        return LocalEngine(workers)
    if wanted == "ray":
        from ugro.batch.ray_engine import RayEngine

        return RayEngine(address, workers)
    raise UsageError(f"unknown engine {wanted!r}", hint="there are: local, ray; for nodes: client.pool(nodes=3)")

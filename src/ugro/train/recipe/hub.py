"""Models and datasets by their hub ids: one process of each node downloads first, and a failure is one clear error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import TypeVar

from ugro.core.errors import NotFound, UgroError
from ugro.train.recipe.table import Named
from ugro.train.recipe.talk import say
from ugro.train.run import Run

T = TypeVar("T")

_ROUND_S = 5.0  # the longest that ranks wait for each other at once: a download may take longer than they would wait
_WAITS, _LOADS, _DONE, _FAILED = range(4)


def together(run: Run, load: Callable[[], T], what: str) -> T:
    """Loads on the first rank of every node, then on its other ranks, which find what was downloaded."""
    say(run, f"loading {what}")
    with contextlib.closing(ThreadPool(1)) as pool:
        return _loaded(run, pool, load, what)


def _loaded(run: Run, pool: ThreadPool, load: Callable[[], T], what: str) -> T:
    is_first = run.surroundings.local_rank == 0
    loading = pool.apply_async(load) if is_first else None
    rounds = 0
    while True:
        if loading is not None:
            loading.wait(_ROUND_S)
        states = run.gather(float(_state(loading)), float(is_first))
        if any(state == _FAILED for state, _ in states):
            _fail(run, loading)
        if loading is not None and all(state == _DONE for state, _ in states):
            return loading.get()
        if loading is None and all(state == _DONE for state, is_first_there in states if is_first_there):
            loading = pool.apply_async(load)
        rounds += 1
        if rounds % 6 == 0:
            say(run, f"still loading {what}")


def _state(loading: AsyncResult[T] | None) -> int:
    if loading is None:
        return _WAITS
    if not loading.ready():
        return _LOADS
    return _DONE if loading.successful() else _FAILED


def _fail(run: Run, loading: AsyncResult[T] | None) -> None:
    """Every rank says what went wrong on the first rank that failed; an unexpected error is raised as it is."""
    problem, hint = "", ""
    try:
        if loading is not None and loading.ready():
            loading.get()
    except UgroError as error:
        problem, hint = f"{run.surroundings.node}: {error}", error.hint or ""
    problems, hints = run.texts(problem), run.texts(hint)
    first = next((number for number, text in enumerate(problems) if text), None)
    if first is None:
        raise UgroError("another rank failed", hint="see its log")
    raise UgroError(problems[first], hint=hints[first] or None)


@contextlib.contextmanager
def explained(what: str, named: Named) -> Iterator[None]:
    """Turns what the libraries raise about a model or dataset into one error that says what to do."""
    from safetensors import SafetensorError

    http_error = import_module("huggingface_hub.errors").HTTPError  # of whichever library the hub's uses

    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, http_error) as error:
        raise _explanation(what, named, error) from error


def _explanation(what: str, named: Named, error: BaseException) -> UgroError:
    text = _first_line(error)
    words = " ".join(f"{type(one).__name__} {one}" for one in _chain(error)).lower()
    if named.is_local:
        return UgroError(f"{what} {named.name!r} cannot be read from {named.place}: {text}")
    if _has(words, "gatedrepo", "gated repo", "401 client", "403 client"):
        hint = f"accept its terms on huggingface.co/{named.place}, and give the job a token: HF_TOKEN"
        return UgroError(f"{what} {named.name!r} is gated or private", hint=hint)
    if _has(words, "connect", "couldn't reach", "offline", "localentrynotfound", "couldn't find cache", "timed out"):
        reason = f"{what} {named.name!r} is not in the cache here and cannot be downloaded: {text}"
        return UgroError(reason, hint=_how_to_get(what, named))
    if _has(words, "repositorynotfound", "404 client", "not a valid model identifier", "doesn't exist on the hub"):
        return NotFound(f"no {what} {named.name!r} on the hub: {text}", hint="check the name")
    return UgroError(f"{what} {named.name!r} cannot be loaded: {text}")


def _has(words: str, *signs: str) -> bool:
    return any(sign in words for sign in signs)


def _how_to_get(what: str, named: Named) -> str:
    kind = " --repo-type dataset" if what == "dataset" else ""
    return f"where there is a network: hf download {named.place}{kind} --local-dir FOLDER; then use --{what} FOLDER"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__

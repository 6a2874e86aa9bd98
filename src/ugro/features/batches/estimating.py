"""``ugro estimate``: what a map would take, measured with a few of its items, before anything is run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ugro.features.batches.local import LocalEngine
from ugro.features.batches.mapping import Items, script_function, shared_files
from ugro.features.batches.model import Estimate, ItemFailed, Place, Sample
from ugro.features.batches.pool import Pool, Results
from ugro.features.batches.rules import estimate
from ugro.features.batches.worker import Timed, returned
from ugro.kernel.support.errors import UsageError

# --- measure ----------------------------------------------------------------------------------------------------------
# Times a sample of items, and what a pool costs, for an estimate. Bounded: seconds, whatever the items cost.


_SAMPLE_S = 3.0  # for the items of one place
_MOST_ITEMS = 5000
_EMPTY_ITEMS = 100_000  # that measure what a pool costs
_LEAST_ITEM_S = 2e-7
_LARGE_BYTES = 1 << 20
_LARGE_ITEMS = 32


def spread(items: Sequence[Any], most: int = _MOST_ITEMS) -> list[Any]:
    """Items from all over the input: costs often change from its beginning to its end. In an order without one."""
    if len(items) <= most:
        chosen = list(range(len(items)))
    else:
        chosen = [int(place * len(items) / most) for place in range(most)]
    step = max(1, round(len(chosen) * 0.618))  # a golden step visits all parts early
    while chosen and math.gcd(step, len(chosen)) != 1:
        step += 1
    return [items[chosen[place * step % len(chosen)]] for place in range(len(chosen))]


def here(workers: int | None = None) -> Pool:
    return Pool(engine=LocalEngine(workers, sys.stderr))


def sampled(
    function: Callable[..., Any], items: Sequence[Any], total: int, shared: Mapping[str, Any] | None = None
) -> Sample:
    """On one slot of this machine. What the function prints goes to stderr."""
    if not items:
        raise UsageError("the input has no items", hint="an estimate needs some to time")
    with here(1) as pool:
        list(pool.map(returned, [0]))
        found = _timed(pool, function, items, shared)
    item_bytes = sum(sys.getsizeof(item, 64) for item in items[: len(found)]) / len(found)
    costs, results = zip(*found, strict=True)
    return Sample(total, costs, item_bytes, sum(results) / len(results))


def place(
    name: str,
    open_pool: Callable[[], Pool],
    function: Callable[..., Any],
    items: Sequence[Any],
    alone: Sample,
    *,
    shared: Mapping[str, Any] | None = None,
) -> Place:
    """Starts a pool and measures its start, empty items, bytes per second, and the speed with all slots busy."""
    began = time.perf_counter()
    with open_pool() as pool:
        slots = pool.start()
        list(pool.map(returned, range(slots)))
        start_s = time.perf_counter() - began
        few_s = _seconds_of(pool.map(returned, range(_EMPTY_ITEMS // 10)))
        many_s = _seconds_of(pool.map(returned, range(_EMPTY_ITEMS)))
        empty_s = max(_LEAST_ITEM_S, (many_s - few_s) / (_EMPTY_ITEMS * 0.9))  # without what every map costs once
        large = [bytes(_LARGE_BYTES) for _ in range(_LARGE_ITEMS)]
        large_s = max(1e-3, _seconds_of(pool.map(returned, large)) - few_s)
        bytes_per_s = 2 * _LARGE_BYTES * _LARGE_ITEMS / large_s
        together = [cost for cost, _ in _timed(pool, function, items, shared)]
    same = alone.costs_s[: len(together)]
    speed = (sum(same) / len(same)) / (sum(together) / len(together)) if sum(together) > 0 else 1.0
    return Place(name, slots, min(1.0, speed), start_s, slots * empty_s, empty_s, bytes_per_s, is_here=True)


def _timed(
    pool: Pool, function: Callable[..., Any], items: Sequence[Any], shared: Mapping[str, Any] | None
) -> list[tuple[float, int]]:
    deadline = time.monotonic() + _SAMPLE_S
    found, failure = [], None
    results: Results[Any] = pool.map(Timed(function), items, shared=shared, retries=0, errors="return")
    for result in results:
        if isinstance(result, ItemFailed):
            failure = failure or result
        else:
            found.append(result)
        if time.monotonic() > deadline:
            break
    results.close()
    if not found and failure is not None:
        raise failure
    return found


def _seconds_of(results: Iterable[Any]) -> float:
    began = time.perf_counter()
    for _ in results:
        pass
    return time.perf_counter() - began


# --- estimating -------------------------------------------------------------------------------------------------------


_MOST_KEPT = 200_000  # lines from which the sample is taken, all over the file


def run_estimate(
    target: str,
    input_: str,
    shared: Mapping[str, str],
    *,
    cluster: Callable[[], Pool] | None = None,
    others: Sequence[Place] = (),
    on_progress: Callable[[str], None] = lambda text: None,
) -> Estimate:
    """``cluster`` opens a pool on a running cluster, which is measured. ``others``: places whose figures are known."""
    function, values = script_function(target), shared_files(shared)
    on_progress("reading the input")
    lines, total = _some_lines(Items(input_))
    chosen = spread(lines)
    on_progress("timing items on one core")
    alone = sampled(function, chosen, total, values)
    places = [Place("one core", 1)]
    on_progress("timing items on this machine")
    places.append(place("this machine", here, function, chosen, alone, shared=values))
    if cluster is not None:
        on_progress("timing items on the cluster")
        places.append(place("the cluster", cluster, function, chosen, alone, shared=values))
    return estimate(alone, [*places, *others])


def _some_lines(items: Items) -> tuple[list[str], int]:
    """Every line of a small input, every k-th of a large one; and how many there are."""
    kept: list[str] = []
    step = 1
    number = -1
    for number, line in enumerate(items):
        if number % step:
            continue
        kept.append(line)
        if len(kept) >= _MOST_KEPT:
            kept, step = kept[::2], 2 * step
    if not kept:
        raise UsageError("the input has no items", hint="an estimate needs some to time")
    return kept, number + 1

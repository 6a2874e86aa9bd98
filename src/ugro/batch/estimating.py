"""``ugro estimate``: what a map would take, measured with a few of its items, before anything is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ugro.batch.jsonl import Items
from ugro.batch.mapping import script_function, shared_files
from ugro.batch.measure import here, place, sampled, spread
from ugro.batch.pool import Pool
from ugro.core.errors import UsageError
from ugro.core.estimate import Estimate, Place
from ugro.policy.batching.estimate import estimate

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

"""Where the time goes between a value that ends a trial and the first value of the next one: medians of one sweep.

``python -m bench.sweep_timeline [SECONDS]``: steps that sleep on two slots of this machine. Times come from the lines
that the trials wrote themselves and from the event log, so an older version is measured in the same way.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.sweep import Steps, run_sweep
from ugro.kernel.agent.model import Event
from ugro.kernel.support.moments import unix_seconds

_BAND = re.compile(r" at step (\d+):")
_STAGES = (
    "the value is written → it is decided that the trial ends",
    "→ its end is recorded",
    "→ the stop is sent (stopping)",
    "→ its processes are dead, its log is here (cancelled)",
    "the next trial is submitted, after the decision",
    "cancelled → the next trial starts (starting)",
    "→ its first value, without the step itself",
    "in all: value written → first value of the next trial",
)


@dataclass(frozen=True, slots=True)
class Ended:
    """A trial that was pruned: when each of its events was."""

    job: int
    band: int
    at: Mapping[str, float]


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    ran = run_sweep(["--sleep"], "bayes", prunes=True, seconds=seconds)
    events, by_job = ran.events, {int(name.split("-")[0]): steps for name, steps in ran.trials.items()}
    pruned = list(_pruned(events))
    rows = [row for one in pruned if (row := _row(one, by_job, _firsts(events))) is not None]
    print(f"{len(by_job)} trials in {seconds:g} s, {len(pruned)} pruned, {len(rows)} followed by another")
    print(f"steps that a pruned trial made after its last rung: {_median(_wasted(pruned, by_job)):g} (median)")
    for name, values in zip(_STAGES, zip(*rows, strict=True), strict=True):
        print(f"{name:<64}{1000 * _median(values):>8.0f} ms{1000 * max(values):>8.0f} ms at most")


def _pruned(events: Sequence[Event]) -> Iterator[Ended]:
    for event in events:
        if event.kind == "pruned" and event.job is not None and (band := _BAND.search(event.text)):
            at = {one.kind: unix_seconds(one.at) for one in events if one.job == event.job}
            if "cancelled" in at and "stopping" in at:
                yield Ended(event.job, int(band[1]), at)


def _firsts(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for event in events:
        if event.job is not None:
            found.setdefault(event.job, {}).setdefault(event.kind, unix_seconds(event.at))
    return found


def _row(one: Ended, steps: Mapping[int, Steps], firsts: Mapping[int, Mapping[str, float]]) -> list[float] | None:
    written = next((line["at"] for line in steps.get(one.job, ()) if line["step"] == one.band), None)
    # The next that starts after it has gone: two slots change hands one after the other.
    later = [job for job, at in firsts.items() if at.get("starting", 0.0) >= one.at["cancelled"] and job in steps]
    if written is None or not later:
        return None
    new = min(later, key=lambda job: firsts[job]["starting"])
    first = steps[new][0]
    begun, at = first["at"] - first["took_s"], one.at
    return [
        at["pruned"] - written,
        at["asked"] - at["pruned"],
        at["stopping"] - at["asked"],
        at["cancelled"] - at["stopping"],
        firsts[new]["queued"] - at["pruned"],
        firsts[new]["starting"] - at["cancelled"],
        begun - firsts[new]["starting"],
        begun - written,
    ]


def _wasted(pruned: Sequence[Ended], steps: Mapping[int, Steps]) -> list[float]:
    return [steps[one.job][-1]["step"] - one.band for one in pruned if steps.get(one.job)]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


if __name__ == "__main__":
    main()

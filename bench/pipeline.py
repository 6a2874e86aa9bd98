"""A pipeline over unequal ranks on one machine: stages of equal numbers of layers, and stages by what was measured.

    python -m bench pipeline --steps 12

Each rank has a CPU quota of its own, as in the balance part; both ways take turns in one run. The prediction is the
planner's, from a second of timing at the first step.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.balance import SPEEDS, OtherLoad, run_ranks
from bench.bars import Bar
from ugro.lab import lab as cgroups

_STEPS = 12
_BAR = 1 / 1.7


def measure(steps: int, rounds: int) -> list[Bar]:
    hierarchy = cgroups.cpu_hierarchy()
    if hierarchy is None:
        print("no CPU control groups on this machine; nothing measured\n")
        return []
    with tempfile.TemporaryDirectory() as folder:
        others = OtherLoad()
        argv = ["bench.pipeline_rank", str(min(steps, _STEPS)), str(rounds)]
        result = run_ranks(argv, hierarchy, Path(folder), {})
        _print(result, others.cores())
    measured, equal = _step_s(result, "adaptive"), _step_s(result, "off")
    return [Bar("pipeline: layers as measured", measured, equal, "equal numbers of layers", _BAR)]


def _step_s(result: dict[str, Any], mode: str) -> float:
    found: list[float] = [one["step_s"] for one in result[mode]]
    return statistics.median(found)


def _print(result: dict[str, Any], others: float) -> None:
    print(
        f"\nGPT of {result['layers']} layers, global batch {result['global_batch']} in {result['micro_batches']} "
        f"micro-batches, 1F1B, speeds {SPEEDS}; others used {others:.1f} cores"
    )
    print(
        f"{'':<28}{'samples/s':>10}{'step, ms':>10}{'predicted':>11}  layers (with what is before and after), by rank"
    )
    for title, mode in (("equal numbers of layers", "off"), ("as measured", "adaptive")):
        for one in result[mode]:
            rate = result["global_batch"] / one["step_s"]
            times = f"{1000 * one['step_s']:>10.0f}{1000 * one['predicted_s']:>11.0f}"
            print(f"{title:<28}{rate:>10.1f}{times}  {one['layers']}")
    print(f"faster by: {', '.join(f'{one:.2f}' for one in _gains(result))}\n", flush=True)


def _gains(result: dict[str, Any]) -> list[float]:
    """Of each round."""
    return [
        equal["step_s"] / measured["step_s"] for equal, measured in zip(result["off"], result["adaptive"], strict=True)
    ]

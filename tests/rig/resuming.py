"""Whole trainings that end in the middle of an epoch and resume: the same questions, however a model is spread.

The script is ``tests.rig.epochs``. It notes in a file which samples a rank has used.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.rig import ranks
from tests.rig.waiting import wait_until

SAMPLES, EPOCHS = 163, 2
LIMIT_S = 150


def resumed_elsewhere(script: Sequence[str], folder: Path, before: int, after: int) -> list[list[float]]:
    """The weights of ``after`` ranks that go on where ``before`` ranks left after five steps."""
    ended = ranks.start([*script, "--leave-after", "5"], folder / "first", before)
    assert ended.wait(LIMIT_S) == [0] * before, ended.logs()
    return resumed(script, folder / "again", after, resuming(folder / "first"))


def resumed(script: Sequence[str], folder: Path, count: int, variables: dict[str, str]) -> list[list[float]]:
    started = ranks.start(script, folder, count, variables)
    started.wait(LIMIT_S)
    return [flat(result["weights"]) for result in started.results()]


def tell_to_end(started: ranks.Ranks, whom: Sequence[int], noted_by: Sequence[int] = (0, 1)) -> None:
    """After the first steps, which these ranks have noted; all agree on a step, save and leave, whoever was told."""
    try:
        first = [started.folder / f"result_{rank}.seen" for rank in noted_by]
        wait_until(lambda: all(path.exists() for path in first), LIMIT_S, "the first steps")
        for rank in whom:
            started.processes[rank].send_signal(signal.SIGTERM)
        expected = [128 + signal.SIGTERM] * len(started.processes)
        assert started.wait(LIMIT_S) == expected, started.logs()
    finally:
        started.end()


def resuming(folder: Path) -> dict[str, str]:
    return {"UGRO_RESUME_DIR": str(folder / "output" / "checkpoints")}


def seen(folder: Path) -> Counter[str]:
    """What ranks have used, there and below."""
    return Counter(line for path in folder.rglob("*.seen") for line in path.read_text().splitlines())


def everything_once() -> Counter[str]:
    return Counter(f"{epoch} {index}" for epoch in range(EPOCHS) for index in range(SAMPLES))


def flat(weights: Any) -> list[float]:
    return [number for part in weights for number in flat(part)] if isinstance(weights, list) else [float(weights)]

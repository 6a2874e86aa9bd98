"""A training of 27 steps for ``bench.sweep``: steps that sleep and a loss that is known, or a small network.

Each step is a line in a file of its own, with its time; the loss also goes where the search looks for it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

STEPS = 27
_STEP_S = 0.2


def sleeping(lr: float, width: int) -> Iterator[float]:
    floor = (math.log10(lr) + 2.5) ** 2 / 4 + ((width - 40) / 20) ** 2 / 4
    for step in range(1, STEPS + 1):
        time.sleep(_STEP_S)
        yield floor + 0.01 + 2 * step**-0.8


def training(lr: float, width: int) -> Iterator[float]:
    """Two spirals; the loss on points that it does not learn from."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    angle = 3 * math.pi * torch.rand(2000).sqrt()
    label = torch.arange(2000) % 2
    turn = angle + math.pi * label
    points = torch.stack([angle * turn.cos(), angle * turn.sin()], 1) / 10 + 0.02 * torch.randn(2000, 2)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    net = torch.nn.Sequential(linear(2, width), tanh(), linear(width, width), tanh(), linear(width, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    for _ in range(STEPS):
        for start in range(0, 1600, 50):
            optimizer.zero_grad()
            part = slice(start, start + 50)
            torch.nn.functional.cross_entropy(net(points[part]), label[part]).backward()
            optimizer.step()
        with torch.no_grad():
            yield float(torch.nn.functional.cross_entropy(net(points[1600:]), label[1600:]))


def run(kind: str, logs: Path, settings: tuple[float, int], report: Callable[[int, float], None]) -> None:
    """``report`` may end it by an exception."""
    steps = (sleeping if kind == "sleep" else training)(*settings)
    last = time.time()
    name = f"{os.environ.get('UGRO_JOB', '0')}-{uuid.uuid4().hex}"
    with (logs / name).open("w", buffering=1) as file:
        for number, loss in enumerate(steps, start=1):
            now = time.time()
            file.write(json.dumps({"step": number, "loss": loss, "at": now, "took_s": now - last}) + "\n")
            report(number, loss)
            last = time.time()


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser()
    words.add_argument("--sleep", dest="kind", action="store_const", const="sleep")
    words.add_argument("--train", dest="kind", action="store_const", const="train")
    words.add_argument("--logs", type=Path, required=True)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--lr", type=float, default=0.01)
    words.add_argument("--width", type=int, default=16)
    return words


def main() -> None:
    given = parser().parse_args()
    with open(os.environ["UGRO_OUTPUT"] + "/metrics.jsonl", "a", buffering=1) as file:
        run(
            given.kind,
            given.logs,
            (given.lr, given.width),
            lambda step, loss: print(json.dumps({"step": step, "loss": loss}), file=file),
        )


if __name__ == "__main__":
    main()

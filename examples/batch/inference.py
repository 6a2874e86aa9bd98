"""Batch inference with a model that each process loads once, on its first item.

    python examples/batch/inference.py --items 2000
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from typing import Any

import ugro


class Classifier:
    """Travels to each process without its model, and stays there: the attribute is set once."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._model: Any = None

    def __call__(self, number: int) -> tuple[int, int]:
        import torch

        if self._model is None:
            self._model = self._loaded()
        with torch.inference_mode():
            features = torch.sin(torch.arange(16) * (number + 1.0))
            return int(self._model(features).argmax()), os.getpid()

    def _loaded(self) -> Any:
        """A stand-in for ``torch.load``; says when it happens."""
        import torch

        print(f"model loaded by process {os.getpid()}", flush=True)
        torch.manual_seed(self.seed)
        return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--engine", default="local", choices=["local", "ray"])
    arguments = parser.parse_args()
    with ugro.Pool(engine=arguments.engine) as pool:
        found = list(pool.map(Classifier(seed=0), range(arguments.items)))
    classes = Counter(label for label, _ in found)
    processes = len({process for _, process in found})
    print(f"{len(found)} items by {processes} processes: {dict(sorted(classes.items()))}")


if __name__ == "__main__":
    main()

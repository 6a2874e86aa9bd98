"""Hyperparameter tuning with Ray Tune on a Ray cluster. Needs: pip install 'ray[tune]' (it adds pandas and pyarrow).

    ugro cluster start --nodes 3                  # or: ray start --head; without a cluster, Ray starts on this machine
    python examples/batch/tune.py --samples 20
"""

from __future__ import annotations

import argparse
import os
from typing import Any


def train(config: dict[str, Any]) -> dict[str, float]:
    """Fits y = 3 x + 1 by gradient descent; a rate that is too high diverges, one that is too low does not arrive."""
    slope = offset = 0.0
    points = [(x / 10, 3 * x / 10 + 1) for x in range(-10, 11)]
    for _ in range(int(config["steps"])):
        errors = [(slope * x + offset - y, x) for x, y in points]
        slope -= config["rate"] * sum(error * x for error, x in errors) / len(points)
        offset -= config["rate"] * sum(error for error, _ in errors) / len(points)
    return {"loss": sum((slope * x + offset - y) ** 2 for x, y in points) / len(points)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8)
    arguments = parser.parse_args()
    import ray
    from ray import tune

    ray.init(address=os.environ.get("RAY_ADDRESS"), include_dashboard=None, logging_level="error")
    space = {"rate": tune.loguniform(1e-3, 1.0), "steps": tune.choice([20, 50, 100])}
    settings = tune.TuneConfig(metric="loss", mode="min", num_samples=arguments.samples)
    best = tune.Tuner(train, param_space=space, tune_config=settings).fit().get_best_result()
    metrics, config = best.metrics or {}, best.config or {}
    print(f"best: loss {metrics['loss']:.2g} with rate {config['rate']:.3g}, {config['steps']} steps")


if __name__ == "__main__":
    main()

"""The price of an option by Monte Carlo: an endless stream of seeds, until the error is small enough.

    python examples/batch/monte_carlo.py --error 0.05
"""

from __future__ import annotations

import argparse
import math
import random
from itertools import count

import ugro

PATHS = 200  # of one item; many items make a batch


def payoffs(seed: int) -> tuple[float, float]:
    """The sum of the payoffs of some paths, and of their squares: a call on 100 at 105, one year, 20 %, 3 %."""
    draw = random.Random(seed)
    total = squares = 0.0
    for _ in range(PATHS):
        price = 100 * math.exp(0.03 - 0.02 + 0.2 * draw.gauss(0, 1))
        payoff = math.exp(-0.03) * max(0.0, price - 105)
        total += payoff
        squares += payoff * payoff
    return total, squares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--error", type=float, default=0.05, help="of the price, at which it stops")
    parser.add_argument("--engine", default="local", choices=["local", "ray"])
    arguments = parser.parse_args()
    paths, total, squares = 0, 0.0, 0.0
    with ugro.Pool(engine=arguments.engine) as pool:
        for one, its_squares in pool.imap_unordered(payoffs, count()):
            paths, total, squares = paths + PATHS, total + one, squares + its_squares
            mean = total / paths
            error = math.sqrt(max(0.0, squares / paths - mean * mean) / paths)
            if paths > 10 * PATHS and error < arguments.error:
                break  # what runs for the others is cancelled
    print(f"price {mean:.3f} ± {error:.3f} from {paths:,} paths")


if __name__ == "__main__":
    main()

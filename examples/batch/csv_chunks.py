"""Sums a large CSV file by chunks: each item is a range of bytes, which its process reads itself.

    python examples/batch/csv_chunks.py                      # 20 MB, made on the spot
    python examples/batch/csv_chunks.py --megabytes 1000     # a gigabyte
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ugro

CHUNK = 4 << 20
CITIES = ("Aachen", "Bremen", "Celle", "Dresden", "Erfurt")


def make(path: Path, megabytes: int, seed: int = 1) -> None:
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        file.write("city,amount\n")
        while file.tell() < megabytes * 10**6:
            rows = [f"{draw.choice(CITIES)},{draw.randrange(1000)}\n" for _ in range(10_000)]
            file.write("".join(rows))


def chunks(path: Path) -> Iterator[tuple[str, int, int]]:
    size = path.stat().st_size
    for start in range(0, size, CHUNK):
        yield str(path), start, min(size, start + CHUNK)


def total(path: str, start: int, stop: int) -> Counter[str]:
    """Of the lines that begin in this range; the last one may end after it."""
    with open(path, "rb") as file:
        file.seek(max(0, start - 1))
        file.readline()  # the header, or the rest of a line that began before
        text = file.read(max(0, stop - file.tell()))
        if text and not text.endswith(b"\n"):
            text += file.readline()
    found: Counter[str] = Counter()
    for city, amount in csv.reader(io.StringIO(text.decode())):
        found[city] += int(amount)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--engine", default="local", choices=["local", "ray"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ugro.Pool(engine=arguments.engine) as pool:
        path = Path(folder) / "sales.csv"
        make(path, arguments.megabytes)
        totals: Counter[str] = Counter()
        for part in pool.starmap(total, chunks(path)):
            totals.update(part)
        print(f"{os.path.getsize(path) / 1e6:.0f} MB")
        for city, amount in totals.most_common():
            print(f"{city}: {amount}")


if __name__ == "__main__":
    main()

"""The examples of docs/batch.md run as they are."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cloudpickle")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "batch"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.proof
def test_chunks_of_a_csv_file_have_each_line_once() -> None:
    lines = run("csv_chunks.py", "--megabytes", "9").splitlines()
    assert lines[0] == "9 MB"
    assert sorted(line.partition(":")[0] for line in lines[1:]) == ["Aachen", "Bremen", "Celle", "Dresden", "Erfurt"]


def test_the_totals_of_chunks_are_those_of_the_whole(tmp_path: Path) -> None:
    csv_chunks: Any = runpy.run_path(str(EXAMPLES / "csv_chunks.py"))
    path = tmp_path / "sales.csv"
    csv_chunks["make"](path, 1)
    whole = csv_chunks["total"](str(path), 0, path.stat().st_size)
    for size in (100, 1000, 99_999):
        parts: Counter[str] = Counter()
        for start in range(0, path.stat().st_size, size):
            parts.update(csv_chunks["total"](str(path), start, min(path.stat().st_size, start + size)))
        assert parts == whole


def test_a_monte_carlo_run_stops_when_it_is_sure_enough() -> None:
    text = run("monte_carlo.py", "--error", "0.1")
    assert text.startswith("price ")
    assert abs(float(text.split()[1]) - 7.13) < 0.6  # Black and Scholes


@pytest.mark.proof
def test_a_model_is_loaded_once_per_process() -> None:
    text = run("inference.py", "--items", "500")
    loaded = [line for line in text.splitlines() if line.startswith("model loaded")]
    assert len(loaded) == len(set(loaded)) <= 500
    assert f"500 items by {len(loaded)} processes" in text


@pytest.mark.proof
def test_tuning_finds_a_rate_that_converges() -> None:
    pytest.importorskip("ray.tune", reason="ray[tune] is not installed", exc_type=ImportError)
    assert "best: loss" in run("tune.py", "--samples", "4")

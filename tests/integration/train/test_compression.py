"""Real ranks whose gradients are compressed: they agree, they learn, and what is lost is measured."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.rig import ranks

METHODS = ("none", "fp16", "powersgd", "powersgd_memory", "auto")

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.proof,
    pytest.mark.skipif(find_spec("torch") is None, reason="not installed: torch"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("compressed")
    started = ranks.start(["-m", "tests.rig.compressed", *METHODS], folder, 2)
    return folder / "output", list(started.results())


def records(folder: Path, method: str) -> list[dict[str, Any]]:
    return ranks.metrics(folder / method / "metrics.jsonl", "compression")


@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_have_the_same_model_and_learn(trained: tuple[Path, list[dict[str, Any]]], method: str) -> None:
    _, results = trained
    assert results[0][method]["weights"] == results[1][method]["weights"]
    assert results[0][method]["last"] < 0.75 * results[0][method]["first"]


@pytest.mark.parametrize(("method", "limit"), [("fp16", 1e-2), ("powersgd", 2.0)])
def test_the_error_of_the_gradient_is_measured_and_recorded(
    trained: tuple[Path, list[dict[str, Any]]], method: str, limit: float
) -> None:
    found = records(trained[0], method)
    assert [record["method"] for record in found] == [method] * len(found)
    assert len(found) >= 2
    assert all(0 < record["error"] < limit for record in found)


def test_low_rank_learns_nearly_as_well_since_errors_are_made_up_for(
    trained: tuple[Path, list[dict[str, Any]]],
) -> None:
    _, results = trained
    assert results[0]["fp16"]["last"] == pytest.approx(results[0]["none"]["last"], rel=0.02)
    assert results[0]["powersgd"]["last"] == pytest.approx(results[0]["none"]["last"], rel=0.35)


def test_a_device_without_memory_does_not_spoil_it(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = trained
    assert results[1]["powersgd_memory"]["failures"] >= 1


def test_auto_says_what_it_measured(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    first = records(trained[0], "auto")[0]
    assert first["method"] in ("none", "fp16", "powersgd")
    assert "% of a step" in first["reason"]
    (model,) = ranks.metrics(trained[0] / "auto" / "metrics.jsonl", "model")
    assert model["comm_hook"] == "auto"

"""The training that the demo launches: it really learns, and all its ranks agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ugro.lab import train

_TINY = 1e-6


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    samples = train.two_moons()[:20]
    weights = train.beginning().weights
    *slopes, loss, _ = train.gradient(weights, samples)
    assert loss > 0
    for number in (0, 1, 2, 3, len(weights) - 1):
        moved = [weight + _TINY * (at == number) for at, weight in enumerate(weights)]
        assert slopes[number] == pytest.approx((train.gradient(moved, samples)[-2] - loss) / _TINY, abs=1e-3)


def test_the_parts_of_a_batch_add_up_to_the_whole() -> None:
    samples = train.two_moons()[:90]
    weights = train.beginning().weights
    parts = [train.gradient(weights, samples[rank::3]) for rank in range(3)]
    assert [sum(column) for column in zip(*parts, strict=True)] == pytest.approx(train.gradient(weights, samples))


def test_a_step_makes_the_loss_smaller() -> None:
    samples = train.two_moons()[: train.BATCH]
    state = train.beginning()
    *slopes, before, _ = train.gradient(state.weights, samples)
    train.step(state, slopes)
    assert train.gradient(state.weights, samples)[-2] < before


def test_a_checkpoint_holds_all_that_the_next_epoch_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UGRO_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("UGRO_RESUME_DIR", str(tmp_path))
    state = replace(train.beginning(), epoch=3, speeds=[0.1] * (4 * train.HIDDEN))
    train.save(state)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_3.json"]
    assert train.resumed() == state


def test_without_a_checkpoint_it_begins_at_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UGRO_RESUME_DIR", raising=False)
    assert train.resumed() is None

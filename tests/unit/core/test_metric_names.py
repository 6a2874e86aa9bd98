"""Which names are metrics of a training, which of them is the loss to show, and which files contain metrics."""

from __future__ import annotations

import pytest

from ugro.kernel.telemetry.model import is_internal, is_metric_file, main_loss


@pytest.mark.parametrize("name", ["profile/step_s", "profile/own_s/3", "plan/shares/0", "advice/best_s"])
def test_what_the_library_writes_for_itself_is_internal(name: str) -> None:
    assert is_internal(name)


@pytest.mark.parametrize("name", ["loss", "train/profile", "planner/loss", "profile", "val/advice/loss"])
def test_what_a_training_logs_is_not_internal(name: str) -> None:
    assert not is_internal(name)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["lr", "val/loss", "loss", "train/loss"], "loss"),
        (["val_loss", "train/loss", "train_loss"], "train/loss"),
        (["Loss/test", "Loss/train"], "Loss/train"),
        (["eval_loss", "nll_loss"], "nll_loss"),
        (["train/loss_epoch", "train/loss_step", "train/aux/loss_of_boxes"], "train/loss_step"),
        (["eval/loss", "accuracy"], "eval/loss"),
        (["profile/loss", "accuracy"], None),
        (["lossless", "floss"], "floss"),
        ([], None),
    ],
)
def test_one_loss_is_chosen_and_a_held_out_one_last(names: list[str], expected: str | None) -> None:
    assert main_loss(names) == expected
    assert main_loss(reversed(names)) == expected


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "out/metrics.rank_1.jsonl",
        "runs/exp1/events.out.tfevents.1700000000.host.17.0",
        "wandb/offline-run-20240101_000000-ab12/run-ab12.wandb",
    ],
)
def test_files_with_metrics_are_known_by_name(name: str) -> None:
    assert is_metric_file(name)


@pytest.mark.parametrize(
    "name",
    ["model.pt", "checkpoint-500/trainer_state.json", "wandb/debug.log", "events.txt", ""],
)
def test_other_files_are_not(name: str) -> None:
    assert not is_metric_file(name)

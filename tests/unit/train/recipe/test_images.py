"""Folders of images: which of them are for training, and which classes they have."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.features.recipes.trainings.image_classification.train import load_folder, parse_arguments
from ugro.train.recipe.command_line import Named

pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


def pictures(folder: Path, *places: str) -> Named:
    for place in places:
        (folder / place).mkdir(parents=True)
        (folder / place / "one.ppm").write_bytes(b"P6\n1 1\n255\nabc")
    return Named("mine", str(folder), True, {})


def test_a_folder_that_is_no_split_does_not_take_the_place_of_the_training_images(tmp_path: Path) -> None:
    named = pictures(tmp_path, "train/cat", "train/dog", "test/cat", "test/dog", "zebra/old")
    found = load_folder(named, parse_arguments(["--tiny"]))
    assert (found.labels.names, len(found.train), len(found.evaluation)) == (["cat", "dog"], 2, 2)


def test_without_splits_every_folder_is_a_class(tmp_path: Path) -> None:
    found = load_folder(pictures(tmp_path, "cat", "dog", "zebra"), parse_arguments(["--tiny"]))
    assert found.labels.names == ["cat", "dog", "zebra"]
    assert len(found.train) + len(found.evaluation) == 3

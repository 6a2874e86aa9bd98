"""Sharded checkpoints of one rank: complete or absent, and nothing in them is run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ugro.kernel.support.errors import UgroError
from ugro.train import checkpoint
from ugro.train.group import Group
from ugro.train.saving import Target
from ugro.train.surroundings import Surroundings

# torch says once that it found no NumPy; nothing here needs it.
pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


def trained(seed: int, steps: int = 2) -> tuple[Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for _ in range(steps):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved(folder: Path, step: int, model: Any, optimizer: Any, most_kept: int | None = 2) -> Path:
    from ugro.train.parallel import sharded as sharded_checkpoint
    from ugro.train.parallel.way import Way

    group = alone()
    objects, about = {"model": model, "optimizer": optimizer}, {"progress": {"step": step}}
    path = sharded_checkpoint.save(objects, about, Target(folder, step, most_kept), Way(model, group), group)
    assert path is not None
    return path


def alone() -> Group:
    import torch

    return Group(Surroundings.of({}), torch.device("cpu"))


def loaded(folder: Path, model: Any, optimizer: Any) -> None:
    from ugro.train.parallel import sharded as sharded_checkpoint

    sharded_checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint.read(folder), model, alone())


def test_what_was_saved_is_loaded_and_old_ones_go(tmp_path: Path) -> None:
    import torch

    model, optimizer = trained(1)
    for step in (1, 2, 3):
        saved(tmp_path, step, model, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000002", "step_000000003"]
    other, others_optimizer = trained(2, steps=0)
    loaded(tmp_path, other, others_optimizer)
    assert checkpoint.read(tmp_path)["progress"] == {"step": 3}
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], others_optimizer.state[two]["exp_avg"])
    assert others_optimizer.param_groups[0]["lr"] == 0.1


def test_one_that_is_not_finished_or_names_another_object_is_not_used(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    path = saved(tmp_path, 4, model, optimizer)
    path.with_name("step_000000009").mkdir()  # without its head
    assert checkpoint.read(tmp_path)["shards"] == path
    resumed = checkpoint.read(path)
    from ugro.train.parallel import sharded as sharded_checkpoint

    with pytest.raises(UgroError, match="has no 'average'"):
        sharded_checkpoint.load({"average": model}, resumed, model, alone())


class Trap:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["index.pt", "run.pt"])
def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, name: str) -> None:
    import torch

    model, optimizer = trained(1)
    path = saved(tmp_path / "checkpoints", 1, model, optimizer)
    torch.save(Trap(tmp_path / "sprung"), path / name)
    with pytest.raises(Exception, match="Weights only load failed"):
        loaded(path, model, optimizer)
    assert not (tmp_path / "sprung").exists()

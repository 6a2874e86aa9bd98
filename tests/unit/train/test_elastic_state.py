"""The state of a rank of an elastic training: what another one takes over, and what its supervisor is told."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from ugro.train import saving as state
from ugro.train.elastic_meeting import Formed

torch = pytest.importorskip("torch")


def test_a_rank_that_was_stopped_does_not_overwrite_what_others_of_its_node_have_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UGRO_RUN_DIR", str(tmp_path))
    for number, ranks in ((0, [0, 1, 2]), (2, [0, 1]), (1, [0, 1, 2])):
        state.note_members(Formed(number, ()), ranks)
    assert json.loads((tmp_path / "members.json").read_text()) == {"number": 2, "ranks": [0, 1]}


def trained(scale: float) -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(model(torch.ones(3, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return model, optimizer, scaler


@pytest.mark.parametrize("joins", [True, False])
def test_a_rank_takes_over_parameters_moments_and_the_scale_of_losses(joins: bool) -> None:
    model, optimizer, scaler = trained(1024.0)
    other, its_optimizer, its_scaler = trained(4.0)
    state.pack(file := io.BytesIO(), model, {"optimizer": optimizer}, scaler)
    found = state.unpack(file.getbuffer(), other, {"optimizer": its_optimizer}, is_all=joins)
    assert found is not None
    its_scaler.load_state_dict(found)
    assert its_scaler.get_scale() == scaler.get_scale() == 1024.0
    assert other.weight.tolist() == model.weight.tolist()
    moments = [one.state[parameter]["exp_avg"].tolist()
               for one, parameter in ((optimizer, model.weight), (its_optimizer, other.weight))]  # fmt: skip
    assert moments[0] == moments[1]


def test_only_an_optimizer_counts_as_one() -> None:
    model = torch.nn.Linear(2, 1)
    assert state.optimizers({"model": model}) == []
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    assert state.optimizers({"model": model, "mine": mine}) == [mine]

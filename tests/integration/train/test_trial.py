"""A trial in a real training: two batch sizes, then an end before the script does anything with its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rig import ranks
from ugro.features.planning.model import JointTrial, NodeTrial
from ugro.features.planning.rules_trials import About, joint_trial, node_trial
from ugro.kernel.telemetry.records import read

LIMIT_S = 150
SCRIPT = """
import warnings; warnings.simplefilter("ignore")
import atexit
from pathlib import Path
import torch, ugro.train as ut
torch.set_num_threads(1)
run = ut.init(seed=1)
model = run.wrap(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.keep(model=model, optimizer=optimizer)
atexit.register(lambda: Path(f"exit_{run.rank}").write_text("over"))
loader = run.loader(torch.utils.data.TensorDataset(torch.randn(100, 16), torch.zeros(100, 4)), global_batch=48)
try:
    for epoch in run.epochs(2):
        for x, y in loader:
            loss = run.step(lambda part: torch.nn.functional.mse_loss(model(part[0]), part[1]), (x, y))
            optimizer.step()
            optimizer.zero_grad()
            run.checkpoint()
        Path(f"epoch_{run.rank}").write_text("over")
finally:
    torch.save(model.state_dict(), f"model_{run.rank}.pt")
"""

pytestmark = [pytest.mark.timeout(400), pytest.mark.proof]


def tried(folder: Path, text: str, count: int, wish: str) -> ranks.Ranks:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    started = ranks.start(["train.py"], folder, count, {"UGRO_TRIAL": wish})
    assert started.wait(LIMIT_S) == [0] * count, started.logs()
    return started


def left_in(folder: Path) -> set[str]:
    ours = {"train.py", "output", *(path.name for path in folder.glob("rank_*.log"))}
    return {path.name for path in folder.iterdir()} - ours


def test_alone_it_takes_two_sizes_and_leaves_nothing_but_its_measurements(tmp_path: Path) -> None:
    tried(tmp_path, SCRIPT, 1, "solo:3:2")
    assert left_in(tmp_path) == set()
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["metrics.jsonl"]
    found = node_trial(read((tmp_path / "output" / "metrics.jsonl").read_bytes().splitlines()), About("a", "cpu"))
    assert isinstance(found, NodeTrial), found
    assert [point.samples for point in found.ranks[0].points] == [8, 48]
    assert all(point.steps >= 3 for point in found.ranks[0].points)
    assert (found.global_batch, found.parameters, found.gradient_bytes) == (48, 68, 272)
    assert found.can_accumulate


def test_a_script_that_asks_for_local_sgd_is_measured_with_exchanges_in_every_step_and_says_so(tmp_path: Path) -> None:
    tried(tmp_path, SCRIPT.replace("ut.init(seed=1)", 'ut.init(seed=1, sync="local")'), 1, "solo:3:2")
    found = node_trial(read((tmp_path / "output" / "metrics.jsonl").read_bytes().splitlines()), About("a", "cpu"))
    assert isinstance(found, NodeTrial), found
    assert found.is_of_local


def test_together_it_times_the_exchange_and_all_ranks_end(tmp_path: Path) -> None:
    tried(tmp_path, SCRIPT, 3, "joint:3:3")
    assert left_in(tmp_path) == set()
    found = joint_trial(read((tmp_path / "output" / "metrics.jsonl").read_bytes().splitlines()), About("a", "cpu"))
    assert isinstance(found, JointTrial), found
    assert found.nodes == ("node0", "node1", "node2")
    assert sum(found.shares) == 48
    assert {(pair.first, pair.second) for pair in found.pairs} == {
        ("node0", "node1"), ("node0", "node2"), ("node1", "node2")
    }  # fmt: skip
    assert all(pair.seconds > 0 for pair in found.pairs)
    assert found.whole_s > 0


def test_a_script_that_ends_before_its_trial_is_over_has_measured_as_far_as_it_came(tmp_path: Path) -> None:
    short = SCRIPT.replace("run.checkpoint()", "if run.progress.step == 9: break")
    tried(tmp_path, short, 2, "joint:2:60")
    found = joint_trial(read((tmp_path / "output" / "metrics.jsonl").read_bytes().splitlines()), About("a", "cpu"))
    assert isinstance(found, JointTrial), found
    assert found.whole_s > 0
    assert len(found.pairs) == 1


def test_a_script_without_our_loader_ends_after_a_step_and_says_why(tmp_path: Path) -> None:
    own = SCRIPT.replace("loader = run.loader(", "loader = torch.utils.data.DataLoader(").replace(
        "global_batch=48", "batch_size=48"
    )
    tried(tmp_path, own, 1, "solo:1:2")
    assert left_in(tmp_path) == set()
    [last] = ranks.metrics(tmp_path / "output" / "metrics.jsonl", "trial")
    assert "run.loader" in last["problem"]
    assert json.dumps(last)

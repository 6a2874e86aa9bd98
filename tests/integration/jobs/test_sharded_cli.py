"""A sharded training on two nodes with disks of their own: its checkpoint is complete wherever it resumes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands

SCRIPT = """\
import os, signal
from pathlib import Path
import torch, ugro.train as ut
from torch import nn
torch.set_num_threads(1)
run = ut.init(seed=1)
model = run.wrap(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), parallel="fsdp")
optimizer = torch.optim.AdamW(model.parameters())
run.keep(model=model, optimizer=optimizer)
loader = run.loader(torch.utils.data.TensorDataset(torch.randn(96, 8)), global_batch=8)
resume = os.environ.get("UGRO_RESUME_DIR")
found = len(list(Path(resume).glob("*.distcp"))) if resume else 0
print("rank", run.rank, "begins at step", run.progress.step, "with parts", run.gather(found), flush=True)
for epoch in run.epochs(2):
    for (x,) in loader:
        with run.step() as step:
            step.backward(step.loss(model(x).square().mean()))
            optimizer.step()
            optimizer.zero_grad()
        if run.surroundings.attempt == 1 and run.progress.step == 15 and run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    run.checkpoint()
"""


@pytest.fixture
def ugro(tmp_path: Path) -> Iterator[Ugro]:
    nodes = [
        f"  {name}: {{transport: [sh, -c, 'exec \"$@\"', sh], remote_root: {tmp_path}/{name},"
        f" python: {sys.executable}, env: {{PYTHONWARNINGS: ignore, OMP_NUM_THREADS: '1'}}}}\n"
        for name in ("n1", "n2")
    ]
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes:\n" + "".join(nodes))
    with commands(file) as ugro:
        (ugro.home / "cwd" / "train.py").write_text(SCRIPT)
        yield ugro


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_sharded_training_goes_on_from_its_checkpoint_when_a_rank_was_killed(ugro: Ugro) -> None:
    done = ugro("launch", "train.py", "--nodes", "2", "--retries", "1", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 begins at step 0 with parts [[0.0], [0.0]]" in done.stdout
    # Both nodes have the parts of both ranks: the second one has its own back, which it did not keep.
    assert "rank 0 begins at step 12 with parts [[2.0], [2.0]]" in done.stdout

"""Event files that Hugging Face and Lightning write by themselves, in balanced trainings, become curves of the job."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rig.stores import in_metric_store
from ugro.kernel.telemetry.collector import Collector
from ugro.kernel.telemetry.metricstore import MetricStore

LIMIT_S = 300
HAS_WRITER = find_spec("tensorboard") is not None or find_spec("tensorboardX") is not None
pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not HAS_WRITER, reason="tensorboardX is not installed"),
]

_HUGGING_FACE = """
import torch
from torch import nn
from transformers import TrainingArguments
from ugro.train.integrations.huggingface import UgroTrainer as Trainer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x, labels):
        found = self.layer(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}

samples = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(32)]
arguments = TrainingArguments("out", num_train_epochs=2, per_device_train_batch_size=4, logging_steps=1,
                              report_to="tensorboard", use_cpu=True, save_strategy="no", disable_tqdm=True)
Trainer(Net(), arguments, train_dataset=samples).train()
"""
_LIGHTNING = """
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from ugro.train.integrations.lightning import UgroCallback, UgroStrategy

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, number):
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

samples = torch.utils.data.TensorDataset(torch.randn(32, 4))
trainer = Trainer(strategy=UgroStrategy(), callbacks=[UgroCallback()], logger=TensorBoardLogger("boards"), max_epochs=2,
                  log_every_n_steps=1, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
                  enable_checkpointing=False)
trainer.fit(Net(), torch.utils.data.DataLoader(samples, batch_size=4))
"""


@pytest.mark.parametrize(("library", "script"), [("transformers", _HUGGING_FACE), ("lightning", _LIGHTNING)])
def test_what_a_balanced_training_writes_for_tensorboard_is_a_curve_of_the_job(
    tmp_path: Path, library: str, script: str
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    output = tmp_path / "jobs/7/attempt_1/output"
    output.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UGRO_")}
    environment |= {"UGRO_OUTPUT": str(output), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=output,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(output.rglob("events.out.tfevents.*"))

    async def work(store: MetricStore) -> None:
        await Collector(tmp_path / "jobs", store).finish(7)
        figures = (await store.figures([7]))[7]
        assert figures["train/loss"].count == 16, sorted(figures)
        assert figures["train/loss"].last_step in (15, 16)

    in_metric_store(tmp_path, work)

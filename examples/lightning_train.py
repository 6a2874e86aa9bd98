"""A small classifier with Lightning, balanced over unequal nodes.

    ugro launch examples/lightning_train.py --nodes 3
    python examples/lightning_train.py --tiny

The data are made up. Lines that end in `# ugro` differ from a script without UGRO.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from ugro.train.integrations.lightning import (
    UgroCallback,
    UgroLogger,
    UgroStrategy,
    checkpoint_to_resume,  # ugro
)

FEATURES, CLASSES = 32, 4


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, classes = batch
        loss = nn.functional.cross_entropy(self.network(inputs), classes)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, classes = batch
        accuracy = (self.network(inputs).argmax(1) == classes).float().mean()
        self.log("val/accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def samples(count: int, seed: int) -> torch.utils.data.TensorDataset:
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=made)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="per device")
    parser.add_argument("--tiny", action="store_true", help="a few seconds on a CPU")
    wanted = parser.parse_args()
    lightning.seed_everything(0)
    data = samples(2048 if wanted.tiny else 200_000, seed=1)
    loader = torch.utils.data.DataLoader(data, batch_size=wanted.batch_size, shuffle=True)
    for_evaluation = torch.utils.data.DataLoader(samples(512, seed=2), batch_size=wanted.batch_size)
    trainer = lightning.Trainer(
        max_epochs=wanted.epochs,
        strategy=UgroStrategy(),  # ugro
        callbacks=[UgroCallback(), ModelCheckpoint(every_n_epochs=1)],  # ugro
        logger=UgroLogger(),  # ugro
        log_every_n_steps=5,
        enable_progress_bar=False,
    )
    trainer.fit(
        Classifier(64 if wanted.tiny else 2048), loader, for_evaluation,
        ckpt_path=checkpoint_to_resume(),  # ugro
    )  # fmt: skip


if __name__ == "__main__":
    main()

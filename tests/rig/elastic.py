"""A rank's script: an elastic training whose ranks can be lost at a chosen step. It works alone, too.

    python -m tests.rig.elastic --epochs 2 --lose 2:5:KILL

``--lose RANK:STEP:SIGNAL``: that rank sends itself the signal in the forward pass of that step. A process that was
started again does not. The result: which samples this rank used in which step, and each step's loss.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ugro.train as ut

FEATURES, BATCH = 4, 20
SAMPLES = 8 * BATCH + 3


class Samples(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self) -> None:
        made = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=made)
        self.targets = self.inputs.sum(1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Any, Any]:
        return index, self.inputs[index], self.targets[index]


class Script:
    def __init__(self) -> None:
        self.arguments = parse()
        self.number = int(os.environ.get("RANK", "0"))
        once = os.environ.get("LOSE_ONCE")  # a file that says that it has happened
        self.is_first = not os.environ.get("AGAIN") and not (once and Path(once).exists())
        torch.set_num_threads(1)
        self.run = ut.init(seed=7)
        net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.model = self.run.wrap(net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        # A scale that grows: those who have taken other steps would have another one.
        self.scaler = torch.amp.GradScaler("cpu", 4.0, growth_interval=4, enabled=self.arguments.scaler)
        if not self.arguments.forgets:
            self.run.keep(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.loader = self.run.loader(Samples(), global_batch=BATCH, num_workers=self.arguments.workers)
        self.used: list[tuple[int, int, list[int]]] = []
        self.indices: list[int] = []

    def train(self) -> None:
        for epoch in self.run.epochs(self.arguments.epochs):
            for batch in self.loader:
                time.sleep(self.arguments.pause * len(batch[0]))
                step = self.run.progress.step
                if self.arguments.block:
                    is_done = self.block(batch)
                else:
                    self.run.step(self.loss, batch, scaler=self.scaler)
                    is_done = True
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                if is_done and not self.run._stepping.is_dummy:
                    self.note(epoch, step)
            if self.arguments.gathers:
                assert len(self.run.gather(1.0)) in (self.run.ranks, self.run.ranks + 1)
            self.scheduler.step()
            if self.arguments.checkpoints:
                self.run.checkpoint()

    def block(self, batch: Any) -> bool:
        with self.run.step() as step:
            step.backward(step.loss(self.loss(batch)), scaler=self.scaler)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return step.is_done

    def loss(self, part: Any) -> Any:
        indices, inputs, targets = part
        self.indices = indices.tolist()
        self.perhaps_be_lost()
        return nn.functional.mse_loss(self.model(inputs).squeeze(-1), targets)

    def perhaps_be_lost(self) -> None:
        for lost in self.arguments.lose:
            rank, step, name = lost.split(":")
            if self.is_first and (self.number, self.run.progress.step) == (int(rank), int(step)):
                self.is_first = False
                if once := os.environ.get("LOSE_ONCE"):
                    Path(once).touch()
                os.kill(os.getpid(), getattr(signal, f"SIG{name}"))

    def note(self, epoch: int, step: int) -> None:
        with result_file().with_suffix(".seen").open("a") as file:
            file.write(json.dumps([epoch, step, self.indices, time.time()]) + "\n")

    def result(self) -> dict[str, Any]:
        weights = [one.tolist() for one in self.model.parameters()]
        about = {"step": self.run.progress.step, "ranks": self.run.ranks, "lr": self.lr()}
        return {"weights": weights, "scale": self.scaler.get_scale(), **about}

    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds per sample")
    parser.add_argument("--block", action="store_true", help="with run.step(): …")
    parser.add_argument("--scaler", action="store_true", help="with a GradScaler")
    parser.add_argument("--forgets", action="store_true", help="does not say what is kept")
    parser.add_argument("--gathers", action="store_true")
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--lose", action="append", default=[])
    return parser.parse_args()


def result_file() -> Path:
    return Path(os.environ["RESULT"].replace("{rank}", os.environ.get("RANK", "0")))


def main() -> None:
    script = Script()
    script.train()
    result_file().write_text(json.dumps(script.result()))
    script.run.close()


if __name__ == "__main__":
    main()

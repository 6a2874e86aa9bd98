"""A rank's script: an elastic training whose ranks can be lost at a chosen step. It works alone, too.

    python -m tests.rig.elastic --epochs 2 --lose 2:5:KILL

``--lose RANK:STEP:SIGNAL``: that rank sends itself the signal in the forward pass of that step, with LATE it is killed
while its device exchanges gradients, with LOOK between the step and its optimizer, with ASK between a batch and its
step, with THAW before a layer thaws. With TOUCH and LATER it only loses touch with the others, before and after the
optimizer of a block. With FORWARD and BACKWARD its memory runs out there, and it goes on. A process that was started
again does not. The result: which samples this rank used in which step, and each step's loss.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ugro.train as ut
from tests.rig import late

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


class Large:
    """As a model that takes long to be packed and taken over."""

    def __init__(self, pack_s: float, load_s: float) -> None:
        self.pack_s, self.load_s = pack_s, load_s

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self.pack_s)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        time.sleep(self.load_s)


class Script:
    def __init__(self) -> None:
        self.arguments = parse()
        self.number = int(os.environ.get("RANK", "0"))
        if self.arguments.lingers == self.number:
            atexit.register(linger)  # after all that is registered later
        once = os.environ.get("LOSE_ONCE")  # a file that says that it has happened
        self.is_first = not os.environ.get("AGAIN") and not (once and Path(once).exists())
        torch.set_num_threads(1)
        self.device = self.late_device() if self.arguments.late else None
        self.run = ut.init(seed=7)
        net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.first = net[0].requires_grad_(self.arguments.thaws is None)
        self.model = self.run.wrap(net)
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=0.02)
        if self.device is not None:
            self.optimizer = late.LateSgd(self.model.parameters(), self.device, lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        # A scale that grows: those who have taken other steps would have another one.
        self.scaler = torch.amp.GradScaler("cpu", 4.0, growth_interval=4, enabled=self.arguments.scaler)
        if not self.arguments.forgets:
            self.run.keep(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        if self.arguments.large:
            self.run.keep(large=Large(*self.arguments.large))
        self.loader = self.run.loader(Samples(), global_batch=BATCH, num_workers=self.arguments.workers)
        self.used: list[tuple[int, int, list[int]]] = []
        self.indices: list[int] = []
        self.ran_out: set[tuple[int, int, str]] = set()

    def late_device(self) -> late.Device:
        """One whose exchanges are over later than the host believes, and on which a rank may be lost in one."""
        lost = [int(step) for rank, step, name in self.losses() if (rank, name) == (self.number, "LATE")]
        return late.begin(lost[0] if lost else None, lambda: self.run.progress.step if hasattr(self, "run") else 0)

    def losses(self) -> list[tuple[int, int, str]]:
        parts = [lost.split(":") for lost in self.arguments.lose]
        return [(int(rank), int(step), name) for rank, step, name in parts]

    def train(self) -> None:
        for epoch in self.run.epochs(self.arguments.epochs):
            for batch in self.loader:
                time.sleep(self.arguments.pause * len(batch[0]))
                step = self.run.progress.step
                if self.arguments.asks:
                    self.perhaps_be_lost("ASK")
                    self.run.gather(1.0)
                if self.arguments.block:
                    is_done = self.block(batch)
                else:
                    self.run.step(self.loss, batch, scaler=self.scaler)
                    is_done = True
                    if self.arguments.looks:
                        self.perhaps_be_lost("LOOK")
                        self.run.gather(1.0)
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    self.optimizer.zero_grad()
                if is_done and not self.run._stepping.is_dummy:
                    self.note(epoch, step)
                if step == self.arguments.thaws:
                    self.perhaps_be_lost("THAW")
                    self.first.requires_grad_(True)
            if self.arguments.gathers:
                assert len(self.run.gather(1.0)) in (self.run.ranks, self.run.ranks + 1)
            self.scheduler.step()
            if self.arguments.checkpoints:
                self.run.checkpoint()

    def block(self, batch: Any) -> bool:
        with self.run.step() as step:
            step.backward(step.loss(self.loss(batch)), scaler=self.scaler)
            self.perhaps_lose_touch("TOUCH")
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.perhaps_lose_touch("LATER")
        return step.is_done

    def loss(self, part: Any) -> Any:
        indices, inputs, targets = part
        self.indices = indices.tolist()
        self.perhaps_be_lost("KILL", "STOP", "TRAP")
        if self.device is not None:
            self.device.settle()
        outputs = self.model(inputs)
        self.perhaps_run_out(outputs)
        return nn.functional.mse_loss(outputs.squeeze(-1), targets)

    def perhaps_run_out(self, outputs: Any) -> None:
        """Of memory, once: in the forward pass, or in the backward pass before the first gradient."""

        def run_out(*_: Any) -> None:
            raise torch.OutOfMemoryError("a test")

        for place in [one for one in self.losses() if one[2] in ("FORWARD", "BACKWARD")]:
            if place[:2] == (self.number, self.run.progress.step) and place not in self.ran_out:
                self.ran_out.add(place)
                run_out() if place[2] == "FORWARD" else outputs.register_hook(run_out)

    def perhaps_be_lost(self, *names: str) -> None:
        step = self.run.progress.step - (names in (("LOOK",), ("THAW",)))  # it counts already
        for name in names:
            if self.is_first and (self.number, step, name) in self.losses():
                self.is_first = False
                if once := os.environ.get("LOSE_ONCE"):
                    Path(once).touch()
                os.kill(os.getpid(), getattr(signal, f"SIG{name}", signal.SIGKILL))

    def perhaps_lose_touch(self, name: str) -> None:
        if self.is_first and (self.number, self.run.progress.step, name) in self.losses():
            self.is_first = False
            raise RuntimeError("Connection closed by peer")

    def note(self, epoch: int, step: int) -> None:
        with result_file().with_suffix(".seen").open("a") as file:
            file.write(json.dumps([epoch, step, self.indices, time.time()]) + "\n")

    def result(self) -> dict[str, Any]:
        if self.device is not None:
            self.device.settle()
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
    parser.add_argument("--late", action="store_true", help="exchanges are over later than a wait for them")
    parser.add_argument("--looks", action="store_true", help="exchanges something between a step and the optimizer")
    parser.add_argument("--asks", action="store_true", help="exchanges something between a batch and its step")
    parser.add_argument("--large", type=float, nargs=2, help="seconds to pack the state, and to take it over")
    parser.add_argument("--thaws", type=int, help="the step after which the first layer is trained, too")
    parser.add_argument("--lingers", type=int, help="a rank whose process does not exit until it is killed")
    parser.add_argument("--lose", action="append", default=[])
    return parser.parse_args()


def linger() -> None:
    result_file().with_suffix(".lingers").touch()
    time.sleep(3600)


def result_file() -> Path:
    return Path(os.environ["RESULT"].replace("{rank}", os.environ.get("RANK", "0")))


def main() -> None:
    script = Script()
    script.train()
    result_file().write_text(json.dumps(script.result()))
    script.run.close()


if __name__ == "__main__":
    main()

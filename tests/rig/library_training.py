"""A rank's script: a training with Accelerate or Lightning, which can be ended and resumed. It works alone, too.

    python -m tests.rig.library_training accelerate --batch 4 --accumulate 2 …

The result: the weights at the end, and beside it which samples this rank used in which epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

FEATURES, SAMPLES = 4, 67
RANK = int(os.environ.get("RANK", "0"))


class Samples(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self) -> None:
        made = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=made)
        self.targets = self.inputs.sum(1).tanh()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Any, Any]:
        return index, self.inputs[index], self.targets[index]


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)).double()


class Notes:
    """What the training used, and how long it takes for that."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._path = Path(os.environ["RESULT"]).with_suffix(".seen")
        self._pause_s = arguments.pause

    def take(self, epoch: int, indices: list[int], *, counts: bool) -> None:
        time.sleep(self._pause_s * (RANK + 1) * len(indices))
        if counts:
            with self._path.open("a") as file:
                file.write("".join(f"{epoch} {index}\n" for index in indices))


def loss_of(model: Any, inputs: Any, targets: Any) -> Any:
    return nn.functional.mse_loss(model(inputs).squeeze(-1), targets)


def with_accelerate(arguments: argparse.Namespace) -> Any:
    if arguments.plain:
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=arguments.accumulate)
    else:
        from ugro.train.integrations.accelerate import UgroAccelerator

        accelerator = UgroAccelerator(gradient_accumulation_steps=arguments.accumulate, seed=7)
    data, notes = Samples(), Notes(arguments)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = torch.utils.data.DataLoader(
        data, batch_size=arguments.batch, shuffle=arguments.shuffle, num_workers=arguments.workers
    )
    for_evaluation = torch.utils.data.DataLoader(data, batch_size=5)
    model, optimizer, loader, for_evaluation = accelerator.prepare(model, optimizer, loader, for_evaluation)
    if not arguments.plain:
        accelerator.resume()
    step = 0
    for epoch in range(arguments.epochs) if arguments.plain else accelerator.epochs(arguments.epochs):
        model.train()
        for indices, inputs, targets in loader:
            with accelerator.accumulate(model):
                counts = arguments.plain or loader.turns.portion.own > 0
                notes.take(epoch, indices.tolist(), counts=counts)
                accelerator.backward(loss_of(model, inputs, targets))
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step == arguments.leave_after:
                accelerator.save_state()
                os._exit(0)
        evaluated = _evaluated(accelerator, model, for_evaluation)
    return {"weights": [one.tolist() for one in accelerator.unwrap_model(model).parameters()], "evaluated": evaluated}


def _evaluated(accelerator: Any, model: Any, loader: Any) -> float:
    """Over all samples, each once, as scripts do it."""
    model.eval()
    errors = []
    with torch.no_grad():
        for _, inputs, targets in loader:
            errors.append(accelerator.gather_for_metrics((model(inputs).squeeze(-1) - targets).square()))
    found = torch.cat(errors)
    assert len(found) == SAMPLES
    return float(found.mean())


def with_lightning(arguments: argparse.Namespace) -> Any:
    import lightning

    options, ckpt_path = ({}, None) if arguments.plain else _ugro_options(arguments)
    module = _module(arguments)
    data = Samples()
    loader = torch.utils.data.DataLoader(
        data, batch_size=arguments.batch, shuffle=arguments.shuffle, num_workers=arguments.workers
    )
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=arguments.epochs, accumulate_grad_batches=arguments.accumulate,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, enable_checkpointing=False,
        **{"logger": False, **options},
    )  # fmt: skip
    trainer.fit(module, loader, torch.utils.data.DataLoader(data, batch_size=5), ckpt_path=ckpt_path)
    return {"weights": [one.tolist() for one in module.network.parameters()], "steps": trainer.global_step}


def _ugro_options(arguments: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    import lightning

    from ugro.train.integrations.lightning import UgroCallback, UgroLogger, UgroStrategy, checkpoint_to_resume

    class LeavesEarly(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
            if trainer.fit_loop.total_batch_idx + 1 == arguments.leave_after:
                trainer.save_checkpoint("left.ckpt")
                os._exit(0)

    options = {
        "strategy": UgroStrategy(seed=7),
        "callbacks": [UgroCallback(), LeavesEarly()],
        "logger": UgroLogger(),
        # With its own sampler, Lightning shuffles all that is trained on.
        "use_distributed_sampler": arguments.shuffle,
    }
    return options, checkpoint_to_resume()


def _module(arguments: argparse.Namespace) -> Any:
    import lightning

    notes = Notes(arguments)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.automatic_optimization = not arguments.manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            indices, inputs, targets = batch
            portion = None if arguments.plain else self.trainer.strategy._turns.portion
            notes.take(self.current_epoch, indices.tolist(), counts=portion is None or portion.own > 0)
            loss = loss_of(self.network, inputs, targets)
            self.log("loss", loss)
            if arguments.manual:
                self.manual_backward(loss / 2)
                if (batch_idx + 1) % 2 == 0:
                    self.optimizers().step()
                    self.optimizers().zero_grad()
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            _, inputs, targets = batch
            self.log("val/loss", loss_of(self.network, inputs, targets), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.02)

    return Module()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    found = {"accelerate": with_accelerate, "lightning": with_lightning}[arguments.library](arguments)
    Path(os.environ["RESULT"]).write_text(json.dumps(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=("accelerate", "lightning"))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--leave-after", type=int, default=-1, help="batches")
    parser.add_argument("--manual", action="store_true", help="Lightning's manual optimization")
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--plain", action="store_true", help="the library alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()

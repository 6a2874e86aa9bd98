"""A rank's script: a whole training that can be ended and resumed. It works alone, too.

    python -m tests.rig.epochs --epochs 2 --workers 0 …

The result: which samples this rank used in which epoch, and the weights at the end.
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

import ugro.train as ut

FEATURES, BATCH = 4, 20
SAMPLES = 8 * BATCH + 3
SPLIT = {"0": "colwise", "2": "rowwise"}


class Samples(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self) -> None:
        made = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=made)
        self.targets = self.inputs.sum(1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Any, Any]:
        return index, self.inputs[index], self.targets[index]


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    run = ut.init(seed=7, resume=arguments.resume)
    options: dict[str, Any] = {"plan": SPLIT} if arguments.parallel == "tp+dp" else {}
    model = run.wrap(made(), parallel=arguments.parallel, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = run.loader(Samples(), global_batch=BATCH, num_workers=arguments.workers)
    is_pipeline = arguments.parallel == "pipeline"
    seen = Path(os.environ["RESULT"]).with_suffix(".seen")
    for epoch in run.epochs(arguments.epochs):
        for indices, inputs, targets in loader:
            time.sleep(arguments.pause * (run.rank + 1) * len(inputs))
            run.log(loss=stepped(run, model, optimizer, (inputs, targets), is_whole=is_pipeline))
            if not run._stepping.is_dummy and (run.is_main or not is_pipeline):  # there, all ranks have all samples
                with seen.open("a") as file:
                    file.write("".join(f"{epoch} {index}\n" for index in indices.tolist()))
            if run.progress.step == arguments.leave_after:
                run.checkpoint()
                run.close()
                os._exit(0)  # as abruptly as a crash, but for the metrics
        scheduler.step()
        run.checkpoint()
    if is_pipeline:
        model = saved(run)
    weights = [whole(parameter).tolist() for parameter in getattr(model, "module", model).parameters()]
    Path(os.environ["RESULT"]).write_text(json.dumps({"weights": weights, "rank": run.rank, "plan": run.plan}))


def stepped(run: ut.Run, model: Any, optimizer: Any, batch: tuple[Any, Any], *, is_whole: bool) -> Any:
    """A step as a block, or as a whole."""

    def loss_of(part: tuple[Any, Any]) -> Any:
        return nn.functional.mse_loss(model(part[0]).squeeze(-1), part[1])

    if is_whole:
        loss = run.step(loss_of, batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss
    with run.step() as step:
        loss = step.loss(loss_of(batch))
        step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def saved(run: ut.Run) -> nn.Module:
    """The model of the newest checkpoint: of a pipeline, no rank has all of it."""
    newest = max(run.surroundings.checkpoints.glob("step_*.pt"))
    model = made()
    model.load_state_dict(torch.load(newest, weights_only=True)["objects"]["model"])
    return model


def whole(one: Any) -> Any:
    return one.full_tensor() if hasattr(one, "full_tensor") else one


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.002)
    parser.add_argument("--leave-after", type=int, default=-1)
    parser.add_argument("--resume")
    parser.add_argument("--parallel", default="ddp")
    return parser.parse_args()


if __name__ == "__main__":
    main()

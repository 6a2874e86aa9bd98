"""A small distributed training for any number of ranks, on GPUs or CPUs, that resumes from its checkpoint.

    ugro launch examples/train_ddp.py --nodes 3 -- --epochs 5

It needs nothing of UGRO and also runs under torchrun. It uses the variables that every launcher sets (RANK, WORLD_SIZE,
…) and, if set, UGRO_CHECKPOINT_DIR and UGRO_RESUME_DIR.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, because its functions keep a reference to it
from torch.nn.parallel import DistributedDataParallel

SAMPLES, FEATURES, GLOBAL_BATCH = 1200, 16, 60


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(FEATURES, 1, dtype=torch.float64).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    inputs, targets = (part.to(device) for part in make_samples())
    first_epoch = resume(model, optimizer, device)
    for epoch in range(first_epoch, arguments.epochs):
        for step, batch in enumerate(batches(epoch, rank, ranks)):
            loss = torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} step {step} rank {rank} loss {loss.item():.6f}", flush=True)
            time.sleep(arguments.pause)
        save(epoch, model, optimizer, rank)
    report(model, inputs, targets, rank)
    # While anything refers to the group, Gloo's threads continue and may abort a process that is exiting.
    del model
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep after each step")
    return parser.parse_args()


def make_samples() -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every rank and in every attempt: a line with some noise."""
    made = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=made)
    weights = torch.randn(FEATURES, 1, dtype=torch.float64, generator=made)
    return inputs, inputs @ weights + 0.1 * torch.randn(SAMPLES, 1, dtype=torch.float64, generator=made)


def batches(epoch: int, rank: int, ranks: int) -> list[torch.Tensor]:
    """This rank's part of each global batch. The order depends on the epoch alone."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    return [order[at : at + GLOBAL_BATCH][rank::ranks] for at in range(0, SAMPLES, GLOBAL_BATCH)]


def save(epoch: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Written by one rank, under another name until it is complete."""
    folder = os.environ.get("UGRO_CHECKPOINT_DIR")
    if folder is None or rank != 0:
        return
    unfinished = Path(folder, f"epoch_{epoch}.pt.tmp")
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    unfinished.rename(unfinished.with_suffix(""))


def resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    folder = os.environ.get("UGRO_RESUME_DIR")
    if folder is None:
        return 0
    (file,) = Path(folder).iterdir()
    kept = torch.load(file, map_location=device, weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    print(f"resumed after epoch {kept['epoch']}", flush=True)
    return int(kept["epoch"]) + 1


def report(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, rank: int) -> None:
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
    if rank == 0:
        print(f"final loss {loss.item():.12f}", flush=True)


if __name__ == "__main__":
    main()

"""What a rank needs before its first step: device, clock, random generators, names of files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from ugro.policy.balance.split import granule_for_gpus
from ugro.train.clock import Clock, CpuClock, CudaClock
from ugro.train.sampler import Order, Progress
from ugro.train.surroundings import Surroundings
from ugro.train.trace import Tracer


def device(local_rank: int) -> Any:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def seed_generators(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)


def metrics_path(output: Path, rank: int) -> Path:
    """The file of this rank. One writer per file lets the agent follow it by its length."""
    return output / ("metrics.jsonl" if rank == 0 else f"metrics.rank_{rank}.jsonl")


def clock(device: Any) -> Clock:
    return CudaClock() if device.type == "cuda" else CpuClock()


def granule(device: Any, global_batch: int, ranks: int) -> int:
    """Returns the number of which shares are multiples, if the script does not say it."""
    return granule_for_gpus(global_batch, ranks) if device.type == "cuda" else 1


def tracer(surroundings: Surroundings, rank: int, device: Any) -> Tracer:
    is_cuda = device.type == "cuda"
    return Tracer(surroundings.run_folder, run_name(surroundings), surroundings.output, rank, is_cuda)


def run_name(surroundings: Surroundings) -> str:
    return f"{surroundings.job}.{surroundings.attempt}"


def about(surroundings: Surroundings, names: list[str], device: Any) -> dict[str, Any]:
    """The first record of a run."""
    return {
        "kind": "run",
        "job": surroundings.job,
        "nodes": names,
        "device": str(device),
        "mode": str(surroundings.mode),
        "sync": str(surroundings.sync.mode),
    }


def steps_ahead(progress: Progress, order: Order, epochs: int | None) -> dict[str, Any]:
    """The record of how many steps there will be."""
    record = {"kind": "progress", "step": progress.step, "steps_per_epoch": order.steps}
    if epochs is not None:
        steps_used = -(-progress.cursor // order.global_batch)  # of the epoch that was interrupted
        left = (epochs - progress.epoch) * order.steps - steps_used
        record |= {"epochs": epochs, "total_steps": progress.step + max(0, left)}
    return record

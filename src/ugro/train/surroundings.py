"""Reads the environment of a rank: its number, the other ranks, and its folders."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ugro.kernel.support.errors import UsageError
from ugro.train.rules.failures import OnNan, on_nan
from ugro.train.rules.shares import Mode, granule_for_gpus
from ugro.train.rules.sync import Sync, SyncMode, outer, sync_mode
from ugro.train.samples import Order, Progress
from ugro.train.telemetry import Clock, CpuClock, CudaClock, Tracer

# --- parameters -------------------------------------------------------------------------------------------------------
# The parameters of a sweep's trial, for scripts that have no command line of their own.


VARIABLE = "UGRO_PARAMS"


def params(**defaults: Any) -> dict[str, Any]:
    """What this trial is to use, over ``defaults``; outside a sweep, the defaults. Nested as in the sweep's file."""
    text = os.environ.get(VARIABLE)
    if not text:
        return dict(defaults)
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise UsageError(f"{VARIABLE} is not a JSON object: {text!r:.60}", hint="ugro sweep sets it; leave it alone")
    return {**defaults, **given}


# --- surroundings -----------------------------------------------------------------------------------------------------


RANK_TIMEOUT_S = 300.0
_OUTPUT = "ugro_output"


@dataclass(frozen=True, slots=True)
class Surroundings:
    rank: int
    ranks: int
    local_rank: int
    node: str
    attempt: int
    job: str | None
    output: Path
    checkpoints: Path
    resume: Path | None
    mode: Mode
    speeds: tuple[float, ...]
    run_folder: Path | None = None  # of this attempt on this node, where UGRO writes requests
    trial: str | None = None  # what to measure, if this is not the training itself
    sync: Sync = field(default_factory=Sync)
    nan: OnNan = OnNan.STOP
    is_trial_of_local: bool = False  # a trial exchanges in every step; the training itself would not
    min_ranks: int | None = None  # with as many the training goes on when others are lost; None: with all only
    rank_timeout_s: float = RANK_TIMEOUT_S  # a rank that keeps the others waiting for longer is lost
    meeting: tuple[str, int] | None = None  # where ranks meet that have lost others

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Surroundings:
        """Without a launcher there is one rank; without UGRO, output goes to a local folder."""
        output = Path(env.get("UGRO_OUTPUT") or _OUTPUT).absolute()
        resume = env.get("UGRO_RESUME_DIR")
        return cls(
            rank=_whole(env, "RANK", 0),
            ranks=_whole(env, "WORLD_SIZE", 1),
            local_rank=_whole(env, "LOCAL_RANK", 0),
            node=env.get("UGRO_NODE") or socket.gethostname(),
            attempt=_whole(env, "UGRO_ATTEMPT", _whole(env, "TORCHELASTIC_RESTART_COUNT", 0) + 1),
            job=env.get("UGRO_JOB"),
            output=output,
            checkpoints=Path(env.get("UGRO_CHECKPOINT_DIR") or output / "checkpoints"),
            resume=Path(resume) if resume else None,
            mode=mode(env.get("UGRO_BALANCE") or Mode.ADAPTIVE),
            speeds=_speeds(env.get("UGRO_SPEEDS", "")),
            run_folder=Path(env["UGRO_RUN_DIR"]) if env.get("UGRO_RUN_DIR") else None,
            trial=env.get("UGRO_TRIAL") or None,
            sync=_sync(env),
            nan=on_nan(env.get("UGRO_NAN") or OnNan.STOP),
            min_ranks=_whole(env, "UGRO_MIN_RANKS", 0) or None,
            rank_timeout_s=_seconds(env, "UGRO_RANK_TIMEOUT_S", RANK_TIMEOUT_S),
            meeting=(env["MASTER_ADDR"], _whole(env, "MASTER_PORT", 0)) if env.get("MASTER_ADDR") else None,
        )


def mode(name: str) -> Mode:
    try:
        return Mode(name)
    except ValueError:
        raise UsageError(f"unknown balance mode {name!r}", hint=f"one of {', '.join(Mode)}") from None


def _sync(env: Mapping[str, str]) -> Sync:
    default = Sync()
    return Sync(
        sync_mode(env.get("UGRO_SYNC") or SyncMode.STEP),
        _seconds(env, "UGRO_ROUND_S", default.round_s),
        _whole(env, "UGRO_MAX_STALENESS", default.max_staleness),
        outer(env.get("UGRO_OUTER") or default.outer),
    )


def _whole(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is not a whole number: {text!r}") from None


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    try:
        found = float(text) if text else default
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise UsageError(f"{name} is not a number of seconds above 0: {text!r}")
    return found


def _speeds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"UGRO_SPEEDS is not a list of numbers: {text!r}", hint="example: 1,0.5,0.25") from None


# --- start ------------------------------------------------------------------------------------------------------------
# What a rank needs before its first step: device, clock, random generators, names of files.


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

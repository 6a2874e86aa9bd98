"""Reads the environment of a rank: its number, the other ranks, and its folders."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ugro.core.errors import UsageError
from ugro.policy.balance.mode import Mode
from ugro.policy.local.sync import Sync, SyncMode, outer, sync_mode
from ugro.policy.training.nan import OnNan, on_nan

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

"""Reads the environment of a rank: its number, the other ranks, and its folders."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ugro.core.errors import UsageError
from ugro.policy.balance.mode import Mode

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
        )


def mode(name: str) -> Mode:
    try:
        return Mode(name)
    except ValueError:
        raise UsageError(f"unknown balance mode {name!r}", hint=f"one of {', '.join(Mode)}") from None


def _whole(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is not a whole number: {text!r}") from None


def _speeds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"UGRO_SPEEDS is not a list of numbers: {text!r}", hint="example: 1,0.5,0.25") from None

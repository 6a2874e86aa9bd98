"""Why an attempt failed: a cause and a sentence. ``policy.lifecycle.postmortem`` decides it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.core.errors import TimedOut


class Cause(StrEnum):
    """The causes that a job's ``retry.on`` and ``retry.never_on`` may name."""

    RANK_FAILED = "rank_failed"
    OOM = "oom"
    CUDA_OOM = "cuda_oom"
    NCCL_TIMEOUT = "nccl_timeout"
    PORT_IN_USE = "port_in_use"
    DISK_FULL = "disk_full"
    IMPORT_ERROR = "import_error"
    KILLED = "killed"
    NODE_LOST = "node_lost"
    NODE_REBOOTED = "node_rebooted"
    SUPERVISOR_LOST = "supervisor_lost"
    START_FAILED = "start_failed"
    GPU_UNAVAILABLE = "gpu_unavailable"
    SETUP_FAILED = "setup_failed"
    MISMATCH = "mismatch"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank's process ended, as its node recorded it: with a code or by a signal; neither if not known."""

    rank: int
    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    cause: Cause
    reason: str
    rank: int | None = None  # None: no single rank is to blame
    node: str | None = None
    exit_code: int | None = None  # 128 plus the signal's number if it was killed
    line: str | None = None  # the line of its log that explains it
    hint: str | None = None
    last_lines: tuple[str, ...] = ()  # of the culprit's log
    exits: tuple[RankExit, ...] = ()  # of all ranks whose end is known

    @property
    def exit_code_of_job(self) -> int:
        """That of the rank that failed; that of a timeout for a job that reached its time limit. Never 0."""
        return TimedOut.exit_code if self.cause is Cause.TIME_LIMIT else self.exit_code or 1

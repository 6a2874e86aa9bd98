"""Machines with an owner, and machines that sleep: a node's rules, where it stands, and what is remembered of it.

Asleep is not unreachable: such a node can be woken, and counts as one that is available later.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.kernel.support.moments import Instant
from ugro.kernel.support.quantities import format_duration

# --- owner ------------------------------------------------------------------------------------------------------------
# The owner of a machine comes first: when somebody uses it (``When``), and what jobs do then (``Then``).


class When(StrEnum):
    NEVER = "never"
    ACTIVE = "active"  # a person at its keyboard, its display or one of its terminals
    GPU_BUSY = "gpu_busy"  # a process on one of its GPUs that is none of UGRO's


class Then(StrEnum):
    PAUSE = "pause"  # jobs are ended with their checkpoints, and queued again
    SHRINK = "shrink"  # trainings on several nodes leave it a small part of each batch
    DRAIN = "drain"  # running jobs continue


@dataclass(frozen=True, slots=True)
class OwnerRule:
    """In every case, no new job starts on the node until it was quiet for ``quiet_s``."""

    when: When
    then: Then = Then.PAUSE
    quiet_s: float = 600.0


@dataclass(frozen=True, slots=True)
class OwnerReport:
    """What is known of a node's owner."""

    when: When
    then: Then
    quiet_s: float
    is_there: bool = False
    sign: str | None = None  # by which the owner was noticed last: "ann types on pts/3"
    idle_s: float | None = None  # since then
    is_known: bool = True  # False: the node has not said yet
    sources: tuple[str, ...] = ()  # what it looks at
    blind: tuple[str, ...] = ()  # what it cannot look at
    error: str | None = None  # why it cannot look at all

    @property
    def words(self) -> str | None:
        """Why it takes no new jobs, after the name of the node; None if it takes some."""
        if not self.is_known:
            return "has not said yet whether somebody uses it"
        if not self.is_there:
            return None
        return f"is used by its owner ({self.sign}): no new jobs until it was quiet for {format_duration(self.quiet_s)}"


# --- power ------------------------------------------------------------------------------------------------------------


class PowerState(StrEnum):
    AWAKE = "awake"
    GOING_TO_SLEEP = "going to sleep"
    ASLEEP = "asleep"
    WAKING = "waking"


class Act(StrEnum):
    SUSPEND = "suspend"
    RESUME = "resume"


SSH = "ssh"  # suspend by a command on the node
WOL = "wol"  # resume by a Wake-on-LAN packet
WEBHOOK = "webhook"
SYSTEMD_SUSPEND = ("systemctl", "suspend")
Means = str | tuple[str, ...]  # one of these words, or a command on this machine


@dataclass(frozen=True, slots=True)
class PowerRule:
    suspend_after_s: float | None = None  # None: never by itself
    suspend: Means = SSH
    resume: Means = WOL
    on_node: tuple[str, ...] = SYSTEMD_SUSPEND
    webhook: str | None = None
    secret_file: str | None = None
    mac: str | None = None  # None: learned while the node is awake
    suspend_timeout_s: float = 60.0
    resume_timeout_s: float = 300.0
    cool_down_s: float = 600.0
    most_per_hour: int = 6
    idle_load: float = 0.2  # of a core

    @property
    def stops_its_machine(self) -> bool:
        """Whether it surely stops the machine, and with it an agent that runs there. Of other commands nobody knows."""
        return self.suspend == SSH and self.on_node == SYSTEMD_SUSPEND


@dataclass(frozen=True, slots=True)
class PowerRecord:
    """Written before anything is done: after a crash the node itself shows what became of it."""

    state: PowerState
    since: Instant
    reason: str = ""
    jobs: tuple[int, ...] = ()  # for which it is woken
    problem: str = ""  # what went wrong the last time; empty: nothing
    failures: int = 0  # in a row
    acts: tuple[Instant, ...] = ()  # when it was last suspended or woken, at most an hour ago
    took_s: float | None = None  # from the last attempt to wake it until its link was open


@dataclass(frozen=True, slots=True)
class PowerReport:
    """A node's power as ``ugro node ls`` shows it."""

    state: PowerState
    for_s: float  # how long it has been so
    reason: str = ""
    problem: str | None = None
    again_in_s: float | None = None  # when it is tried again, if that is not at once
    mac: str = ""  # the address that a packet wakes it by; empty: not known

    @property
    def is_awake(self) -> bool:
        return self.state is PowerState.AWAKE

    @property
    def words(self) -> str:
        """For a note beside the state."""
        parts = [] if self.is_awake else [f"for {format_duration(self.for_s)}"]
        parts += [self.reason] if self.reason and not self.is_awake else []
        parts += [self.problem] if self.problem else []
        if self.again_in_s is not None:
            parts.append(f"tried again in {format_duration(self.again_in_s)}")
        return "; ".join(parts)

"""Why an attempt failed: the first rank that failed by itself, how it ended, and what its last lines say.

When one rank dies the others follow within moments: their connections break, their collectives time out, we stop
them. Those are not named. Whether the job is tried again is ``policy.recovery``'s to say.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ugro.core.failure import Cause, Failure
from ugro.core.login import node_of
from ugro.core.support.quantity import format_size
from ugro.core.support.signals import KNOWN, signal_name
from ugro.policy.lifecycle import log_signatures
from ugro.policy.lifecycle.log_signatures import LastWords
from ugro.policy.wording import in_words


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended, as its node recorded it."""

    rank: int
    node: str
    exit_code: int | None = None
    signal: int | None = None
    ended_unix_s: float = 0.0  # by the node's clock
    ended_monotonic_s: float | None = None  # exact, but comparable on one node only
    clock_offset_s: float = 0.0  # the node's clock minus ours
    last_lines: tuple[str, ...] = ()
    was_oom_killed: bool = False  # the kernel killed for memory on the node meanwhile
    reached_bytes: int | None = None  # the memory limit of the job, if a process was killed because of it
    was_stopped_by_us: bool = False
    was_disk_full: bool = False  # nothing more could be written on its node, not even to its log

    @property
    def has_failed(self) -> bool:
        return self.signal is not None or self.exit_code != 0

    @property
    def death_signal(self) -> int | None:
        """Including a shell that reports its child's signal as 128 plus its number."""
        if self.signal is None and self.exit_code is not None and self.exit_code - 128 in KNOWN:
            return self.exit_code - 128
        return self.signal


@dataclass(frozen=True, slots=True)
class Lost:
    """A node that lost its part of the attempt: NODE_LOST, NODE_REBOOTED or SUPERVISOR_LOST."""

    node: str
    cause: Cause
    may_have_left: bool = False  # nothing proves that all its processes have ended


def classify(rank_ends: Sequence[RankEnd], *, lost: Sequence[Lost] = (), stopped_for: Cause | None = None) -> Failure:
    """``stopped_for``: why UGRO stopped the attempt, if no rank had failed."""
    if stopped_for is not None:
        return Failure(stopped_for, _STOPPED.get(stopped_for, f"it was stopped ({stopped_for})"))
    is_alone = len(rank_ends) == 1
    suspects = [_Suspect.of(end, is_alone) for end in rank_ends if end.has_failed and not end.was_stopped_by_us]
    guilty = [suspect for suspect in suspects if not suspect.is_symptom]
    if lost and not any(suspect.cause is not Cause.RANK_FAILED for suspect in guilty):
        return _lost(lost)
    if guilty:
        return _named(_first(guilty))
    if suspects:
        return _nobody(suspects, rank_ends)
    raise ValueError("no rank failed, no node was lost and nobody stopped it")


@dataclass(frozen=True, slots=True)
class _Suspect:
    end: RankEnd
    cause: Cause
    words: LastWords
    is_symptom: bool

    @classmethod
    def of(cls, end: RankEnd, is_alone: bool) -> _Suspect:
        words = log_signatures.read(end.last_lines)
        # A killed process writes nothing about it: the last lines of its log are about something else.
        if end.death_signal == signal.SIGKILL:
            return cls(end, Cause.OOM if end.was_oom_killed else Cause.KILLED, LastWords(), is_symptom=False)
        # One of its processes was killed, such as a loader's; of that it knows no more than that it is gone.
        if end.reached_bytes is not None and (words.cause is None or words.is_symptom):
            return cls(end, Cause.OOM, LastWords(), is_symptom=False)
        # A single rank cannot have failed because of another.
        if words.cause is not None and not (words.is_symptom and is_alone):
            return cls(end, Cause(words.cause), words, words.is_symptom)
        # An exception that is in the log was written whole: there was room for it.
        if end.was_disk_full and words.line is None:
            return cls(end, Cause.DISK_FULL, LastWords(), is_symptom=False)
        is_told_to_stop = end.death_signal in (signal.SIGTERM, signal.SIGINT)
        cause = Cause.KILLED if is_told_to_stop else Cause.RANK_FAILED
        return cls(end, cause, words, is_told_to_stop and not is_alone)


def _first(suspects: Sequence[_Suspect]) -> _Suspect:
    """Within a node by its monotonic clock, between nodes by wall clocks corrected by their offsets."""
    firsts: dict[str, _Suspect] = {}
    for suspect in suspects:
        other = firsts.get(suspect.end.node)
        if other is None or _is_before(suspect.end, other.end):
            firsts[suspect.end.node] = suspect
    return min(firsts.values(), key=lambda suspect: (_our_time(suspect.end), suspect.end.rank))


def _is_before(one: RankEnd, other: RankEnd) -> bool:
    if one.ended_monotonic_s is not None and other.ended_monotonic_s is not None:
        return (one.ended_monotonic_s, one.rank) < (other.ended_monotonic_s, other.rank)
    return (one.ended_unix_s, one.rank) < (other.ended_unix_s, other.rank)


def _our_time(end: RankEnd) -> float:
    return end.ended_unix_s - end.clock_offset_s


def _named(suspect: _Suspect) -> Failure:
    end = suspect.end
    reason = f"rank {end.rank} on {node_of(end.node)} {_ending(end, suspect.cause)}"
    if suspect.words.line:
        reason += f": {suspect.words.line}"
    elif suspect.cause is Cause.DISK_FULL:
        reason += ": the disk of the node is full, and its log could not be written"
    hint = suspect.words.hint or _HINTS.get(suspect.cause)
    if suspect.cause is Cause.OOM and end.reached_bytes is not None:
        reason += f": the job reached its memory limit of {format_size(end.reached_bytes)}"
        hint = "ask for more with --memory, or use fewer loader workers or a smaller batch"
    if suspect.cause is Cause.DISK_FULL:
        hint = disk_hint(end.node)
    return Failure(
        suspect.cause, reason, end.rank, end.node, _exit_code(end), suspect.words.line, hint, end.last_lines
    )


def _nobody(suspects: Sequence[_Suspect], ends: Sequence[RankEnd]) -> Failure:
    """Every failed rank failed because of another one, which is not among them."""
    first = _first(suspects)
    # SIGTERM without a broken connection in the log: something outside UGRO stopped it.
    if all(suspect.cause is Cause.KILLED for suspect in suspects):
        return _named(first)
    reason = f"the ranks lost touch, rank {first.end.rank} on {node_of(first.end.node)} first: {first.words.line}"
    hint = "look at the network between the nodes: ugro doctor"
    left = [f"rank {end.rank} on {node_of(end.node)}" for end in ends if _had_left(end, first.end)]
    silent = _silent(suspects, ends)
    if left:
        reason += f"; {in_words(left)} had ended with 0 before, while the others still trained"
        hint = "a rank leaves its loop earlier than the others: all ranks must do the same number of steps"
    elif silent:
        reason += f"; {in_words(silent)} did not complain and may have hung"
        hint = "look at what the silent ones did last"
    return Failure(Cause.NCCL_TIMEOUT, reason, exit_code=_exit_code(first.end), line=first.words.line, hint=hint)


def _had_left(end: RankEnd, first: RankEnd) -> bool:
    if end.has_failed or end.was_stopped_by_us:
        return False
    return _is_before(end, first) if end.node == first.node else _our_time(end) < _our_time(first)


def _silent(suspects: Sequence[_Suspect], ends: Sequence[RankEnd]) -> list[str]:
    """For a timeout: the ranks that did not report one."""
    if not any(_TIMEOUT.search(suspect.words.line or "") for suspect in suspects):
        return []
    heard = {suspect.end.rank for suspect in suspects}
    return [f"rank {end.rank} on {node_of(end.node)}" for end in ends if end.rank not in heard and end.has_failed]


def _lost(lost: Sequence[Lost]) -> Failure:
    first = lost[0]
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    reason = f"{_LOST.get(first.cause, str(first.cause))} {node_of(first.node)}{more}"
    unproven = next((node_of(one.node) for one in lost if one.may_have_left), None)
    hint = f"a process that hid from UGRO may still run on {unproven}; see: ugro exec {unproven} -- ps xf"
    return Failure(first.cause, reason, node=first.node, hint=hint if unproven else None)


def _ending(end: RankEnd, cause: Cause) -> str:
    if end.signal is not None:
        name = signal_name(end.signal)
        is_short = cause is Cause.OOM and end.signal == signal.SIGKILL and end.reached_bytes is None
        why = " (out of memory)" if is_short else ""
        return f"was killed by {name}{why}" if end.signal in _KILLERS else f"crashed with {name}{why}"
    meaning = _EXIT_CODES.get(end.exit_code or 0)
    if end.death_signal is not None:
        meaning = f"a child was killed by {signal_name(end.death_signal)}"
    if end.exit_code is None:
        return "ended for an unknown reason"
    return f"ended with exit code {end.exit_code}" + (f" ({meaning})" if meaning else "")


def disk_hint(node: str) -> str:
    """``node``: or a login to it."""
    node = node_of(node)
    return f"make room: ugro node gc {node}, or see what takes it: ugro exec {node} -- df -h"


def _exit_code(end: RankEnd) -> int | None:
    return end.exit_code if end.signal is None else 128 + end.signal


_TIMEOUT = re.compile(r"time(d )?[ -]?out", re.IGNORECASE)
_KILLERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_EXIT_CODES = {126: "it cannot be executed", 127: "command not found"}
_STOPPED = {
    Cause.TIME_LIMIT: "it reached its time limit",
    Cause.PREEMPTED: "it made way for a more urgent job",
}
_LOST = {
    Cause.NODE_LOST: "lost the node",
    Cause.NODE_REBOOTED: "the node was rebooted:",
    Cause.SUPERVISOR_LOST: "the supervisor was killed on",
}
_HINTS = {
    Cause.OOM: "the node ran out of memory: fewer loader workers, a smaller batch, or ask for memory",
    Cause.KILLED: "somebody ended it, or the kernel did for want of memory: see dmesg on the node",
}

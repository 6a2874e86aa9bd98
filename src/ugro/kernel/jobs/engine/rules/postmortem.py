"""Why an attempt failed: the first rank that failed by itself, how it ended, and what its last lines say.

When one rank dies the others follow within moments: their connections break, their collectives time out, we stop
them. Those are not named. Whether the job is tried again is for ``retry`` to say.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.model import Cause, Failure
from ugro.kernel.support.quantities import KNOWN, format_size, in_words, signal_name

# --- signs in the last lines of a log ---------------------------------------------------------------------------------
# They are never the only sign: exit codes and signals come first. Causes are given as ``Cause`` names them. A symptom
# is the trace of another rank's death.


MOST_LINES = 200
_LONGEST_LINE = 300


@dataclass(frozen=True, slots=True)
class LastWords:
    cause: str | None = None
    line: str | None = None
    hint: str | None = None
    is_symptom: bool = False


@dataclass(frozen=True, slots=True)
class _Sign:
    pattern: re.Pattern[str]
    in_order: tuple[tuple[re.Pattern[str], re.Pattern[str]], ...]  # or the first of two, and later the second
    cause: str
    hint: str | None = None
    is_symptom: bool = False


def read(lines: Sequence[str]) -> LastWords:
    lines = [_RANK_PREFIX.sub("", line.rstrip()) for line in lines[-MOST_LINES:]]
    # Exceptions that were handled earlier did not end it: only the last one and its causes count.
    end = lines[_last_chain(lines) :]
    found = _found(_ROOTS, end) or _found(_SYMPTOMS, end)
    if found is not None:
        return found
    said = _exception(end)
    return LastWords(line=_shown(said)) if said else LastWords()


def _found(signs: Sequence[_Sign], lines: Sequence[str]) -> LastWords | None:
    """The last line with a known signature: later lines are more specific."""
    for line in reversed(lines):
        if _SAYS_NOTHING.search(line):
            continue
        for sign in signs:
            if sign.pattern.search(line) or any(_has(line, *two) for two in sign.in_order):
                return LastWords(sign.cause, _shown(line), sign.hint, sign.is_symptom)
    return None


def _last_chain(lines: Sequence[str]) -> int:
    """Where the last traceback begins, with the ones that it was raised from."""
    starts = [number for number, line in enumerate(lines) if _TRACEBACK.match(line)]
    if not starts:
        return 0
    begin = starts.pop()
    while starts and any(_LINK.search(line) or _has(line, *_LINKED) for line in lines[starts[-1] : begin]):
        begin = starts.pop()
    return begin


def _exception(lines: Sequence[str]) -> str | None:
    """The line after the last traceback's frames; without a traceback, one that looks like an error."""
    starts = [number for number, line in enumerate(lines) if _TRACEBACK.match(line)]
    if starts:
        return next((line for line in lines[starts[-1] + 1 :] if line and not line[0].isspace()), None)
    return next((line for line in reversed(lines) if _LOOKS_LIKE_AN_ERROR.search(line) or _has(line, *_ASSERTED)), None)


def _shown(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…"


def _has(line: str, first: re.Pattern[str], second: re.Pattern[str]) -> bool:
    """Whether both are there in this order; as one expression with .* it would take the square of the line's length."""
    found = first.search(line)
    return found is not None and second.search(line, found.end()) is not None


def _sign(cause: str, pattern: str, hint: str | None = None, *, is_symptom: bool = False) -> _Sign:
    """``pattern``: alternatives; ``first … second`` in one of them are both, in this order."""
    either = [one.split(" … ") for one in pattern.split(" || ")]
    plain = "|".join(one[0] for one in either if len(one) == 1)
    in_order = tuple(_two(*one) for one in either if len(one) == 2)
    return _Sign(re.compile(plain, re.IGNORECASE), in_order, cause, hint, is_symptom)


def _two(first: str, second: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    return re.compile(first, re.IGNORECASE), re.compile(second, re.IGNORECASE)


# PyTorch puts the rank before each line of a traceback.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
# A traceback's frames show code, which may name any error, and NCCL logs at length what it could not use.
_SAYS_NOTHING = re.compile(r'^    |^  File "|NCCL INFO')
_TRACEBACK = re.compile(r"\s*(Original )?Traceback \(most recent call last\):")
_LINK = re.compile(r"direct cause of the following exception|another exception occurred")
_LINKED = _two("Caught ", " in DataLoader")
_LOOKS_LIKE_AN_ERROR = re.compile(r"(Error|Exception)\b\s*:|\berror:|^fatal\b", re.IGNORECASE)
_ASSERTED = _two("assertion ", " failed")

_ROOTS = (
    _sign(
        "cuda_oom",
        r"(CUDA|HIP) out of memory|CUDA error: out of memory|torch\.(cuda\.)?OutOfMemoryError"
        r"|CUBLAS_STATUS_ALLOC_FAILED",
        "use a smaller batch or gradient accumulation, or ask for a GPU with more memory",
    ),
    _sign(
        "oom",
        "out of shared memory || insufficient shared memory || unable to (write to file|mmap|open) … </torch_"
        " || DataLoader worker … killed by signal: Bus error",
        "the loader's workers need more of /dev/shm: fewer of them, or a larger /dev/shm",
    ),
    _sign(
        "oom",
        r"\bMemoryError\b|Cannot allocate memory|can't allocate memory|std::bad_alloc"
        " || DataLoader worker … killed by signal: Killed",
        "the node ran out of memory: fewer loader workers, a smaller batch, or ask for memory",
    ),
    _sign("disk_full", r"No space left on device|Disk quota exceeded|\bENOSPC\b"),
    _sign("port_in_use", r"\bEADDRINUSE\b|Address already in use"),
    _sign(
        "import_error",
        r"\bModuleNotFoundError\b|\bImportError\b|error while loading shared libraries",
        "install it on every node, in the Python that runs the ranks (ugro launch --dry-run names it)",
    ),
)
_SYMPTOMS = (
    _sign(
        "nccl_timeout",
        "caught collective operation timeout || (NCCL|ProcessGroup|collective) … (timeout|timed out)"
        r" || Timed out waiting \d+ ?ms for (send|recv) operation",
        is_symptom=True,
    ),
    # "Connection refused" alone may be any service that the program talks to; reset and closed mean a peer that was
    # there before.
    _sign(
        "nccl_timeout",
        r"Connection (was )?(reset|closed) by (the )?(remote )?peer|ConnectionResetError|Broken ?pipe"
        r" || (gloo|nccl|c10d|TCPStore|SocketImpl|ProcessGroup) … (refused|reset|closed|broken|failed to recv)"
        r" || remote process (exited|exiting)|ncclRemoteError|recvValue failed|sendBytes failed|connectFullMesh failed",
        is_symptom=True,
    ),
)


# --- the cause --------------------------------------------------------------------------------------------------------


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
        words = read(end.last_lines)
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

"""What the last lines of a rank's log say about its end. Never the only sign: exit codes and signals come first.

Causes are given as ``policy.postmortem`` names them. A symptom is the trace of another rank's death.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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

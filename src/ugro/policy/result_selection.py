"""Which outputs of a run are fetched, and why the others are not. Pure.

Below ``checkpoints`` in the output folder, names are ordered as those of any checkpoint: by the number at the end, and
those without one, which are older, by the time of their last change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ugro.core.job import ResultRule
from ugro.core.support.quantity import format_size
from ugro.remote.files import checkpoint_names
from ugro.remote.files.listing import RunFile, text

_FOLDER = b"checkpoints"
# While a run lives, a large file that changed just now is probably being written, and would be fetched again.
_LARGE_BYTES = 16 << 20
_FRESH_NS = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Left:
    file: RunFile
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    wanted: tuple[RunFile, ...]
    left: tuple[Left, ...]  # those that stay on the node
    unsendable: tuple[RunFile, ...]  # links, pipes and devices


def choose(files: Sequence[RunFile], rule: ResultRule) -> Choice:
    sound = [file for file in files if file.problem is None]
    dropped = _by_rule(sound, rule.checkpoints)
    left = [Left(file, dropped[entry]) for file in sound if (entry := _entry(file.name)) in dropped]
    wanted = [file for file in sound if _entry(file.name) not in dropped]
    over = _over(wanted, rule.limit_bytes)
    left += [Left(file, f"over the limit of {format_size(rule.limit_bytes or 0)}") for file in over]
    names = {file.name for file in over}
    return Choice(
        tuple(file for file in wanted if file.name not in names),
        tuple(left),
        tuple(file for file in files if file.problem is not None),
    )


def is_being_written(file: RunFile, now_ns: int) -> bool:
    entry = _entry(file.name)
    if entry is not None and not checkpoint_names.is_complete(text(entry)):
        return True
    return file.size >= _LARGE_BYTES and now_ns - file.changed_ns < _FRESH_NS


def _over(files: Iterable[RunFile], limit_bytes: int | None) -> list[RunFile]:
    """Small files take precedence: metrics and logs before weights."""
    if limit_bytes is None:
        return []
    over = []
    for file in sorted(files, key=lambda file: (file.size, file.name)):
        limit_bytes -= file.size
        if limit_bytes < 0:
            over.append(file)
    return over


def _by_rule(files: Iterable[RunFile], rule: str) -> dict[bytes, str]:
    """The checkpoints that are not wanted, and why."""
    changed: dict[bytes, int] = {}
    for file in files:
        if (entry := _entry(file.name)) is not None:
            changed[entry] = max(changed.get(entry, 0), file.changed_ns)
    order = sorted(changed, key=lambda entry: (_number(entry), changed[entry], entry), reverse=True)
    keep = _kept(order, rule)
    return {entry: f"results.checkpoints is {rule}" for entry in order if entry not in keep}


def _kept(order: Sequence[bytes], rule: str) -> set[bytes]:
    """``order``: the newest first."""
    if rule == "all":
        return set(order)
    if rule == "none":
        return set()
    if rule == "best":
        return {entry for entry in order if b"best" in entry.lower()} or set(order[:1])
    return set(order[: int(rule.removeprefix("last "))])


def _entry(name: bytes) -> bytes | None:
    parts = name.split(b"/")
    return parts[1] if len(parts) > 1 and parts[0] == _FOLDER else None


def _number(entry: bytes) -> int:
    found = checkpoint_names.number(text(entry))
    return -1 if found is None else found

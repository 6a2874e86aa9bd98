"""Which files of a run are fetched, and why the others are not. Pure.

What is not fetched is left on the node and listed with its reason. Below the folder of the checkpoints, names are
ordered as those of any checkpoint: by the number at the end, and those without one, which are older, by the time of
their last change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

from ugro.kernel.jobs.model import ResultRule
from ugro.kernel.support.quantities import format_size
from ugro.kernel.telemetry.model import is_metric_file
from ugro.node.files import listing as checkpoint_names
from ugro.node.files.listing import RunFile, folders_above, text

# While a run lives, a large file that changed just now is probably being written, and would be fetched again.
_LARGE_BYTES = 16 << 20
_FRESH_NS = 5_000_000_000
_TAKEN = "another file of this name is here"

# Who names a file of the working directory that is not to be sent: .gitignore, for example. None: nobody does.
NamedBy = Callable[[bytes], str | None]


def nobody(name: bytes) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Selection:
    """What decides about the files of a run."""

    rule: ResultRule = field(default_factory=ResultRule)
    checkpoints: str = "checkpoints"  # their folder
    named_by: NamedBy = nobody


@dataclass(frozen=True, slots=True)
class Left:
    file: RunFile
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    wanted: tuple[RunFile, ...]
    left: tuple[Left, ...]  # those that stay on the node
    unsendable: tuple[RunFile, ...]  # links, pipes and devices
    outdated: tuple[bytes, ...] = ()  # of those that are only here: by the rule for checkpoints, they go


def choose(
    files: Sequence[RunFile], by: Selection, only_here: Sequence[RunFile] = (), taken: Set[bytes] = frozenset()
) -> Choice:
    """``only_here``: files that were fetched before and are gone from the node. No limit applies to them.

    ``taken``: names of files here that are others, and are not to be replaced.
    """
    sound = [file for file in files if file.problem is None]
    dropped = _by_rule([*sound, *only_here], by)
    left = {file.name: Left(file, _TAKEN) for file in clashing(sound, taken)}
    for file in sound:
        reason = dropped.get(_entry(file.name, by.checkpoints)) or _named(file, by)
        if reason is not None:
            left[file.name] = Left(file, reason)
    for what, limit_bytes in (("workdir_limit", by.rule.workdir_limit_bytes), ("limit", by.rule.limit_bytes)):
        counted = [file for file in sound if file.name not in left and (file.is_work or what == "limit")]
        reason = f"over results.{what}, {format_size(limit_bytes or 0)}"
        left |= {file.name: Left(file, reason) for file in _over(counted, limit_bytes)}
    return Choice(
        tuple(file for file in sound if file.name not in left),
        tuple(left.values()),
        tuple(file for file in files if file.problem is not None),
        tuple(file.name for file in only_here if _entry(file.name, by.checkpoints) in dropped),
    )


def clashing(files: Iterable[RunFile], taken: Set[bytes]) -> list[RunFile]:
    """Those that cannot be where files of these names are."""
    names = taken | {folder for name in taken for folder in folders_above(name)}
    return [file for file in files if file.name in names or not taken.isdisjoint(folders_above(file.name))]


def is_being_written(file: RunFile, checkpoints: str, now_ns: int) -> bool:
    entry = _entry(file.name, checkpoints)
    if entry is not None and not checkpoint_names.is_complete(text(entry)):
        return True
    return file.size >= _LARGE_BYTES and abs(now_ns - file.changed_ns) < _FRESH_NS


def _named(file: RunFile, by: Selection) -> str | None:
    """Nobody asked for it by name: then those who name it as not to be sent are heard.

    Files of metrics come all the same: they are small, often ignored (``runs/``, ``wandb/``), and become curves.
    """
    is_asked = not file.is_work or is_metric_file(text(file.name))
    source = None if is_asked else by.named_by(file.name)
    return f"named by {source}" if source else None


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


def _by_rule(files: Iterable[RunFile], by: Selection) -> dict[bytes | None, str]:
    """The checkpoints that are not wanted, and why."""
    changed: dict[bytes, int] = {}
    for file in files:
        if (entry := _entry(file.name, by.checkpoints)) is not None:
            changed[entry] = max(changed.get(entry, 0), file.changed_ns)
    if by.rule.checkpoints == "all":
        return {}
    complete = [entry for entry in changed if checkpoint_names.is_complete(text(entry))]
    order = sorted(complete, key=lambda entry: (_number(entry), changed[entry], entry), reverse=True)
    keep = _kept(order, by.rule.checkpoints)
    return {entry: f"results.checkpoints is {by.rule.checkpoints}" for entry in changed if entry not in keep}


def _kept(order: Sequence[bytes], rule: str) -> set[bytes]:
    """``order``: the newest first."""
    if rule == "none":
        return set()
    if rule == "best":
        return {entry for entry in order if b"best" in entry.lower()} or set(order[:1])
    return set(order[: int(rule.removeprefix("last "))])


def _entry(name: bytes, checkpoints: str) -> bytes | None:
    """The checkpoint that a file is part of."""
    prefix = checkpoints.encode("utf-8", "surrogateescape") + b"/"
    return name[len(prefix) :].split(b"/")[0] if name.startswith(prefix) else None


def _number(entry: bytes) -> int:
    found = checkpoint_names.number(text(entry))
    return -1 if found is None else found

"""What a job made in its working directory is put back when it is tried again: a script finds its snapshot there.

The files are those that were collected of earlier attempts, the newest of each name. What came with the code stays as
it was sent, metrics stay with their attempt, and what differs between nodes or is only half written is not put back:
ranks that go on from different places compute something else.
"""

from __future__ import annotations

import filecmp
import os
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ugro.agent.artifacts.output_store import OutputStore, shown
from ugro.core.failure import Cause
from ugro.core.job import Attempt, Job
from ugro.core.login import node_of
from ugro.core.metric_files import is_metric_file
from ugro.remote.files.received import is_file

_MOST_NAMED = 3
_ZIP = b"PK\x03\x04"  # what torch.save and numpy.savez write begins with it
_BY_THE_PROGRAM = (Cause.RANK_FAILED, Cause.IMPORT_ERROR)


@dataclass(frozen=True, slots=True)
class Earlier:
    """An attempt before the one that is to start."""

    name: str  # for the user
    folder: Path
    attempt: Attempt
    began_with_files: bool  # of others before it


@dataclass(slots=True)
class Found:
    files: dict[bytes, tuple[Path, str]] = field(default_factory=dict)  # with the name of the attempt that made it
    problems: list[str] = field(default_factory=list)  # why others are not put back

    def words(self) -> tuple[str, ...]:
        """Sentences for the user."""
        by_attempt: dict[str, list[bytes]] = {}
        for name, (_, attempt) in self.files.items():
            by_attempt.setdefault(attempt, []).append(name)
        put = [f"{_named(names)} of {attempt} {_are(names)} put back" for attempt, names in by_attempt.items()]
        return (*put, *self.problems)


def may_be_put_back(job: Job) -> bool:
    """As with checkpoints: a training may always go on, and a plain command only if its spec says so."""
    spec = job.spec
    is_again = job.attempt > 1 or spec.earlier is not None
    is_ours = spec.cwd is None and spec.results.workdir and spec.has_checkpoints and not spec.is_cached
    return is_again and is_ours and spec.retry.puts_back


def find(earlier: Sequence[Earlier], is_code: Callable[[str], bool]) -> Found:
    """``earlier``: the first one first. Blocks."""
    found = Found()
    for one in earlier:
        files, problems = _made_by(one, is_code, found.files if one.began_with_files else {})
        failure = one.attempt.failure
        if one.began_with_files and not files and failure is not None and failure.cause in _BY_THE_PROGRAM:
            problems = [f"{one.name} failed with earlier files and made none, so these are not put back again"]
            found = Found()
        elif not one.began_with_files:
            found = Found()
        found.files |= {name: (path, one.name) for name, path in files.items()}
        found.problems = problems
    return found


def _made_by(
    one: Earlier, is_code: Callable[[str], bool], before: Mapping[bytes, tuple[Path, str]]
) -> tuple[dict[bytes, Path], list[str]]:
    """``before``: what it began with; a node that has such a file still as it was has not made it."""
    files: dict[bytes, Path] = {}
    problems: list[str] = []
    differing: set[bytes] = set()
    for number, node in enumerate(one.attempt.placement.nodes):
        store = OutputStore(one.folder, node, is_first=number == 0)
        failure, arrived = one.attempt.failure, store.arrived()
        if failure is not None and failure.cause is Cause.NODE_LOST and failure.node == node and arrived is None:
            problems.append(f"{node_of(node)} was lost: of what it made, only what had arrived before is put back")
        if arrived is not None and arrived.left_count:
            left = _named([os.fsencode(one.name) for one in arrived.left])
            problems.append(f"what was left on {node_of(node)} is not put back: {left}")
        for name, path in _work_in(store, before):
            known = files.setdefault(name, path)
            if known != path and not filecmp.cmp(known, path, shallow=False):
                differing.add(name)
    halves = {name for name, path in files.items() if _is_half_written(path)} - differing
    ours = {name for name in files if is_code(os.fsdecode(name))} - differing - halves
    for names, why in (
        (differing, "not the same on all nodes"), (halves, "only half written"), (ours, "a part of the code"),
    ):  # fmt: skip
        if names:
            problems.append(f"{_named(names)} of {one.name} {_are(names)} {why}, and not put back")
        for name in names:
            del files[name]
    return files, problems


def _work_in(store: OutputStore, before: Mapping[bytes, tuple[Path, str]]) -> Iterator[tuple[bytes, Path]]:
    for name in store.work():
        path = store.root / os.fsdecode(name)
        if not is_file(os.fsencode(path)) or is_metric_file(shown(name)):
            continue
        if name not in before or not filecmp.cmp(path, before[name][0], shallow=False):
            yield name, path


def _named(names: Collection[bytes]) -> str:
    few = [shown(name) for name in sorted(names)]
    if len(few) <= _MOST_NAMED:
        return ", ".join(few)
    return f"{', '.join(few[: _MOST_NAMED - 1])} and {len(few) - _MOST_NAMED + 1} others"


def _are(names: Collection[bytes]) -> str:
    return "is" if len(names) == 1 else "are"


def _is_half_written(path: Path) -> bool:
    """Of a rank that was killed while it wrote. Other kinds of files do not tell."""
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP and not zipfile.is_zipfile(path)

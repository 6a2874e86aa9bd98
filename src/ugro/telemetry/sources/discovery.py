"""Finds the files with metrics in the folder of a job, whatever brought them there.

``attempt_N/output/`` has the files of the first node, ``attempt_N/nodes/NODE/`` those of the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ugro.core.metric_files import is_metric_file
from ugro.telemetry.sources import tensorboard, ugro, wandb
from ugro.telemetry.sources.reading import Read

_ATTEMPT = re.compile(r"attempt_([0-9]{1,9})")
_MOST_FILES = 10_000  # of one job
_MOST_ENTRIES = 500_000
_LARGEST_CONFIG = 16 << 20


class Writer(NamedTuple):
    """Who wrote a file: files of the same kind and run are one run."""

    read: Read
    run: str


class MetricFile(NamedTuple):
    attempt: int
    name: str  # below the folder of its attempt
    path: Path
    writer: Writer
    rank: int  # of the points whose file does not name it
    prefix: str  # of the names of its metrics, where there are several runs


def find(job: Path) -> list[MetricFile]:
    """Blocks."""
    return list(islice(_find(job), _MOST_FILES))


def attempts(job: Path) -> Iterator[tuple[int, Path]]:
    for folder in _folders(job):
        if number := _ATTEMPT.fullmatch(folder.name):
            yield int(number[1]), folder


def writer_of(name: str) -> Writer | None:
    """``name`` is a path below the folder of a node's files."""
    if not is_metric_file(name):
        return None
    path = PurePosixPath(name)
    if path.name.startswith("events.out.tfevents."):
        return Writer(tensorboard.read, str(path.parent))
    if path.suffix == ".wandb":
        return Writer(wandb.read, path.stem.removeprefix("run-"))
    return Writer(ugro.read, str(path.parent))


def prefixes(runs: Iterable[str]) -> dict[str, str]:
    """What to write before the names of each run's metrics: the part of its path that it does not share with others."""
    paths = {run: PurePosixPath(run).parts for run in runs}
    # Of the first and the last in order, all others share at least as much.
    least, most = min(paths.values(), default=()), max(paths.values(), default=())
    differing = (at for at, (one, other) in enumerate(zip(least, most, strict=False)) if one != other)
    shared = next(differing, min(len(least), len(most)))
    return {run: "".join(f"{part}/" for part in parts[shared:]) for run, parts in paths.items()}


def _find(job: Path) -> Iterator[MetricFile]:
    for attempt, folder in attempts(job):
        yield from _of_node(attempt, folder, "output", 0)
        nodes = [node.name for node in _folders(folder / "nodes")]
        ranks = _first_ranks(job, attempt) if nodes else {}
        for place, node in enumerate(nodes, 1):
            yield from _of_node(attempt, folder, f"nodes/{node}", ranks.get(node, place))


def _of_node(attempt: int, folder: Path, below: str, rank: int) -> Iterator[MetricFile]:
    root = folder / below
    writers = {name: writer for name in _names(root) if (writer := writer_of(name)) is not None}
    runs: dict[Read, set[str]] = {}
    for writer in writers.values():
        runs.setdefault(writer.read, set()).add(writer.run)
    named = {kind: prefixes(of_kind) for kind, of_kind in runs.items()}
    # In the order of their names, which contain times: the newest is read last.
    for name, writer in sorted(writers.items()):
        yield MetricFile(attempt, f"{below}/{name}", root / name, writer, rank, named[writer.read][writer.run])


def _names(root: Path) -> Iterator[str]:
    """Regular files below a folder: links that lead elsewhere are not followed."""
    folders, seen = [""], 0
    while folders and seen < _MOST_ENTRIES:
        below = folders.pop()
        with contextlib.suppress(OSError), os.scandir(root / below) as entries:
            for entry in entries:
                seen += 1
                if not entry.name.isprintable():  # the database has no place for such names
                    continue
                name = f"{below}/{entry.name}" if below else entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif entry.is_file(follow_symlinks=False):
                    yield name


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _first_ranks(job: Path, attempt: int) -> dict[str, int]:
    """The first rank of each node, by the plan that is recorded in the job's folder; it has that of one attempt."""
    try:
        with (job / "config.json").open("rb") as file:
            config = json.loads(file.read(_LARGEST_CONFIG))
        if config["attempt"] != attempt:
            return {}
        return {node["node"]: int(node["ranks"][0]["rank"]) for node in config["plan"]["nodes"]}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return {}

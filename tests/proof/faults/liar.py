"""For a while, a node has runs that were never placed on it, as anybody who can write to its folder could make them."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from tests.proof.faults import Hit, Kind, Step, Target, root_of

_LIE_S = 10.0
_HUGE_BYTES = 1 << 40
_NEVER = 900  # an attempt that no job gets to, and how far ahead a job is that is never submitted
_MOST = 5  # forged runs of each kind
_OLD_S = 12.0
_FOREIGN_RANK = 7777


def _lie(target: Target, step: Step) -> Hit | None:
    node = target.nodes[step.node]
    runs = next(root_of(node).glob(".ugro/agents/*/runs"), None)
    if runs is None:
        return None
    planted = [*filter(None, (_forge(runs / name) for name in _names(target, node.name) if not (runs / name).exists()))]
    logs = [*filter(None, map(_plant_log, list(runs.glob("[1-9]*.[1-9]*/logs"))[:_MOST]))]

    def undo() -> None:
        for folder in planted:
            shutil.rmtree(folder, ignore_errors=True)
        for log in logs:
            log.unlink(missing_ok=True)

    return Hit(f"{node.name}: {len(planted)} forged runs, {len(logs)} forged logs", undo)


def _names(target: Target, node: str) -> Iterator[str]:
    """Of no run that was placed there, or will be."""
    jobs = sorted(target.book.jobs.values())[-_MOST:]
    newest = max(jobs, default=1)
    yield from (f"{job}.{_NEVER}" for job in jobs)
    yield from (f"{newest + _NEVER + number}.1" for number in range(_MOST))
    yield from _placed_elsewhere(target.home / "state.db", node)


def _placed_elsewhere(state: Path, node: str) -> list[str]:
    """Attempts of jobs that are over, with logs in files. No recent ones: an older state may make them once more."""
    query = (
        "SELECT job, number, a.placement, a.started_boot FROM attempts a JOIN jobs ON id = job "
        "WHERE state IN ('succeeded', 'failed') AND job NOT IN (SELECT job FROM small_logs)"
    )
    found = []
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{state}?mode=ro", uri=True)) as db:
        for job, number, placement, boot in db.execute(query):
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - float((boot or "x inf").split(" ")[1])
            if node not in [share["node"] for share in json.loads(placement)["shares"]] and age_s > _OLD_S:
                found.append(f"{job}.{number}")
    return found[-_MOST:]


def _forge(folder: Path) -> Path | None:
    """Complete before it has its name; None if the disk is full."""
    made = folder.with_name(f".{folder.name}.{os.urandom(4).hex()}")
    try:
        _fill(made, folder.name)
        made.rename(folder)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        return None
    return folder


def _fill(made: Path, name: str) -> None:
    for part in ("logs", "output"):
        (made / part).mkdir(parents=True)
    ranks = [{"rank": rank, "code": 0, "ended_at": 1.0} for rank in (0, _FOREIGN_RANK // 2)]
    record = {"v": 1, "run": name, "outcome": "succeeded", "reason": "forged", "ranks": ranks, "boot_id": "x"}
    (made / "exit.json").write_text(json.dumps(record))
    (made / "claim").write_text("x")
    (made / "output" / "forged.txt").write_text("forged\n")
    (made / "output" / "link").symlink_to("/etc/passwd")
    _make_huge(made / "output" / "huge")
    _make_huge(made / "logs" / "rank_0.log")


def _plant_log(folder: Path) -> Path | None:
    """Of a rank that the run does not have; None if the run is gone by now."""
    log = folder / f"rank_{_FOREIGN_RANK}.log"
    try:
        _make_huge(log)
    except OSError:
        return None
    return log


def _make_huge(file: Path) -> None:
    with file.open("w") as content:
        content.write("forged\n")
        content.truncate(_HUGE_BYTES)


KINDS = {"lying node": Kind(3, _lie, _LIE_S)}

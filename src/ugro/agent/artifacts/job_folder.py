"""The folder of a job: ``jobs/<id>/``, with its description, logs, outputs and checkpoints.

Each attempt has its own, ``attempt_N/``; the job's folder has relative links to the newest: ``logs``, ``nodes``, and
everything that the job wrote. ``config.json`` and ``checkpoints`` are ours: no output of a job replaces them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ugro.core.job import Job
from ugro.core.plan import Plan
from ugro.core.support.secret import masked

CONFIG = "config.json"
_OURS = frozenset({b"config.json", b"checkpoints", b"logs", b"nodes"})


def attempt_folder(folder: Path, attempt: int) -> Path:
    return folder / f"attempt_{attempt}"


def rank_log(folder: Path, attempt: int, rank: int) -> Path:
    return attempt_folder(folder, attempt) / "logs" / f"rank_{rank}.log"


def link_view(folder: Path, attempt: int) -> None:
    """Links to this attempt, unless there is a newer one: results of an older one may arrive late. Blocks."""
    if _has_newer(folder, attempt):
        return
    newest = attempt_folder(folder, attempt)
    for name in (b"logs", b"nodes"):
        _link(folder, name, newest.name.encode() + b"/" + name)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(os.fsencode(newest / "output")):
            if name not in _OURS and not name.startswith((b".", b"attempt_")):
                _link(folder, name, newest.name.encode() + b"/output/" + name)


def write_config(folder: Path, job: Job, plan: Plan | None) -> None:
    """The spec of the job and the plan of its newest attempt, without secrets. Blocks."""
    spec = asdict(replace(job.spec, env=()))
    document: dict[str, Any] = {
        "id": job.id,
        "name": job.spec.name,
        "user": job.user,
        "submitted_at": job.submitted_at,
        "attempt": job.attempt,
        "spec": {**spec, "env": masked(job.spec.env)},
        "placement": asdict(job.placement) if job.placement else None,
        "plan": _plan(plan) if plan else None,
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(document, indent=2) + "\n"
    with contextlib.suppress(OSError):
        if (folder / CONFIG).read_text() == text:
            return
    fresh = folder / f".{CONFIG}.{secrets.token_hex(4)}"
    fresh.write_text(text)
    fresh.rename(folder / CONFIG)


def _has_newer(folder: Path, attempt: int) -> bool:
    numbers = (path.name.removeprefix("attempt_") for path in folder.glob("attempt_*"))
    return any(number.isdigit() and int(number) > attempt for number in numbers)


def _plan(plan: Plan) -> dict[str, Any]:
    document = asdict(plan)
    for node in document["nodes"]:
        for rank in node["ranks"]:
            rank["env"] = masked(rank["env"])
    return document


def _link(folder: Path, name: bytes, target: bytes) -> None:
    path = os.path.join(os.fsencode(folder), name)
    try:
        if os.readlink(path) == target:
            return
    except FileNotFoundError:
        pass
    except OSError:  # another file has the name, and keeps it
        return
    if not os.path.lexists(os.path.join(os.fsencode(folder), target)):
        return
    fresh = os.path.join(os.fsencode(folder), b".link." + secrets.token_hex(4).encode())
    os.symlink(target, fresh)
    os.rename(fresh, path)


def delete_results(folder: Path) -> None:
    """Deletes outputs and checkpoints of all attempts, and the links to them; logs stay. Blocks."""
    _unlink_view(folder)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for attempt in folder.glob("attempt_*"):
        for name in ("output", "nodes", ".mirror"):
            shutil.rmtree(attempt / name, ignore_errors=True)


def has_results(folder: Path) -> bool:
    """Whether outputs or checkpoints of any attempt are here, or were left on a node. Blocks."""
    attempts = (attempt / name for attempt in folder.glob("attempt_*") for name in ("output", "nodes", ".mirror"))
    return any(path.exists() for path in (folder / "checkpoints", *attempts))


def _unlink_view(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            if path.is_symlink() and path.name != "logs":
                path.unlink()

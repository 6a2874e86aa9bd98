"""The folder of a job: ``jobs/<id>/``, with its description, logs, outputs and checkpoints.

Each attempt has its own, ``attempt_N/``; the job's folder has relative links to the newest: ``logs``, ``nodes``, and
everything that the job wrote. ``config.json`` is ours: no output of a job replaces it. ``checkpoints/`` is a folder of
links to the checkpoints of all attempts and, while the job runs, to the one that a retry resumes from.
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

from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.records import Plan
from ugro.kernel.support.secrets import masked

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
ENERGY = "energy"
_RESUME = ".checkpoints"
_OURS = frozenset({b"config.json", b"checkpoints", b"logs", b"nodes"})


def attempt_folder(folder: Path, attempt: int) -> Path:
    return folder / f"attempt_{attempt}"


def rank_log(folder: Path, attempt: int, rank: int) -> Path:
    return attempt_folder(folder, attempt) / "logs" / f"rank_{rank}.log"


def energy_file(folder: Path, attempt: int, node: str) -> Path:
    """What the devices of one node used."""
    return attempt_folder(folder, attempt) / ENERGY / f"{node}.jsonl"


def resume_folder(folder: Path) -> Path:
    """Returns where what the job can resume from is."""
    return folder / _RESUME


def link_view(folder: Path, attempt: int) -> None:
    """Links to this attempt, unless there is a newer one: results of an older one may arrive late. Blocks."""
    _link_checkpoints(folder)
    if any(number > attempt for number in _attempts(folder)):
        return
    newest = attempt_folder(folder, attempt)
    for name in (b"logs", b"nodes"):
        _link(folder, name, newest.name.encode() + b"/" + name)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(os.fsencode(newest / "output")):
            if name not in _OURS and not name.startswith((b".", b"attempt_")):
                _link(folder, name, newest.name.encode() + b"/output/" + name)


def link_checkpoint(folder: Path, name: str, path: str) -> None:
    """While the job runs, the newest checkpoint is in the view, too, under its own name. Blocks."""
    _link_inside(folder / CHECKPOINTS, os.fsencode(name), Path(path))
    for entry in (folder / CHECKPOINTS).iterdir():
        if entry.is_symlink() and not entry.exists():  # what it led to was replaced
            entry.unlink()


def earlier_checkpoints(folder: Path, attempt: int, name: str = CHECKPOINTS) -> dict[bytes, Path]:
    """By their names in the folder of that name, those that only attempts before this one have."""
    found: dict[bytes, Path] = {}
    for number in _attempts(folder):
        inside = attempt_folder(folder, number) / "output" / name
        found |= {one: inside / os.fsdecode(one) for one in _names(inside) if number < attempt}
    newest = _names(attempt_folder(folder, attempt) / "output" / name)
    return {one: path for one, path in found.items() if one not in newest}


def _link_checkpoints(folder: Path) -> None:
    newest = max(_attempts(folder), default=0)
    inside = attempt_folder(folder, newest) / "output" / CHECKPOINTS
    here = {name: inside / os.fsdecode(name) for name in _names(inside)}
    for name, path in {**earlier_checkpoints(folder, newest), **here}.items():
        _link_inside(folder / CHECKPOINTS, name, path)


def _attempts(folder: Path) -> list[int]:
    numbers = (path.name.removeprefix("attempt_") for path in folder.glob("attempt_*"))
    return sorted(int(number) for number in numbers if number.isdigit())


def _link_inside(folder: Path, name: bytes, path: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _link(folder, name, os.fsencode(os.path.relpath(path, folder)))


def _names(folder: Path) -> list[bytes]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(os.fsencode(folder)))
    return []


def write_config(folder: Path, job: Job, plan: Plan | None) -> None:
    """The spec of the job and the plan of its newest attempt, without secrets: others may read it. Blocks."""
    environment = job.spec.environment.masked if job.spec.environment else None
    spec = asdict(replace(job.spec.with_short_hashes, env=(), environment=environment))
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


def _plan(plan: Plan) -> dict[str, Any]:
    document = asdict(plan.with_short_hashes)
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
    for name in (CHECKPOINTS, _RESUME):
        shutil.rmtree(folder / name, ignore_errors=True)
    for attempt in folder.glob("attempt_*"):
        for name in ("output", "nodes", ".mirror"):
            shutil.rmtree(attempt / name, ignore_errors=True)


def has_results(folder: Path) -> bool:
    """Whether outputs or checkpoints of any attempt are here, or were left on a node. Blocks."""
    attempts = (attempt / name for attempt in folder.glob("attempt_*") for name in ("output", "nodes", ".mirror"))
    return any(path.exists() for path in (folder / CHECKPOINTS, folder / _RESUME, *attempts))


def _unlink_view(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            if path.is_symlink() and path.name != "logs":
                path.unlink()

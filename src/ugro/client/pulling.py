"""``client.pull``: copies the results of a job to a folder of this machine, from wherever the agent keeps them.

Equal files are skipped, different ones are not overwritten.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ugro.client.remote.pull import Conflict, Pulled, RemoteResults, conflict
from ugro.core.errors import NotAllowed, UgroError
from ugro.core.job import Job
from ugro.core.results import JobResults, Part, ResultState

if TYPE_CHECKING:
    from ugro.client.client import Client

_PIECE_BYTES = 1 << 20
_LOOK_S = 0.3
_TIMES = b".times"  # the index beside a log


def arrived(
    client: Client, word: str | int, attempt: int | None, on_wait: Callable[[JobResults], None]
) -> tuple[Job, JobResults]:
    """Waits until the results are collected; ``last`` stays the same job."""
    job, made = client.jobs.results(word, attempt=attempt)
    while made.state is ResultState.COMING:
        on_wait(made)
        time.sleep(_LOOK_S)
        job, made = client.jobs.results(job.id, attempt=attempt)
    return job, made


def pull(
    client: Client, made: JobResults, target: Path, *, is_forced: bool, on_progress: Callable[[Pulled], None]
) -> Pulled:
    if made.state is ResultState.REMOVED:
        raise NotAllowed(f"the results of job {made.job} were removed")
    try:
        if client.master is None:
            return _copied(made, target, is_forced=is_forced, on_progress=on_progress)
        remote = RemoteResults(client, made.job, made.attempt, on_progress)
        return remote.pull(os.fsencode(target), is_forced=is_forced)
    except Conflict as error:
        raise UgroError(str(error), hint="overwrite them with --force, or choose another directory") from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        hint = "the files copied so far are complete; try again"
        raise UgroError(f"cannot copy to {target}: {reason}", hint=hint) from error


def _copied(results: JobResults, target: Path, *, is_forced: bool, on_progress: Callable[[Pulled], None]) -> Pulled:
    _expect_readable(results.parts)
    done = Pulled()
    pairs = [pair for part in results.parts for pair in _pairs(part, os.fsencode(target))]
    is_there = [_is_same(source, to) for source, to in pairs]
    differing = [to for (_, to), same in zip(pairs, is_there, strict=True) if same is False]
    if differing and not is_forced:
        raise Conflict(conflict(differing))
    for (source, to), same in zip(pairs, is_there, strict=True):
        if same:
            done.same += 1
            done.seen_bytes += os.path.getsize(source)
        else:
            _copy(source, to, done, on_progress)
            done.files += 1
        on_progress(done)
    return done


def _expect_readable(parts: Sequence[Part]) -> None:
    """Raises NotAllowed for the files of an agent that another user runs."""
    for part in parts:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.stat(part.path)
        except PermissionError as error:
            hint = "download them from the dashboard: ugro dashboard"
            raise NotAllowed(f"{part.path} cannot be read: it is the agent's", hint=hint) from error


def _pairs(part: Part, target: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Regular files only; links are not followed."""
    path, base = os.fsencode(part.path), os.path.join(target, os.fsencode(part.name))
    if _is_file(path):
        yield path, base
    for folder, _, names in os.walk(path):
        for name in sorted(names):
            source = os.path.join(folder, name)
            if _is_file(source) and not (part.name == "logs" and name.endswith(_TIMES)):
                yield source, os.path.normpath(os.path.join(base, os.path.relpath(source, path)))


def _is_file(path: bytes) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def _is_same(source: bytes, to: bytes) -> bool | None:
    """None if there is none yet."""
    if not os.path.lexists(to):
        return None
    if not _is_file(to) or os.path.getsize(to) != os.path.getsize(source):
        return False
    with open(source, "rb") as one, open(to, "rb") as two:
        while (piece := one.read(_PIECE_BYTES)) == two.read(_PIECE_BYTES):
            if not piece:
                return True
    return False


def _copy(source: bytes, to: bytes, done: Pulled, on_progress: Callable[[Pulled], None]) -> None:
    """Under another name first: an interruption leaves complete files only."""
    os.makedirs(os.path.dirname(to), exist_ok=True)
    fresh = os.path.join(os.path.dirname(to), b".ugro-" + secrets.token_hex(8).encode())
    try:
        with open(source, "rb") as one, open(fresh, "xb") as two:
            while piece := one.read(_PIECE_BYTES):
                two.write(piece)
                done.bytes += len(piece)
                done.seen_bytes += len(piece)
                on_progress(done)
        about = os.stat(source)
        os.chmod(fresh, stat.S_IMODE(about.st_mode))
        os.utime(fresh, ns=(about.st_atime_ns, about.st_mtime_ns))
        os.replace(fresh, to)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)

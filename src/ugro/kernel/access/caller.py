"""Who has asked for what is being done. Set once for each request, by the gate; tasks that a request starts inherit it.

Without a caller it is the agent itself, which sees and does everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from ugro.kernel.access.model import Caller
from ugro.kernel.jobs.model import Job
from ugro.kernel.operations.request import Between
from ugro.kernel.support.errors import NotAllowed, NotFound
from ugro.kernel.support.secrets import HIDDEN

PRIVATE = "private"  # the name of a job that the caller must not know
_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
_VOUCHED: ContextVar[frozenset[Path]] = ContextVar("vouched", default=frozenset())


def enter(caller: Caller) -> None:
    """For the rest of this request's task."""
    _CALLER.set(caller)


def caller() -> Caller | None:
    return _CALLER.get()


def viewer() -> str | None:
    """From whom the private jobs of others are hidden; None: from nobody."""
    asks = caller()
    return None if asks is None or asks.sees_all else asks.user


def sees(job: Job) -> bool:
    asks = caller()
    return asks is None or asks.may_see(job.user, is_private=job.spec.private)


def visible(jobs: Iterable[Job]) -> list[Job]:
    return [job for job in jobs if sees(job)]


def disguised(jobs: Iterable[Job]) -> list[Job]:
    """All of them; of those that are hidden, only that they hold something."""
    return [job if sees(job) else _anonymous(job) for job in jobs]


def expect_visible(job: Job, word: str) -> Job:
    """Raises NotFound, as for a job that does not exist."""
    if not sees(job):
        raise NotFound(f"there is no job {word!r}" if not word.isdigit() else f"there is no job {word}", hint=_STATUS)
    return job


def may_read_files() -> bool:
    """Whether the agent may read any files of this machine for the caller, which it does with its own account."""
    asks = caller()
    return asks is None or asks.shares_account


def vouch(path: Path) -> None:
    """This folder of the agent's machine the agent itself has chosen, and the caller may have what is in it.

    For the rest of this request, wherever its client is.
    """
    _VOUCHED.set(_VOUCHED.get() | {Path(os.path.abspath(path))})


def is_vouched(path: Path) -> bool:
    return Path(os.path.abspath(path)) in _VOUCHED.get()


def expect_files(what: Path) -> None:
    """Raises NotAllowed if the agent must not read this file or folder for the caller."""
    if not may_read_files() and not is_vouched(what):
        raise NotAllowed(
            f"the agent does not read files for you: {what}",
            hint="it runs as another user; --no-sync sends no code, and --cwd DIR runs in a folder that the nodes have",
        )


def knows_values_of(user: str) -> bool:
    """Whether the caller may see, and use, the environment variables of this user's jobs, sweeps and services."""
    asks = caller()
    return asks is None or asks.knows_values_of(user)


def shown(job: Job) -> Job:
    """Without what is its user's alone, unless that is the caller: values of its environment, and whole hashes."""
    spec = job.spec
    if knows_values_of(job.user) or not (spec.env or spec.environment or spec.snapshot or spec.folders):
        return job
    known = without_values(job)
    return replace(known, spec=known.spec.with_short_hashes)


def hides_values(job: Job) -> bool:
    """Whether its environment has values that are not the caller's to see."""
    return not knows_values_of(job.user) and bool(job.spec.env or job.spec.environment)


def without_values(job: Job) -> Job:
    environment = job.spec.environment.masked if job.spec.environment else None
    hidden = tuple((name, HIDDEN) for name, _ in job.spec.env)
    return replace(job, spec=replace(job.spec, env=hidden, environment=environment))


def _anonymous(job: Job) -> Job:
    return replace(job, spec=replace(job.spec, name=PRIVATE, argv=(PRIVATE,), env=(), environment=None))


def _as_seen(claimed: str) -> str:
    asks = caller()
    return claimed if asks is None else asks.user


def _own_key(key: str) -> str:
    """So that nobody names a submission of somebody else, or one that the agent makes itself."""
    asks = caller()
    return key if asks is None or asks.shares_account else f"{asks.user}/{key}"


@dataclass(frozen=True, slots=True)
class _Settled:
    """A text of a request, changed by who has sent it. Unlike pydantic's own, it is loaded by commands, too."""

    by: Callable[[str], str]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.by, handler(source))


_STATUS = "see: ugro status"
# In a request: who the agent saw, whatever name the client claims.
SeenUser = Annotated[str, _Settled(_as_seen)]
OwnKey = Annotated[str, Between(1), _Settled(_own_key)]

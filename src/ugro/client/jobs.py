"""``client.jobs``: the part of the Python API for jobs.

Calls that follow a job survive the end of the agent: they start another one, and continue where they were.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload
from urllib.parse import urlencode

from ugro.client.http import AgentGone, account, asked_for, lines, trying_again
from ugro.client.job_logs import Following, LogChoice, LogPiece, step_of
from ugro.kernel.agent.model import Event
from ugro.kernel.jobs.model import Job, JobState, Origin
from ugro.kernel.jobs.operations import (
    FolderRead,
    FolderReading,
    GetJob,
    ListEvents,
    ListJobs,
    PlanJob,
    Planned,
    ReadFolders,
    Submit,
    SubmitJob,
    SubmitJobs,
    Submitted,
    WaitForJob,
)
from ugro.kernel.operations.request import Needs, Request
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import TimedOut, UgroError, UsageError

if TYPE_CHECKING:
    from typing import Unpack

    from ugro.client.client import Client
    from ugro.client.job_keys import JobKeys
    from ugro.features.experiments.model import Note
    from ugro.features.training.model import Headline
    from ugro.kernel.jobs.records import DryRun
    from ugro.kernel.operations.request import Request


A = TypeVar("A")
Ask = Callable[..., Any]

_MOST_JOBS = 1_000_000
_PAGE = 500  # jobs per request, so that the agent can answer others in between
_LATE_S = 30.0


class Jobs:
    """Created by ``Client``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    # --- submitting --------------------------------------------------------------------------------------------

    def submit(
        self,
        job: Path | str | Mapping[str, Any] | None = None,
        *,
        fields: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        key: str | None = None,
        force: bool = False,
        origin: Origin | None = None,
        **keys: Unpack[JobKeys],
    ) -> Job:
        """Submits a job, and returns it at once; ``wait`` waits for its end.

        ``job`` is the path of a job file, or a mapping with its keys. Keyword arguments are keys, too, and override it:
        ``submit("job.yaml", resources={"nodes": 2})``, ``submit(command=["echo", "hello"], name="greeting")``. They
        mean what they mean in the file (docs/jobs.md); ``JobKeys`` has their types. Names of command-line options with
        ``_`` for ``-`` are taken as well, such as ``nodes=2``; ``fields`` is a mapping of the same. Relative paths
        start at the current directory, those of a job file at the file. A variable in ``env`` whose value is None gets
        that of this process. The code in ``workdir`` is sent, with ``force`` whatever its size.

        Calls with the same ``key`` (any text of yours) submit one job. ``origin`` says where the code comes from.
        ``options`` are as the command line's, and errors name them as it does. Raises ConfigError for what is wrong.
        """
        asked = _submission(SubmitJob, job, (fields, keys), options, key=key, force=force, origin=origin)
        return self._settled(asked).job

    def submit_many(self, jobs: Iterable[Mapping[str, Any]], *, keys: Sequence[str] = ()) -> list[Job]:
        """Submits many jobs, each a mapping of keys as ``submit`` takes it: all of them, or on an error none."""
        named = chain(keys, repeat(None))
        common = _submit(Submit, None, {}, None, as_options=False)
        wanted = [
            replace(common, key=key or new_key(), fields=_plain_keys(fields))
            for fields, key in zip(jobs, named, strict=False)
        ]
        return list(self._client.ask(SubmitJobs(tuple(wanted))).jobs)

    def dry_run(
        self,
        job: Path | str | Mapping[str, Any] | None = None,
        *,
        fields: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        force: bool = False,
        **keys: Unpack[JobKeys],
    ) -> DryRun:
        """Returns the plan of the job if it were submitted now, given as to ``submit``. Nothing is submitted."""
        asked = _submission(PlanJob, job, (fields, keys), options, force=force)
        return self._settled(asked).dry_run

    @overload
    def _settled(self, asked: SubmitJob) -> Submitted: ...
    @overload
    def _settled(self, asked: PlanJob) -> Planned: ...
    def _settled(self, asked: SubmitJob | PlanJob) -> Submitted | Planned:
        """With the values of the variables that the agent needs for it, and of no others."""
        wanted: Request[Any] = asked
        answer: Submitted | Planned | Needs = self._client.ask(wanted)
        if isinstance(answer, Needs):
            again: Request[Any] = replace(asked, env=asked_for(answer.needs, None))
            answer = self._client.ask(again)
        if isinstance(answer, Needs):
            raise UgroError("the agent asks for the same variables again", hint="see: ugro agent logs")
        return answer

    def _ask(self, method: str, path: str, body: Any = None, **limits: float) -> Any:
        """Asks again if the agent ends meanwhile: all these requests can be repeated safely."""
        for _ in trying_again():
            with contextlib.suppress(AgentGone):
                return self._client.reach.ask(method, path, body, **limits)
        return None

    def _asked(self, asked: Request[A]) -> A:
        return asked.read(self._ask(*asked.to_wire()))

    # --- reading -----------------------------------------------------------------------------------------------

    def newest(self, limit: int | None = 50, *, states: Iterable[JobState] = ()) -> list[Job]:
        """The newest first; without a limit, all."""
        found = list[Job]()
        left = _MOST_JOBS if limit is None else limit
        while left > 0:
            size = min(left, _PAGE)
            before = found[-1].id if found else None
            page = self._client.ask(ListJobs(size, tuple(states), before)).jobs
            found += page
            # A page may be short because a job in it cannot be read.
            left = left - len(page) if page and size == _PAGE else 0
        return found

    def get(self, job: str | int) -> Job:
        """By id, by name (the newest of that name), or ``last``."""
        return self._client.ask(GetJob(str(job))).job

    def headline(self, job: str | int) -> Headline:
        """How far it is, how long it still takes, its loss, its speed, the use of its devices."""
        from ugro.features.training.operations import GetJobHeadline

        return self._asked(GetJobHeadline(str(job))).headline

    def loss(self, job: str | int, bins: int) -> list[float | None]:
        """Its loss, in at most so many bins; empty if it logs none."""
        from ugro.kernel.telemetry.model import main_loss

        keys = self._ask("GET", "/v1/metrics/keys?" + urlencode({"job": job}))["keys"]
        name = main_loss(str(one["key"]) for one in keys)
        if name is None:
            return []
        query = urlencode({"job": job, "key": name, "bins": bins})
        curves = self._ask("GET", f"/v1/metrics?{query}")["curves"]
        newest = max(curves, key=lambda one: (one["attempt"], -one["rank"]), default=None)
        return list(newest["means"]) if newest else []

    def note(self, job: str | int) -> Note:
        """The note and tags of a job."""
        from ugro.features.experiments.operations import GetJobNote

        return self._asked(GetJobNote(str(job))).note

    def set_note(
        self,
        job: str | int,
        text: str | None = None,
        *,
        tags: Sequence[str] | None = None,
        add: Sequence[str] = (),
        remove: Sequence[str] = (),
    ) -> Note:
        """None leaves a part as it is. ``tags`` replaces all tags; ``add`` and ``remove`` keep the others."""
        from ugro.features.experiments.operations import ChangeJobNote

        all_tags = None if tags is None else tuple(tags)
        return self._asked(ChangeJobNote(str(job), text, all_tags, tuple(add), tuple(remove))).note

    # --- following ---------------------------------------------------------------------------------------------

    def moves(self, job: str | int, *, timeout_s: float | None = None) -> Iterator[Job]:
        """Yields the job now and after each change, until it has ended; raises TimedOut."""
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        seen: Job | None = None
        for again in trying_again():
            left_s = None if timeout_s is None else max(0.0, deadline - time.monotonic())
            asked = WaitForJob(str(seen.id if seen else job), left_s)
            try:
                for found in self._client.follow(asked, timeout_s=None if left_s is None else left_s + _LATE_S):
                    again()
                    if seen is None or step_of(found) != step_of(seen):
                        seen = found
                        yield found
            except AgentGone:
                continue
            if seen is not None and not seen.is_final:
                raise TimedOut(f"job {seen.id} is still {seen.state} after {timeout_s:g} s: {seen.reason}")
            return

    def wait(self, job: str | int, *, timeout_s: float | None = None) -> Job:
        """The job when it has ended."""
        *_, last = self.moves(job, timeout_s=timeout_s)
        return last

    def logs(self, job: str | int, choice: LogChoice | None = None) -> Iterator[LogPiece]:
        """Yields what the ranks wrote, as it arrives."""
        following = Following(self._client, job, choice or LogChoice())
        return (one for one in following.pieces() if isinstance(one, LogPiece))

    def follow(self, job: str | int, *, ranks: Sequence[int] = ()) -> Iterator[Job | LogPiece]:
        """Yields the job after each change, and what its ranks write, from the start. The last item is the ended
        job."""
        choice = LogChoice(ranks=ranks, attempt="all", follow=True)
        return Following(self._client, job, choice, with_moves=True).pieces()

    def events(
        self,
        *,
        after: int = 0,
        job: str | int | None = None,
        since_unix_s: float | None = None,
        follow: bool = False,
    ) -> Iterator[Event]:
        """Yields events, the oldest first."""
        word = None if job is None else str(self.get(job).id)  # stays the same job, also for ``last``
        for again in trying_again():
            asked = ListEvents(after, word, since_unix_s, follow)
            try:
                for event in self._client.follow(asked, timeout_s=None):
                    after = event.seq
                    again()
                    yield event
            except AgentGone:
                continue
            return


S = TypeVar("S", bound=Submit)


def body_of(file: Path | None, fields: Mapping[str, Any] | None, key: str | None) -> dict[str, Any]:
    body = _submit(SubmitJob, file, fields, key).to_wire()[2]
    assert body is not None
    return body


def _submit(
    kind: type[S], file: Path | None, fields: Mapping[str, Any] | None, key: str | None, **more: Any
) -> S:
    path = file.absolute() if file else None
    return kind(account(), key or new_key(), path, dict(fields or {}), Path.cwd(), **{"as_options": True, **more})


def _submission(
    kind: type[S], job: Any, given: Iterable[Mapping[str, Any] | None], options: Mapping[str, Any] | None,
    *, key: str | None = None, **more: Any,
) -> S:  # fmt: skip
    if job is not None and not isinstance(job, str | os.PathLike | Mapping):
        hint = 'such as "job.yaml", or {"script": "train.py"}; keys can be keyword arguments, too'
        raise UsageError(f"expected the path of a job file or a mapping of its keys, got {job!r:.80}", hint=hint)
    file = Path(job) if isinstance(job, str | os.PathLike) else None
    found: dict[str, Any] = _plain_keys(job) if isinstance(job, Mapping) else {}
    for some in given:
        for name, value in _plain_keys(some or {}).items():
            known = found.get(name)
            if value == {}:
                continue
            found[name] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
    return _submit(kind, file, {**found, **(options or {})}, key, as_options=not found, **more)


def read_folders(
    client: Client, file: Path | None, fields: Mapping[str, Any]
) -> Iterator[FolderReading | FolderRead]:
    """Reads the folders of such a job as they are now. A job that is submitted next finds them read."""
    return client.follow(_submit(ReadFolders, file, fields, None))


def _plain_keys(keys: Any) -> dict[str, Any]:
    if not isinstance(keys, Mapping):
        raise UsageError(f"expected a mapping of keys of a job file, got {keys!r:.80}", hint='{"script": "train.py"}')
    return {str(name): _plain(str(name), value) for name, value in keys.items()}


def _plain(name: str, value: Any) -> Any:
    """As JSON takes it: paths are texts there."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}[{at}]", inner) for at, inner in enumerate(value)]
    what = type(value).__name__
    raise UsageError(f"{name}: expected texts, numbers, lists and mappings, got a value of type {what}")


def new_key() -> str:
    return os.urandom(16).hex()


# --- asking -----------------------------------------------------------------------------------------------------------
# What ``client.sweeps`` and ``client.services`` have in common: requests that may be repeated, until one is answered.
#
# A submission has a key, so the same one is made once. If the agent needs variables of ours for it, it says which, and
# gets those on the second request, and no others.


ANSWER_S = 60.0
T = TypeVar("T", bound="Report")


class Report(Protocol):
    @property
    def is_over(self) -> bool: ...


class Asking:
    def __init__(self, ask: Ask, stream: Ask) -> None:
        self._ask_once = ask
        self._stream = stream

    def _ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = ANSWER_S) -> Any:
        """Asks again if the agent ends meanwhile: all these requests can be repeated safely."""
        for _ in trying_again():
            with contextlib.suppress(AgentGone):
                return self._ask_once(method, path, body, timeout_s=timeout_s)
        return None

    def _submitted(
        self, path: str, body: dict[str, Any], env: Mapping[str, str] | None, *, timeout_s: float = ANSWER_S
    ) -> Any:
        """``env``: ours, if it is not given."""
        answer = self._ask("POST", path, body, timeout_s=timeout_s)
        if "needs" in answer:
            (body.get("request") or body)["submit"]["env"] = asked_for(answer["needs"], env)
            answer = self._ask("POST", path, body, timeout_s=timeout_s)
        return answer

    def _watched(self, kind: type[T], path: str, path_of: Callable[[T], str]) -> Iterator[T]:
        """Now and after changes, until it is over; survives the end of the agent. ``path_of`` what was found once."""
        for again in trying_again():
            try:
                for document in lines(self._stream("GET", path, timeout_s=None)):
                    found = decode(kind, document)
                    path = path_of(found)
                    again()
                    yield found
                    if found.is_over:
                        return
            except AgentGone:
                continue

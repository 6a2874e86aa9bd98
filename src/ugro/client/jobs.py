"""``client.jobs``: the part of the Python API for jobs.

Calls that follow a job survive the end of the agent: they start another one, and continue where they were.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote, urlencode

from ugro.client.http import AgentGone, account, asked_for, lines, trying_again
from ugro.client.job_logs import Following, LogChoice, LogPiece, job_path, step_of
from ugro.kernel.agent.model import Event
from ugro.kernel.jobs.model import Attempt, Folder, Job, JobState, Origin
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import TimedOut, UsageError

if TYPE_CHECKING:
    from typing import Unpack

    from ugro.client.job_keys import JobKeys
    from ugro.features.experiments.model import Note
    from ugro.features.training.model import Headline
    from ugro.kernel.files.model import JobResults
    from ugro.kernel.jobs.records import DryRun
    from ugro.kernel.operations.request import Request


A = TypeVar("A")
Ask = Callable[..., Any]

_MOST_JOBS = 1_000_000
_PAGE = 500  # jobs per request, so that the agent can answer others in between
_LATE_S = 30.0
_WITHDRAW_S = 10.0


@dataclass(frozen=True, slots=True)
class Details:
    job: Job
    attempts: tuple[Attempt, ...]


class Jobs:
    """Created by ``Client``."""

    def __init__(self, ask: Ask, stream: Ask) -> None:
        self._ask_once = ask
        self._stream = stream

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
        body = {**_body(job, (fields, keys), options, key), "force": force}
        answer = self._submit("/v1/jobs", {**body, "origin": asdict(origin) if origin else None})
        return decode(Job, answer["job"])

    def submit_many(self, jobs: Iterable[Mapping[str, Any]], *, keys: Sequence[str] = ()) -> list[Job]:
        """Submits many jobs, each a mapping of keys as ``submit`` takes it: all of them, or on an error none."""
        common = {**body_of(None, None, None), "as_options": False}
        bodies = [{**common, "key": new_key(), "fields": _plain_keys(keys)} for keys in jobs]
        for body, key in zip(bodies, keys, strict=False):
            body["key"] = key
        answer = self._ask("POST", "/v1/jobs/batch", {"jobs": bodies})
        return [decode(Job, document) for document in answer["jobs"]]

    def withdraw(self, key: str) -> Job | None:
        """Withdraws a ``submit`` or ``retry`` with this key that was interrupted: it submits nothing from now on.

        Returns its job if it was recorded before: that job continues.
        """
        answer = self._ask("DELETE", f"/v1/submissions/{quote(key, safe='')}", timeout_s=_WITHDRAW_S)
        return decode(Job, answer["job"]) if answer["job"] else None

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
        from ugro.kernel.jobs.records import DryRun  # rarely needed

        answer = self._submit("/v1/jobs/plan", {**_body(job, (fields, keys), options, None), "force": force})
        return decode(DryRun, answer["dry_run"])

    def retry(
        self, job: str | int, *, key: str | None = None, exact: bool = False, put_back: bool | None = None
    ) -> Job:
        """Runs an ended job again: a new job with the same spec. ``exact``: fails unless its code is still stored.

        After a failure it finds the files that the job made in its working directory, unless ``put_back`` is False.
        """
        body = {"key": key or new_key(), "user": account(), "exact": exact, "put_back": put_back}
        return decode(Job, self._ask("POST", f"{job_path(job)}/retry", body))

    def cancel(self, job: str | int) -> Job:
        return decode(Job, self._ask("POST", f"{job_path(job)}/cancel"))

    def _submit(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._ask("POST", path, body)
        if "needs" in answer:
            answer = self._ask("POST", path, {**body, "env": asked_for(answer["needs"], None)})
        return answer

    def _ask(self, method: str, path: str, body: Any = None, **limits: float) -> Any:
        """Asks again if the agent ends meanwhile: all these requests can be repeated safely."""
        for _ in trying_again():
            with contextlib.suppress(AgentGone):
                return self._ask_once(method, path, body, **limits)
        return None

    def _asked(self, asked: Request[A]) -> A:
        return asked.read(self._ask(*asked.to_wire()))

    # --- reading -----------------------------------------------------------------------------------------------

    def newest(self, limit: int | None = 50, *, states: Iterable[JobState] = ()) -> list[Job]:
        """The newest first; without a limit, all."""
        wanted, found = [("state", state.value) for state in states], list[Job]()
        left = _MOST_JOBS if limit is None else limit
        while left > 0:
            size = min(left, _PAGE)
            cursor = [("before", str(found[-1].id))] if found else []
            query = urlencode([("limit", str(size)), *wanted, *cursor])
            page = [decode(Job, document) for document in self._ask("GET", f"/v1/jobs?{query}")["jobs"]]
            found += page
            # A page may be short because a job in it cannot be read.
            left = left - len(page) if page and size == _PAGE else 0
        return found

    def get(self, job: str | int) -> Job:
        """By id, by name (the newest of that name), or ``last``."""
        return self.details(job).job

    def details(self, job: str | int) -> Details:
        """With all its attempts, and how each failed."""
        return decode(Details, self._ask("GET", job_path(job)))

    def file(self, job: str | int) -> str:
        """As a job file, to edit and submit; values that look secret are left out."""
        return str(self._ask("GET", f"{job_path(job)}/file")["file"])

    def why(self, job: str | int) -> dict[str, Any]:
        answer: dict[str, Any] = self._ask("GET", f"{job_path(job)}/why")
        return answer

    def results(
        self, job: str | int, *, attempt: int | None = None, all_files: bool = False
    ) -> tuple[Job, JobResults]:
        """The job, and the results of its newest attempt or of another; with the names of 1,000 files, or of all."""
        from ugro.kernel.files.model import JobResults

        asked = [f"attempt={attempt}"] * (attempt is not None) + ["all_files=true"] * all_files
        answer = self._ask("GET", f"{job_path(job)}/results{'?' if asked else ''}{'&'.join(asked)}")
        return decode(Job, answer["job"]), decode(JobResults, answer["results"])

    def brief_results(self, job: str | int) -> JobResults:
        """How many files are here and on the nodes, without their names: fast, and asks no node."""
        from ugro.kernel.files.model import JobResults

        return decode(JobResults, self._ask("GET", f"{job_path(job)}/results/brief")["results"])

    def fetch_results(
        self, job: str | int, patterns: Sequence[str] = (), *, attempt: int | None = None
    ) -> tuple[Job, JobResults]:
        """Starts to fetch files that were left on the nodes: all, or those that match. ``results`` shows progress."""
        from ugro.kernel.files.model import JobResults

        body = {"patterns": list(patterns), "attempt": attempt}
        answer = self._ask("POST", f"{job_path(job)}/results/fetch", body)
        return decode(Job, answer["job"]), decode(JobResults, answer["results"])

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

    def remove_results(self, job: str | int) -> tuple[Job, tuple[str, ...]]:
        """Deletes the results here and on the nodes, and keeps the logs. Also returns what failed."""
        answer = self._ask("DELETE", f"{job_path(job)}/results")
        return decode(Job, answer["job"]), tuple(answer["problems"])

    # --- following ---------------------------------------------------------------------------------------------

    def moves(self, job: str | int, *, timeout_s: float | None = None) -> Iterator[Job]:
        """Yields the job now and after each change, until it has ended; raises TimedOut."""
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        seen: Job | None = None
        for again in trying_again():
            left_s = None if timeout_s is None else max(0.0, deadline - time.monotonic())
            try:
                for found in self._moves(seen.id if seen else job, left_s):
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
        following = Following(self._stream, job, choice or LogChoice())
        return (one for one in following.pieces() if isinstance(one, LogPiece))

    def follow(self, job: str | int, *, ranks: Sequence[int] = ()) -> Iterator[Job | LogPiece]:
        """Yields the job after each change, and what its ranks write, from the start. The last item is the ended
        job."""
        choice = LogChoice(ranks=ranks, attempt="all", follow=True)
        return Following(self._stream, job, choice, with_moves=True).pieces()

    def events(
        self,
        *,
        after: int = 0,
        job: str | int | None = None,
        since_unix_s: float | None = None,
        follow: bool = False,
    ) -> Iterator[Event]:
        """Yields events, the oldest first."""
        query: dict[str, Any] = {"follow": str(follow).lower()}
        if job is not None:
            query["job"] = self.get(job).id  # stays the same job, also for ``last``
        if since_unix_s is not None:
            query["since"] = since_unix_s
        for again in trying_again():
            try:
                for document in lines(self._live(f"/v1/events?{urlencode({**query, 'after': after})}")):
                    event = decode(Event, document)
                    after = event.seq
                    again()
                    yield event
            except AgentGone:
                continue
            return

    def _moves(self, job: str | int, timeout_s: float | None) -> Iterator[Job]:
        query = "" if timeout_s is None else f"?timeout_s={timeout_s}"
        silence_s = None if timeout_s is None else timeout_s + _LATE_S
        for document in lines(self._stream("GET", f"{job_path(job)}/wait{query}", timeout_s=silence_s)):
            yield decode(Job, document)

    def _live(self, path: str) -> Iterator[bytes]:
        stream: Iterator[bytes] = self._stream("GET", path, timeout_s=None)
        return stream


def body_of(file: Path | None, fields: Mapping[str, Any] | None, key: str | None) -> dict[str, Any]:
    return {
        "key": key or new_key(),
        "user": account(),
        "file": str(file.absolute()) if file else None,
        "fields": dict(fields or {}),
        "as_options": True,
        "here": os.getcwd(),
    }


def _body(
    job: Any,
    given: Iterable[Mapping[str, Any] | None],
    options: Mapping[str, Any] | None,
    key: str | None,
) -> dict[str, Any]:
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
    body = body_of(file, {**found, **(options or {})}, key)
    return {**body, "as_options": not found}


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


# --- folders ----------------------------------------------------------------------------------------------------------
# ``client.folders``: reads the folders of a job before it is submitted, so that one can see how far it is.


@dataclass(frozen=True, slots=True)
class FolderReading:
    """How much of a folder was read; of what was read before, nothing is read again."""

    path: str
    bytes: int
    total: int


class Folders:
    """Created by ``Client``."""

    def __init__(self, stream: Ask) -> None:
        self._stream = stream

    def read(
        self, file: Path | None = None, *, fields: Mapping[str, Any] | None = None
    ) -> Iterator[FolderReading | Folder]:
        """The folders of such a job, stored as they are now; a job that is submitted next finds them read."""
        for document in lines(self._stream("POST", "/v1/folders", body_of(file, fields, None))):
            if "folder" in document:
                yield decode(Folder, document["folder"])
            else:
                yield FolderReading(document["reading"], document["bytes"], document["total"])

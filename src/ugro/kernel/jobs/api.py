"""The API's routes for jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from pydantic import FailFast, Field

from ugro.kernel.access.caller import OwnKey, SeenUser, shown
from ugro.kernel.files.results.log_stream import Selection, log_text
from ugro.kernel.files.results.service import MOST_LISTED, ResultService
from ugro.kernel.jobs.config.file import job_file
from ugro.kernel.jobs.model import JobState
from ugro.kernel.jobs.rows import Listed
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.submission import Needs, Submit
from ugro.kernel.operations.responses import Body, LiveResponse, json_response, ndjson, while_connected
from ugro.kernel.support.errors import UsageError
from ugro.kernel.support.quantities import is_number

_FRAMES = "application/vnd.ugro.frames"
_MOST_AT_ONCE = 10_000
_MOST_JOBS = 1000  # of one answer, during which the agent does nothing else
_LARGEST_ID = 1 << 62
_LATEST_S = 4e9  # a time of this century


class BatchBody(Body):
    # The first mistake is enough: of a few MiB that are all wrong, each would be described.
    jobs: Annotated[list[Submit], FailFast(), Field(max_length=_MOST_AT_ONCE)]


class RetryBody(Body):
    key: OwnKey
    user: SeenUser
    exact: bool = False
    put_back: bool | None = None  # None: as the job was submitted


def add_job_routes(app: FastAPI, jobs: JobService) -> None:
    _add_submit_routes(app, jobs)

    @app.get("/v1/jobs")
    async def newest(
        limit: Annotated[int, Query(ge=1, le=_MOST_JOBS)] = 50,
        state: Annotated[list[JobState], Query()] = [],  # noqa: B006  # FastAPI copies it for each request
        before: Annotated[int | None, Query(ge=0, lt=_LARGEST_ID)] = None,
    ) -> Response:
        """The newest first, up to 1,000; ``before``: only jobs with a smaller number, for the next page."""
        return json_response({"jobs": await jobs.page(Listed(tuple(state), before=before, limit=limit))})

    @app.get("/v1/jobs/{word}")
    async def details(word: str) -> Response:
        """By number, by name (the newest of that name), or ``last``; with all its attempts."""
        return json_response(await jobs.details(word))

    @app.get("/v1/jobs/{word}/file")
    async def file(word: str) -> Response:
        """As a job file, without values that look secret."""
        return json_response({"file": job_file(shown(await jobs.find(word)).spec)})

    @app.post("/v1/jobs/{word}/cancel")
    async def cancel(word: str) -> Response:
        """It ends soon; one that has ended is answered as it is."""
        return json_response(await jobs.cancel(word))

    @app.get("/v1/jobs/{word}/why")
    async def reason(word: str) -> Response:
        """Why it waits, and when it may start."""
        return json_response(await jobs.why(word))


def _add_submit_routes(app: FastAPI, jobs: JobService) -> None:
    @app.post("/v1/jobs")
    async def submit(request: Request, body: Submit) -> Response:
        """``{"job"}``, or ``{"needs"}``: the variables whose values the client must send in ``env``."""

        async def answer() -> Response:
            found = await jobs.submit(body)
            return json_response({"needs": found.variables} if isinstance(found, Needs) else {"job": found})

        return await while_connected(request, answer())

    @app.post("/v1/jobs/batch")
    async def submit_many(request: Request, body: BatchBody) -> Response:
        """All of them, or on an error none."""

        async def answer() -> Response:
            return json_response({"jobs": await jobs.submit_many(body.jobs)})

        return await while_connected(request, answer())

    @app.delete("/v1/submissions/{key}")
    async def withdraw(key: OwnKey) -> Response:
        """``{"job"}``: the job if it was recorded before this request; null if it is not submitted any more."""
        return json_response({"job": await jobs.withdraw(key)})

    @app.post("/v1/jobs/plan")
    async def dry_run(body: Submit) -> Response:
        """``{"dry_run"}``: what submitting it now would do, or ``{"needs"}``. Nothing is submitted."""
        answer = await jobs.dry_run(body)
        return json_response({"needs": answer.variables} if isinstance(answer, Needs) else {"dry_run": answer})

    @app.post("/v1/jobs/{word}/retry")
    async def retry(word: str, body: RetryBody) -> Response:
        """A new job with the same spec."""
        return json_response(await jobs.retry(word, body.user, body.key, exact=body.exact, puts_back=body.put_back))


def add_job_streams(app: FastAPI, jobs: JobService) -> None:
    @app.post("/v1/folders")
    async def read_folders(body: Submit) -> Response:
        """``{"reading", "bytes", "total"}`` again and again, and ``{"folder"}`` for each folder of such a job."""
        return LiveResponse(ndjson(jobs.read_folders(body)), "application/x-ndjson")

    @app.get("/v1/jobs/{word}/wait")
    async def wait(word: str, timeout_s: Annotated[float | None, Query(ge=0)] = None) -> Response:
        """The job now and after each change, until it has ended or the time is over."""
        number = (await jobs.find(word)).id
        return LiveResponse(ndjson(jobs.moves(number, timeout_s)), "application/x-ndjson")

    @app.get("/v1/events")
    async def events(
        after: int = 0,
        job: str | None = None,
        since: Annotated[float | None, Query(ge=0, le=_LATEST_S)] = None,  # seconds since the epoch
        follow: bool = False,
    ) -> Response:
        """The oldest first; with ``follow`` until the client leaves."""
        number = (await jobs.find(job)).id if job else None
        return LiveResponse(ndjson(jobs.events(after, number, since, follow)), "application/x-ndjson")

    @app.get("/v1/jobs/{word}/log")
    async def log(word: str, wanted: Annotated[TextQuery, Query()]) -> Response:
        """The log of one rank as text; with ``follow`` until the job has ended. In brackets: what UGRO says of it."""
        selection = wanted.selection()
        job = await jobs.check_logs(word, selection)
        return LiveResponse(log_text(jobs.logs(job.id, selection)), "text/plain; charset=utf-8")

    @app.get("/v1/jobs/{word}/logs")
    async def logs(word: str, wanted: Annotated[LogQuery, Query()]) -> Response:
        """For each rank CALL with where it is, and OUT with its bytes; RESULT with the job, or ERROR."""
        selection = wanted.selection()
        job = await jobs.check_logs(word, selection)
        return LiveResponse(jobs.logs(job.id, selection), _FRAMES)


class TextQuery(Body):
    rank: Annotated[int, Field(ge=0)] = 0
    attempt: Annotated[int, Field(ge=1)] | None = None  # None: the newest, and with ``follow`` later ones
    tail: Annotated[int, Field(ge=0)] | None = None
    follow: bool = False

    def selection(self) -> Selection:
        return Selection(ranks=(self.rank,), attempt=self.attempt, tail=self.tail, follow=self.follow)


class LogQuery(Body):
    rank: tuple[Annotated[int, Field(ge=0)], ...] = ()
    node: tuple[str, ...] = ()
    attempt: Annotated[int, Field(ge=1)] | None = None
    from_attempt: Annotated[int, Field(ge=1)] | None = None
    since: Annotated[float, Field(ge=0, le=_LATEST_S)] | None = None  # seconds since the epoch
    tail: Annotated[int, Field(ge=0)] | None = None
    follow: bool = False
    moves: bool = False
    at: tuple[str, ...] = ()  # ATTEMPT.RANK:OFFSET, where a disconnected client continues

    def selection(self) -> Selection:
        return Selection(
            ranks=self.rank,
            nodes=self.node,
            attempt=self.attempt,
            from_attempt=self.from_attempt,
            since_unix_s=self.since,
            tail=self.tail,
            follow=self.follow,
            with_moves=self.moves,
            positions=dict(_position(text) for text in self.at),
        )


def _position(text: str) -> tuple[tuple[int, int], int]:
    place, _, offset = text.partition(":")
    attempt, _, rank = place.partition(".")
    if not all(map(is_number, (attempt, rank, offset))):
        raise UsageError(f"at: expected ATTEMPT.RANK:OFFSET, got {text:.60}")
    return (int(attempt), int(rank)), int(offset)


# --- results ----------------------------------------------------------------------------------------------------------
# The API's routes for job results.


Attempt = Annotated[int | None, Query(ge=1)]


class FetchBody(Body):
    patterns: list[str] = Field(default_factory=list, max_length=1000)
    attempt: int | None = Field(default=None, ge=1)


def add_result_routes(app: FastAPI, jobs: JobService, results: ResultService) -> None:
    @app.get("/v1/jobs/{word}/results")
    async def of(word: str, attempt: Attempt = None, all_files: bool = False) -> Response:
        """Of the newest attempt or another, with the names of 1,000 files or of all."""
        job = await jobs.find(word)
        found = await results.of(job, attempt, most_listed=None if all_files else MOST_LISTED)
        return json_response({"job": job, "results": found})

    @app.get("/v1/jobs/{word}/results/brief")
    async def brief(word: str) -> Response:
        """How many files are here and on the nodes, without their names."""
        return json_response({"results": await results.brief(await jobs.find(word))})

    @app.post("/v1/jobs/{word}/results/fetch")
    async def fetch(word: str, body: FetchBody) -> Response:
        """Begins; how far it is, and what failed, is in the results."""
        job = await jobs.find(word)
        await results.fetch(job, body.patterns, body.attempt)
        return json_response({"job": job, "results": await results.of(job, body.attempt)})

    @app.delete("/v1/jobs/{word}/results")
    async def remove(word: str) -> Response:
        """Here and on the nodes; logs stay. ``problems``: what failed."""
        jobs.expect_removable()
        job = await jobs.find(word)
        problems = await results.remove(job)
        return json_response({"job": await jobs.find(str(job.id)), "problems": problems})

"""Routes for a job's logs: pages, search, and the raw file."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response
from fastapi.responses import FileResponse

from ugro.agent.agent import Agent
from ugro.agent.api.app import http_status
from ugro.agent.api.responses import Body, json_response
from ugro.agent.artifacts.job_folder import rank_log
from ugro.agent.artifacts.log_stream import ranks_of
from ugro.core.errors import NotFound, UgroError, UsageError
from ugro.core.job import Job
from ugro.core.support.codec import dumps
from ugro.core.support.quantity import is_number
from ugro.web.logs.pages import Logs, cursor_at, page_after, page_before
from ugro.web.logs.search import END, Position, find, line_after
from ugro.web.site import Site

_LONGEST_SEARCH = 200
Attempt = Annotated[int | None, Query(ge=1)]


class PageQuery(Body):
    """Cursors are ``RANK:OFFSET,…``. Without a cursor, the end of the log; without a rank, all ranks."""

    attempt: Attempt = None
    rank: tuple[int, ...] = ()
    before: str | None = None
    after: str | None = None
    at: str | None = None


class SearchQuery(Body):
    """Searches from the line after ``line``, or exactly from ``place``; both are RANK:OFFSET."""

    q: Annotated[str, Query(min_length=1, max_length=_LONGEST_SEARCH, pattern=r"^[^\r\n]+$")]
    attempt: Attempt = None
    rank: tuple[int, ...] = ()
    line: str | None = None
    place: str | None = None
    back: bool = False


@dataclass(frozen=True, slots=True)
class _Found:
    job: Job
    attempt: int
    logs: Logs


def add_log_pages(app: FastAPI, site: Site) -> None:
    agent = site.agent

    @app.get("/jobs/{number}/log")
    async def page(number: int, wanted: Annotated[PageQuery, Query()]) -> Response:
        return await _answer(_page(agent, number, wanted))

    @app.get("/jobs/{number}/log/search")
    async def search(number: int, wanted: Annotated[SearchQuery, Query()]) -> Response:
        return await _answer(_search(agent, number, wanted))

    @app.get("/jobs/{number}/log/raw")
    async def raw(number: int, rank: int = 0, attempt: Attempt = None) -> Response:
        found = await _logs(agent, number, attempt, (rank,))
        path = found.logs.get(rank)
        if path is None or not path.exists():
            raise NotFound(f"rank {rank} of job {number} has written nothing yet")
        name = f"job-{number}-attempt-{found.attempt}-rank-{rank}.log"
        return FileResponse(path, media_type="text/plain; charset=utf-8", filename=name)


async def _logs(agent: Agent, number: int, attempt: int | None, wanted: tuple[int, ...]) -> _Found:
    """Reads the job before its logs, so that the logs of an ended job are complete."""
    job = await agent.store.jobs.get(number)
    chosen = attempt or job.attempt
    if attempt is not None and attempt > max(1, job.attempt):  # a queued job has attempt 0; its first is allowed
        raise NotFound(f"job {number} has no attempt {attempt}", hint=f"it has {job.attempt}")
    known = await ranks_of(agent.store.jobs, job, chosen) if chosen else {}
    if known and (missing := sorted(set(wanted) - set(known))):
        raise NotFound(f"job {number} has no rank {missing[0]}", hint=f"its ranks are 0 to {max(known)}")
    if job.is_final:
        await agent.jobs.make_readable(number)
    folder = agent.home.jobs / str(number)
    logs = {rank: rank_log(folder, chosen, rank) for rank in known if not wanted or rank in wanted}
    return _Found(job, chosen, logs)


async def _page(agent: Agent, number: int, wanted: PageQuery) -> dict[str, Any]:
    found = await _logs(agent, number, wanted.attempt, wanted.rank)
    head = {"attempt": found.attempt, "is_live": not found.job.is_final}
    return {**head, **await asyncio.to_thread(_read, found.logs, wanted)}


def _read(logs: Logs, wanted: PageQuery) -> dict[str, Any]:
    if wanted.at is not None:
        position = _position(wanted.at, logs)
        return page_after(logs, cursor_at(logs, position.rank, position.offset)).to_wire()
    if wanted.after is not None:
        return page_after(logs, _cursor(wanted.after)).to_wire()
    return page_before(logs, _cursor(wanted.before) if wanted.before is not None else None).to_wire()


async def _search(agent: Agent, number: int, wanted: SearchQuery) -> dict[str, Any]:
    found = await _logs(agent, number, wanted.attempt, wanted.rank)
    return await asyncio.to_thread(_find, found.logs, wanted)


def _find(logs: Logs, wanted: SearchQuery) -> dict[str, Any]:
    if not logs:
        return {"match": None, "next": None, "searched_bytes": 0}
    if wanted.line is not None:
        position = _position(wanted.line, logs)
        start = position if wanted.back else line_after(logs, position)
    else:
        start = _position(wanted.place, logs) if wanted.place else _edge(logs, is_backwards=wanted.back)
    return asdict(find(logs, wanted.q, start, is_backwards=wanted.back))


def _edge(logs: Logs, *, is_backwards: bool) -> Position:
    return Position(max(logs), END) if is_backwards else Position(min(logs), 0)


async def _answer(work: Awaitable[dict[str, Any]]) -> Response:
    try:
        return json_response(await work)
    except UgroError as error:
        return Response(dumps({"error": error.to_wire()}), http_status(error), media_type="application/json")


def _cursor(text: str) -> dict[int, int]:
    """An empty cursor means the beginning: it comes from a page that did not know the ranks yet."""
    return {position.rank: position.offset for position in map(_parsed, text.split(","))} if text else {}


def _position(text: str, logs: Logs) -> Position:
    position = _parsed(text)
    if position.rank not in logs:
        raise NotFound(f"no rank {position.rank} in these logs")
    return position


def _parsed(text: str) -> Position:
    rank, colon, offset = text.partition(":")
    if not (colon and is_number(rank) and is_number(offset)):
        raise UsageError(f"expected RANK:OFFSET, got {text:.60}")
    return Position(int(rank), int(offset))

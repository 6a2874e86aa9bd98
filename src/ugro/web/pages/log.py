"""Routes for a job's logs: pages, search, and the raw file."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response
from fastapi.responses import FileResponse

from ugro.kernel.agent.agent import Agent
from ugro.kernel.files.results.job_folder import rank_log
from ugro.kernel.files.results.log_mirror import line_begin
from ugro.kernel.files.results.log_stream import ranks_of
from ugro.kernel.jobs.model import Job
from ugro.kernel.operations.app import http_status
from ugro.kernel.operations.responses import Body, json_response
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotFound, UgroError, UsageError
from ugro.kernel.support.quantities import is_number
from ugro.web.pages.log_pages import Logs, cursor_at, page_after, page_before, sizes_of
from ugro.web.site import Site

# --- search -----------------------------------------------------------------------------------------------------------
# Search in logs of any size, forwards or backwards, in steps of limited size. These functions block.


STEP_BYTES = 48 * 1024 * 1024
_BLOCK = 1024 * 1024
END = 1 << 62  # after any log


@dataclass(frozen=True, slots=True)
class Position:
    rank: int
    offset: int


@dataclass(frozen=True, slots=True)
class Found:
    match: Position | None  # start of the matching line
    next: Position | None  # where to continue; None: everything was searched
    searched_bytes: int


def find(logs: Logs, text: str, start: Position, *, is_backwards: bool, limit_bytes: int = STEP_BYTES) -> Found:
    """The first line with the text from ``start`` on, or the last one before it. Case does not matter."""
    wanted = text.encode().lower()
    searched = 0
    for rank in _ranks(logs, start.rank, is_backwards=is_backwards):
        size = sizes_of({rank: logs[rank]})[rank]
        offset = start.offset if rank == start.rank else (END if is_backwards else 0)
        blocks = _backwards(offset, size) if is_backwards else _forwards(offset, size)
        for begin, end in blocks:
            at = _in_block(logs, rank, (begin, end), wanted, is_backwards=is_backwards)
            searched += end - begin
            if at is not None:
                return Found(Position(rank, line_begin(logs[rank], at, 0)), Position(rank, at), searched)
            if searched >= limit_bytes:
                return Found(None, Position(rank, begin if is_backwards else end), searched)
    return Found(None, None, searched)


def line_after(logs: Logs, start: Position) -> Position:
    """The start of the next line or, if the line is very long, a position within it."""
    size = sizes_of({start.rank: logs[start.rank]})[start.rank]
    if start.offset >= size:
        return start
    with logs[start.rank].open("rb") as file:
        file.seek(start.offset)
        return Position(start.rank, start.offset + len(file.readline(_BLOCK)))


def _ranks(logs: Logs, first: int, *, is_backwards: bool) -> list[int]:
    ranks = sorted(logs, reverse=is_backwards)
    return [rank for rank in ranks if (rank <= first if is_backwards else rank >= first)]


def _forwards(begin: int, size: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, size, _BLOCK):
        yield at, min(size, at + _BLOCK)


def _backwards(end: int, size: int) -> Iterator[tuple[int, int]]:
    at = min(end, size)
    while at > 0:
        yield max(0, at - _BLOCK), at
        at = max(0, at - _BLOCK)


def _in_block(logs: Logs, rank: int, block: tuple[int, int], wanted: bytes, *, is_backwards: bool) -> int | None:
    begin, end = block
    # Also matches that start in this block and end in the next; no two blocks contain the same start.
    with logs[rank].open("rb") as file:
        file.seek(begin)
        content = file.read(end - begin + len(wanted) - 1).lower()
    at = content.rfind(wanted) if is_backwards else content.find(wanted)
    return begin + at if 0 <= at < end - begin else None


# --- log --------------------------------------------------------------------------------------------------------------


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

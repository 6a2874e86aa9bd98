"""A job's outputs: the list, a preview of one file, its download, and all of them as one archive.

The files were written by jobs on nodes and may be hostile. They are sent as attachments in a sandbox, never with a type
that a browser executes, and images only if their first bytes are those of an image.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Generator
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote

from fastapi import FastAPI, Query, Request, Response

from ugro.agent.agent import Agent
from ugro.agent.api.responses import LiveResponse
from ugro.agent.artifacts.result_files import archive, open_result, pieces, size_of
from ugro.agent.support.aio import to_the_end
from ugro.core.errors import NotFound
from ugro.web.site import Site
from ugro.web.views.previews import HEAD_BYTES, image_type, preview

_NO_TYPE = "application/octet-stream"
_SANDBOX = {"content-security-policy": "default-src 'none'; sandbox", "x-content-type-options": "nosniff"}
Name = Annotated[str, Query(min_length=1, max_length=8192)]


def add_output_pages(app: FastAPI, site: Site) -> None:
    agent = site.agent

    @app.get("/jobs/{number}/outputs")
    async def outputs(request: Request, number: int) -> Response:
        job = await agent.store.jobs.get(number)
        results = await agent.results.of(job) if job.attempt or job.cached_from else None
        return await site.render(request, "job_outputs.html", job=job, results=results)

    @app.get("/jobs/{number}/file")
    async def one(request: Request, number: int, name: Name) -> Response:
        job = await agent.store.jobs.get(number)
        with await _opened(agent, number, name) as file:
            size = size_of(file)
            shown = preview(name, await asyncio.to_thread(file.read, HEAD_BYTES), size)
        cli = f"ugro results {number} --pull DIR"
        known: dict[str, Any] = {"job": job, "name": name, "size": size, "preview": shown, "head_bytes": HEAD_BYTES}
        return await site.render(request, "job_file.html", cli=cli, **known)

    _add_downloads(app, agent)


def _add_downloads(app: FastAPI, agent: Agent) -> None:
    @app.get("/jobs/{number}/file/raw")
    async def raw(number: int, name: Name) -> Response:
        file = await _opened(agent, number, name)
        return _sent(file, name.rpartition("/")[2], _NO_TYPE)

    @app.get("/jobs/{number}/file/image")
    async def image(number: int, name: Name) -> Response:
        file = await _opened(agent, number, name)
        kind = image_type(await asyncio.to_thread(file.read, 16))
        if kind is None:
            file.close()
            raise NotFound("this file is no image that a browser may draw", hint="download it")
        file.seek(0)
        return _sent(file, name.rpartition("/")[2], kind)

    @app.get("/jobs/{number}/outputs.tar")
    async def everything(number: int) -> Response:
        job = await agent.store.jobs.get(number)
        parts, top = await agent.results.parts(job), f"job-{number}"
        answer = LiveResponse(_in_thread(archive(parts, top)), "application/x-tar")
        answer.headers.update(_SANDBOX | {"content-disposition": attachment(f"{top}-{job.spec.name}.tar")})
        return answer


async def _opened(agent: Agent, number: int, name: str) -> BinaryIO:
    parts = await agent.results.parts(await agent.store.jobs.get(number))
    return await asyncio.to_thread(open_result, parts, name)


def _sent(file: BinaryIO, name: str, media_type: str) -> Response:
    size = size_of(file)
    answer = LiveResponse(_in_thread(_contents(file, size)), media_type)
    answer.headers.update(_SANDBOX | {"content-disposition": attachment(name), "content-length": str(size)})
    return answer


def _contents(file: BinaryIO, size: int) -> Generator[bytes]:
    with file:
        yield from pieces(file, size)


async def _in_thread(chunks: Generator[bytes]) -> AsyncGenerator[bytes]:
    """One piece at a time: the next one is read when the browser has taken this one."""
    with contextlib.closing(chunks):
        while piece := await to_the_end(lambda: next(chunks, b"")):
            yield piece


def attachment(name: str) -> str:
    """For any name, also one with quotes or line breaks."""
    plain = re.sub(r"[^A-Za-z0-9._ -]", "_", name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"

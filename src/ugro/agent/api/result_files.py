"""The API's routes for the files of a job's results: for clients on other machines, which cannot open them.

A name is quoted as in a URL: it need not be text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote_from_bytes

from fastapi import FastAPI, Query, Response
from pydantic import Field

from ugro.agent.api.responses import Body, LiveResponse, ndjson
from ugro.agent.artifacts.result_files import opened_files, pieces, size_of
from ugro.agent.jobs.results import ResultService
from ugro.agent.jobs.service import JobService
from ugro.core.errors import NotFound, UgroError
from ugro.core.results import Part
from ugro.core.support.codec import dumps
from ugro.remote import wire

_FRAMES = "application/vnd.ugro.frames"
_BATCH = 500
_MOST_FILES = 1000  # in one request
Attempt = Annotated[int | None, Query(ge=1)]


class WantedFile(Body):
    name: str = Field(max_length=16384)
    offset: int = Field(default=0, ge=0)  # bytes that the client has


class ContentBody(Body):
    files: list[WantedFile] = Field(max_length=_MOST_FILES)
    attempt: int | None = Field(default=None, ge=1)
    only_hash: bool = False


def add_result_file_routes(app: FastAPI, jobs: JobService, results: ResultService) -> None:
    async def parts_of(word: str, attempt: int | None) -> tuple[Part, ...]:
        return (await results.of(await jobs.find(word), attempt, most_listed=0)).parts

    @app.get("/v1/jobs/{word}/results/files")
    async def files(word: str, attempt: Attempt = None) -> Response:
        """``{"name", "bytes", "mode", "modified_ns"}`` for each."""
        return LiveResponse(ndjson(_listed(await parts_of(word, attempt))), "application/x-ndjson")

    @app.post("/v1/jobs/{word}/results/content")
    async def content(word: str, body: ContentBody) -> Response:
        """For each file CALL with its name, OUT with its bytes, RESULT with its hash; or ERROR."""
        return LiveResponse(_contents(await parts_of(word, body.attempt), body), _FRAMES)


async def _listed(parts: Sequence[Part]) -> AsyncGenerator[list[dict[str, Any]]]:
    found = opened_files(parts)
    while batch := await asyncio.to_thread(_some, found):
        yield batch


def _some(found: Iterator[tuple[bytes, BinaryIO]]) -> list[dict[str, Any]]:
    batch = []
    for name, file in found:
        with file:
            about = os.fstat(file.fileno())
        mode, size = stat.S_IMODE(about.st_mode), about.st_size
        batch.append({"name": quote_from_bytes(name), "bytes": size, "mode": mode, "modified_ns": about.st_mtime_ns})
        if len(batch) >= _BATCH:
            break
    return batch


async def _contents(parts: Sequence[Part], body: ContentBody) -> AsyncGenerator[bytes]:
    wanted = {one.name: one.offset for one in body.files}
    found = opened_files(parts)
    while wanted and (opened := await asyncio.to_thread(next, found, None)) is not None:
        name, file = quote_from_bytes(opened[0]), opened[1]
        with file:
            if name not in wanted:
                continue
            offset = wanted.pop(name)
            yield wire.message(wire.CALL, 0, {"name": name})
            try:
                async with contextlib.aclosing(_content(file, offset, body.only_hash)) as frames:
                    async for frame in frames:
                        yield frame
            except OSError as error:
                yield _error(UgroError(f"{name}: {(error.strerror or str(error)).lower()}"))
    for name in wanted:
        yield wire.message(wire.CALL, 0, {"name": name})
        yield _error(NotFound(f"{name}: there is no such file any more", hint="it was replaced or removed; try again"))


async def _content(file: BinaryIO, offset: int, only_hash: bool) -> AsyncGenerator[bytes]:
    """``offset``: where the client continues. The hash is that of the whole file."""
    digest, at = hashlib.sha256(), 0
    content = pieces(file, size_of(file))
    while piece := await asyncio.to_thread(next, content, b""):
        await asyncio.to_thread(digest.update, piece)
        fresh = piece[max(0, offset - at) :]
        at += len(piece)
        if fresh and not only_hash:
            yield wire.frame(wire.OUT, 0, fresh)
    yield wire.message(wire.RESULT, 0, {"sha256": digest.hexdigest(), "bytes": at})


def _error(error: UgroError) -> bytes:
    return wire.frame(wire.ERROR, 0, dumps(error.to_wire()).encode())

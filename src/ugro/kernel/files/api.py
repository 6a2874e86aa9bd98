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
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote_from_bytes, unquote_to_bytes

from fastapi import FastAPI, Query, Response
from pydantic import FailFast, Field

from ugro.kernel.access.caller import caller, expect_files
from ugro.kernel.access.model import node_of
from ugro.kernel.agent.agent import Agent
from ugro.kernel.files.client_files import remote_client
from ugro.kernel.files.model import Part, Snapshot
from ugro.kernel.files.results.output_store import open_result, opened_files, pieces, shown, size_of
from ugro.kernel.files.results.service import ResultService
from ugro.kernel.jobs.service import JobService
from ugro.kernel.links.node import Node
from ugro.kernel.operations.responses import Body, LiveResponse, json_response, ndjson
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotFound, UgroError
from ugro.node import wire

# --- code -------------------------------------------------------------------------------------------------------------
# The API's routes for code: send it, remove old copies, show what was transferred.


_SIGN_OF_LIFE_S = 5.0


class SyncBody(Body):
    folder: str
    nodes: list[str] = Field(default_factory=list)
    dry_run: bool = False
    force: bool = False


class TidyBody(Body):
    nodes: list[str] = Field(default_factory=list)
    everything: bool = False


def add_code_routes(app: FastAPI, agent: Agent) -> None:
    @app.post("/v1/sync")
    async def sync(body: SyncBody) -> Response:
        """``{"reading"}`` while that takes its time, ``{"snapshot"}``, then ``{"node"}`` again and again.

        It ends when every node's state is done, failed or would.
        """
        nodes = [_through(agent, node) for node in agent.cluster.inventory.select(body.nodes)]
        if remote_client() is not None:  # asked for before the answer begins: one sync is one entry of the audit log
            await _taken(agent, body)
        else:
            expect_files(Path(body.folder))
        return LiveResponse(ndjson(_told(agent, body, nodes)), "application/x-ndjson")

    @app.get("/v1/sync")
    async def totals() -> Response:
        return json_response(agent.code.totals)

    @app.post("/v1/tidy")
    async def tidy(body: TidyBody) -> Response:
        nodes = [node.spec.name for node in agent.cluster.inventory.select(body.nodes)]
        return json_response({"tidied": await agent.code.tidy(nodes, everything=body.everything)})


def _through(agent: Agent, node: Node) -> str:
    """Where jobs run in the accounts of their users: there, where a job of the caller's looks for its code."""
    asks = caller()
    return node.spec.name if asks is None else agent.parts.engine.logins.opened_for(node, asks.user)


async def _taken(agent: Agent, body: SyncBody) -> Snapshot:
    return await agent.code.take(Path(body.folder), force=body.force, is_lasting=False)


async def _told(agent: Agent, body: SyncBody, nodes: Sequence[str]) -> AsyncGenerator[list[dict[str, Any]]]:
    taking = asyncio.ensure_future(_taken(agent, body))
    try:
        while not (await asyncio.wait([taking], timeout=_SIGN_OF_LIFE_S))[0]:
            yield [{"reading": body.folder}]
        snapshot = await taking
    finally:
        taking.cancel()
    yield [{"snapshot": snapshot}]
    async with contextlib.aclosing(agent.code.sync(snapshot, nodes, dry_run=body.dry_run)) as batches:
        async for reports in batches:
            yield [{"node": replace(report, node=node_of(report.node))} for report in reports]


# --- result files -----------------------------------------------------------------------------------------------------


_FRAMES = "application/vnd.ugro.frames"
_BATCH = 500
_MOST_FILES = 1000  # in one request
_SIGN_OF_LIFE_BYTES = 64 << 20  # read without anything to send
Attempt = Annotated[int | None, Query(ge=1)]


class WantedFile(Body):
    name: str = Field(max_length=16384)
    offset: int = Field(default=0, ge=0)  # bytes that the client has


class ContentBody(Body):
    files: Annotated[list[WantedFile], FailFast(), Field(max_length=_MOST_FILES)]
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
    for asked in body.files:
        yield wire.message(wire.CALL, 0, {"name": asked.name})
        try:
            with await asyncio.to_thread(open_result, parts, shown(unquote_to_bytes(asked.name))) as file:
                async with contextlib.aclosing(_content(file, asked.offset, body.only_hash)) as frames:
                    async for frame in frames:
                        yield frame
        except NotFound:
            hint = "it was replaced or removed; try again"
            yield _error(NotFound(f"{asked.name}: there is no such file any more", hint=hint))
        except OSError as error:
            yield _error(UgroError(f"{asked.name}: {(error.strerror or str(error)).lower()}"))


async def _content(file: BinaryIO, offset: int, only_hash: bool) -> AsyncGenerator[bytes]:
    """``offset``: where the client continues. The hash is that of the whole file."""
    digest, at, unseen = hashlib.sha256(), 0, 0
    content = pieces(file, size_of(file))
    while piece := await asyncio.to_thread(next, content, b""):
        await asyncio.to_thread(digest.update, piece)
        fresh = b"" if only_hash else piece[max(0, offset - at) :]
        at += len(piece)
        unseen = 0 if fresh else unseen + len(piece)
        if fresh:
            yield wire.frame(wire.OUT, 0, fresh)
        elif unseen >= _SIGN_OF_LIFE_BYTES:
            unseen = 0
            yield wire.frame(wire.PING, 0)
    yield wire.message(wire.RESULT, 0, {"sha256": digest.hexdigest(), "bytes": at})


def _error(error: UgroError) -> bytes:
    return wire.frame(wire.ERROR, 0, dumps(error.to_wire()).encode())

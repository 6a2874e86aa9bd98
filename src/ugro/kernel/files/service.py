"""Answers what is asked about code on nodes and about results of jobs.

Clients on other machines cannot open the files of results, and read them here.
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
from typing import BinaryIO
from urllib.parse import quote_from_bytes, unquote_to_bytes

from ugro.kernel.access.caller import expect_files
from ugro.kernel.access.model import Caller, node_of
from ugro.kernel.files.client_files import remote_client
from ugro.kernel.files.code.service import Code
from ugro.kernel.files.model import Part, Snapshot, SyncTotals
from ugro.kernel.files.operations import (
    BriefResults,
    DeletedResults,
    DeleteJobResults,
    FetchJobResults,
    FileEntry,
    GetBriefJobResults,
    GetJobResults,
    GetSyncTotals,
    ListResultFiles,
    ReadResultFiles,
    RemoveUnusedCode,
    ResultsOfJob,
    SyncCode,
    Synced,
    SyncReading,
    SyncSent,
    SyncTaken,
    TidiedNodes,
)
from ugro.kernel.files.results.output_store import open_result, opened_files, pieces, shown, size_of
from ugro.kernel.files.results.service import MOST_LISTED, ResultService
from ugro.kernel.jobs.service import JobService
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.logins import Logins
from ugro.kernel.operations.request import answers
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotFound, UgroError
from ugro.node import wire

# --- code -------------------------------------------------------------------------------------------------------------


_SIGN_OF_LIFE_S = 5.0


class CodeRequests:
    def __init__(self, cluster: Cluster, code: Code, logins: Logins) -> None:
        self._cluster = cluster
        self._code = code
        self._logins = logins

    @answers(SyncCode)
    async def sync(self, asked: SyncCode, caller: Caller) -> AsyncGenerator[list[Synced]]:
        # Where jobs run in the accounts of their users: there, where a job of the caller's looks for its code.
        chosen = self._cluster.inventory.select(asked.nodes)
        nodes = [self._logins.opened_for(node, caller.user) for node in chosen]
        if remote_client() is not None:  # asked for before the answer begins: one sync is one entry of the audit log
            await self._taken(asked)
        else:
            expect_files(Path(asked.folder))
        return self._told(asked, nodes)

    async def _taken(self, asked: SyncCode) -> Snapshot:
        return await self._code.take(Path(asked.folder), force=asked.force, is_lasting=False)

    async def _told(self, asked: SyncCode, nodes: Sequence[str]) -> AsyncGenerator[list[Synced]]:
        taking = asyncio.ensure_future(self._taken(asked))
        try:
            while not (await asyncio.wait([taking], timeout=_SIGN_OF_LIFE_S))[0]:
                yield [SyncReading(asked.folder)]
            snapshot = await taking
        finally:
            taking.cancel()
        yield [SyncTaken(snapshot)]
        async with contextlib.aclosing(self._code.sync(snapshot, nodes, dry_run=asked.dry_run)) as batches:
            async for reports in batches:
                yield [SyncSent(replace(report, node=node_of(report.node))) for report in reports]

    @answers(GetSyncTotals)
    async def get_totals(self, asked: GetSyncTotals, caller: Caller) -> SyncTotals:
        return self._code.totals

    @answers(RemoveUnusedCode)
    async def remove_unused(self, asked: RemoveUnusedCode, caller: Caller) -> TidiedNodes:
        nodes = [node.spec.name for node in self._cluster.inventory.select(asked.nodes)]
        return TidiedNodes(tuple(await self._code.tidy(nodes, everything=asked.everything)))


# --- results ----------------------------------------------------------------------------------------------------------


_BATCH = 500
_SIGN_OF_LIFE_BYTES = 64 << 20  # read without anything to send


class ResultRequests:
    def __init__(self, jobs: JobService, results: ResultService) -> None:
        self._jobs = jobs
        self._results = results

    @answers(GetJobResults)
    async def get(self, asked: GetJobResults, caller: Caller) -> ResultsOfJob:
        job = await self._jobs.find(asked.word)
        most_listed = None if asked.all_files else MOST_LISTED
        return ResultsOfJob(job, await self._results.of(job, asked.attempt, most_listed=most_listed))

    @answers(GetBriefJobResults)
    async def get_brief(self, asked: GetBriefJobResults, caller: Caller) -> BriefResults:
        return BriefResults(await self._results.brief(await self._jobs.find(asked.word)))

    @answers(FetchJobResults)
    async def fetch(self, asked: FetchJobResults, caller: Caller) -> ResultsOfJob:
        job = await self._jobs.find(asked.word)
        await self._results.fetch(job, asked.patterns, asked.attempt)
        return ResultsOfJob(job, await self._results.of(job, asked.attempt))

    @answers(DeleteJobResults)
    async def delete(self, asked: DeleteJobResults, caller: Caller) -> DeletedResults:
        self._jobs.expect_removable()
        job = await self._jobs.find(asked.word)
        problems = await self._results.remove(job)
        return DeletedResults(await self._jobs.find(str(job.id)), problems)

    @answers(ListResultFiles)
    async def list_files(self, asked: ListResultFiles, caller: Caller) -> AsyncGenerator[list[FileEntry]]:
        return _listed(await self._parts(asked.word, asked.attempt))

    @answers(ReadResultFiles)
    async def read_files(self, asked: ReadResultFiles, caller: Caller) -> AsyncGenerator[bytes]:
        return _contents(await self._parts(asked.word, asked.attempt), asked)

    async def _parts(self, word: str, attempt: int | None) -> tuple[Part, ...]:
        return (await self._results.of(await self._jobs.find(word), attempt, most_listed=0)).parts


async def _listed(parts: Sequence[Part]) -> AsyncGenerator[list[FileEntry]]:
    found = opened_files(parts)
    while batch := await asyncio.to_thread(_some, found):
        yield batch


def _some(found: Iterator[tuple[bytes, BinaryIO]]) -> list[FileEntry]:
    batch = []
    for name, file in found:
        with file:
            about = os.fstat(file.fileno())
        mode, size = stat.S_IMODE(about.st_mode), about.st_size
        batch.append(FileEntry(quote_from_bytes(name), size, mode, about.st_mtime_ns))
        if len(batch) >= _BATCH:
            break
    return batch


async def _contents(parts: Sequence[Part], asked: ReadResultFiles) -> AsyncGenerator[bytes]:
    for wanted in asked.files:
        yield wire.message(wire.CALL, 0, {"name": wanted.name})
        try:
            with await asyncio.to_thread(open_result, parts, shown(unquote_to_bytes(wanted.name))) as file:
                async with contextlib.aclosing(_content(file, wanted.offset, asked.only_hash)) as frames:
                    async for frame in frames:
                        yield frame
        except NotFound:
            hint = "it was replaced or removed; try again"
            yield _error(NotFound(f"{wanted.name}: there is no such file any more", hint=hint))
        except OSError as error:
            yield _error(UgroError(f"{wanted.name}: {(error.strerror or str(error)).lower()}"))


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

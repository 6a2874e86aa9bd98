"""A job's outputs: the list, a preview of one file, its download, and all of them as one archive.

The files were written by jobs on nodes and may be hostile. They are sent as attachments in a sandbox, never with a type
that a browser executes, and images only if their first bytes are those of an image.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import re
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

from fastapi import FastAPI, Query, Request, Response

from ugro.kernel.agent.agent import Agent
from ugro.kernel.files.results.output_store import archive, open_result, pieces, size_of
from ugro.kernel.operations.responses import LiveResponse
from ugro.kernel.support.aio import to_the_end
from ugro.kernel.support.errors import NotFound
from ugro.web.site import Site

# --- previews ---------------------------------------------------------------------------------------------------------
# What a preview shows of a file that a job wrote: an image, a table, JSON, text, or only its size.
#
# The content decides, not the name alone, and it is never markup: HTML and SVG are text here.


HEAD_BYTES = 256 * 1024
MOST_ROWS = 200
_MOST_COLUMNS = 50
_LONGEST_CELL = 300
_LARGEST_IMAGE = 20 << 20
_LONGEST_JSON = 8 * HEAD_BYTES  # indented
_MOST_UNREADABLE = 0.1  # of the characters of a text
_IMAGES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
)
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Control characters, and those that turn the direction of what follows.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")

Kind = Literal["image", "table", "json", "text", "other", "empty"]


@dataclass(frozen=True, slots=True)
class Preview:
    kind: Kind
    text: str = ""
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""  # what is not shown


def image_type(head: bytes) -> str | None:
    """The media type of an image that a browser may draw, by its first bytes."""
    return next((kind for pattern, kind in _IMAGES if pattern.match(head)), None)


def preview(name: str, head: bytes, size: int) -> Preview:
    """``head``: the first ``HEAD_BYTES`` of the file, or all of it."""
    if not size:
        return Preview("empty")
    if image_type(head) is not None:
        return Preview("image") if size <= _LARGEST_IMAGE else Preview("other", note="the image is too large to show")
    text = _text(head)
    if text is None:
        return Preview("other")
    is_cut = len(head) < size
    ending = re.search(r"\.[^.]*$", name.lower())
    found = _structured(ending[0] if ending else "", text, is_cut=is_cut)
    return found or Preview("text", visible(text))


def visible(text: str) -> str:
    """Text in which nothing is invisible, except line breaks and tabs."""
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def _text(head: bytes) -> str | None:
    if b"\0" in head:
        return None
    try:
        return head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start >= len(head) - 3:  # a character that the end cuts
            return head[: error.start].decode("utf-8")
    text = head.decode("utf-8", "replace")
    return text if text.count("\ufffd") <= _MOST_UNREADABLE * len(text) else None


def _structured(ending: str, text: str, *, is_cut: bool) -> Preview | None:
    # A parser that a hostile file makes fail, or recurse too deep, leaves it as text.
    try:
        if ending in _DELIMITERS:
            return _table(_whole_lines(text, is_cut=is_cut), _DELIMITERS[ending])
        if ending == ".json" and not is_cut:
            return Preview("json", visible(_indented(json.loads(text))))
        if ending in (".jsonl", ".ndjson"):
            return _records(_whole_lines(text, is_cut=is_cut))
    except (csv.Error, ValueError, RecursionError):
        pass
    return None


def _indented(document: Any) -> str:
    """Raises ValueError if that is far longer than the file: many values, each deep inside."""
    found, length = [], 0
    for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(document):
        found.append(part)
        length += len(part)
        if length > _LONGEST_JSON:
            raise ValueError("too long")
    return "".join(found)


def _whole_lines(text: str, *, is_cut: bool) -> list[str]:
    lines = text.splitlines()
    return lines[:-1] if is_cut and len(lines) > 1 else lines


def _table(lines: Sequence[str], delimiter: str) -> Preview | None:
    if delimiter == "," and lines and lines[0].count(";") > lines[0].count(","):
        delimiter = ";"
    rows = [row for row in islice(csv.reader(lines, delimiter=delimiter), MOST_ROWS + 1) if row]
    if not rows:
        return None
    header, *rest = ([_cell(value) for value in row[:_MOST_COLUMNS]] for row in rows)
    note = f"the first {MOST_ROWS} rows" if len(rest) >= MOST_ROWS else ""
    return Preview("table", header=tuple(header), rows=tuple(map(tuple, rest[:MOST_ROWS])), note=note)


def _records(lines: Iterable[str]) -> Preview | None:
    """Metrics and the like, an object on each line: a column for each of its values."""
    records = [dict(_flat(json.loads(line))) for line in islice((line for line in lines if line.strip()), MOST_ROWS)]
    header = list(dict.fromkeys(key for record in records for key in record))[:_MOST_COLUMNS]
    if not header:
        return None
    rows = tuple(tuple(record.get(key, "") for key in header) for record in records)
    note = f"the first {MOST_ROWS} records" if len(records) == MOST_ROWS else ""
    return Preview("table", header=tuple(_cell(key) for key in header), rows=rows, note=note)


def _flat(record: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(record, dict):
        raise ValueError("not an object")
    for key, value in record.items():
        if key == "values" and isinstance(value, dict):
            yield from _flat(value)
        else:
            yield key, _cell(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _cell(value: str) -> str:
    return visible(value if len(value) <= _LONGEST_CELL else f"{value[:_LONGEST_CELL]}…")


# --- outputs ----------------------------------------------------------------------------------------------------------


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

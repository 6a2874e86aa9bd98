"""Holds what an agent answers against the API's description: nothing may be missing, of another type, or unsaid."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jsonschema import Draft202012Validator

from ugro.kernel.operations.answers import JSON, LINES

Schema = Mapping[str, Any]
_GAP = re.compile(r"\{[a-z]+\}")
_ANSWER_S = 120


@dataclass(frozen=True, slots=True)
class Content:
    media: str
    schema: Schema  # of the document, or of each line
    is_described: bool


class Description:
    """``document``: the API's, as the agent sends it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._components = {name: closed(one) for name, one in document["components"]["schemas"].items()}

    def routes(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Such as ``GET /v1/jobs/{word}``, with its operation."""
        for path, item in self._document["paths"].items():
            for method, operation in item.items():
                yield f"{method.upper()} {path.removeprefix('/api')}", operation

    def content(self, route: str) -> Content | None:
        """None: the answer has no body."""
        operation = dict(self.routes())[route]
        found = operation["responses"].get("200")
        if found is None:
            return None
        [(media, about)] = found["content"].items()
        schema = about["x-line"] if media == LINES else about["schema"]
        return Content(media, schema, bool(schema) and media in (JSON, LINES))

    def described(self) -> set[str]:
        """The routes whose answers have shapes."""
        contents = {route: self.content(route) for route, _ in self.routes()}
        return {route for route, one in contents.items() if one is not None and one.is_described}

    def problems(self, schema: Schema, value: Any) -> list[str]:
        """What the value has that the schema does not say, and what it lacks."""
        whole = {**closed(schema), "components": {"schemas": self._components}}
        errors = Draft202012Validator(whole).iter_errors(value)
        return [f"{error.json_path}: {error.message:.300}" for error in errors]

    def check(self, route: str, status: int, body: bytes) -> list[Any]:
        """The documents of an answer. Raises AssertionError."""
        content = self.content(route)
        if content is None:
            assert (status, body) == (204, b""), (route, status, body)
            return []
        assert status == 200, (route, status, body)
        found = [json.loads(line) for line in (body.splitlines() if content.media == LINES else [body])]
        for one in found:
            assert set(one) != {"error"}, (route, one)
            assert not (problems := self.problems(content.schema, one)), (route, problems, one)
        return found

    def check_error(self, body: bytes) -> str:
        """Its kind."""
        document = json.loads(body)
        assert not (problems := self.problems({"$ref": "#/components/schemas/Error"}, document)), (problems, document)
        return str(document["error"]["kind"])


def closed(schema: Any) -> Any:
    """The same, but a field that it does not name is a mistake, unless it says that there may be others."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(one) for key, one in schema.items()}
    return {"additionalProperties": False, **found} if isinstance(schema.get("properties"), dict) else found


class SocketConnection(http.client.HTTPConnection):
    """To the agent's socket on this machine, as any HTTP client could."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_ANSWER_S)
        self.sock.connect(str(self._path))


@dataclass(frozen=True, slots=True)
class Step:
    """A request. ``until``: of a stream that does not end by itself, the last line to read has this in it."""

    route: str
    gaps: tuple[str, ...] = ()
    query: str = ""
    body: Any = None
    until: bytes | None = None

    @property
    def path(self) -> str:
        words = (quote(word, safe="") for word in self.gaps)
        path = _GAP.sub(lambda _: next(words), self.route.partition(" ")[2])
        return f"{path}?{self.query}" if self.query else path


class Checked:
    """Asks an agent, and checks each answer."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        _, document = self._send(Step("GET /v1/openapi.json"))
        self.description = Description(json.loads(document))

    def ask(self, step: Step) -> list[Any]:
        return self.description.check(step.route, *self._send(step))

    def text(self, step: Step) -> str:
        status, body = self._send(step)
        assert status == 200, body
        return body.decode()

    def refused(self, step: Step) -> tuple[int, str]:
        status, body = self._send(step)
        return status, self.description.check_error(body)

    def _send(self, step: Step) -> tuple[int, bytes]:
        with contextlib.closing(SocketConnection(self._socket_path)) as connection:
            content = None if step.body is None else json.dumps(step.body)
            headers = {"Content-Type": "application/json"}
            connection.request(step.route.partition(" ")[0], step.path, content, headers)
            with connection.getresponse() as answer:
                return answer.status, answer.read() if step.until is None else _read_until(answer, step.until)


def _read_until(stream: http.client.HTTPResponse, words: bytes) -> bytes:
    lines = [b""]
    while words not in lines[-1]:
        lines.append(stream.readline())
        assert lines[-1], lines[-3:]
    return b"".join(lines)

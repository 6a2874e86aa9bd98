"""What declarations of operations say to both ends of the API."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message, Scope

from tests.rig.identity import ask, person
from ugro.client.client import Client
from ugro.client.http import AgentGone
from ugro.client.reach import OwnAgent, OwnWish
from ugro.kernel.access.model import Caller, Role
from ugro.kernel.operations.endpoints import add_operations, handlers_of
from ugro.kernel.operations.request import CALLER, Needs, Raw, Request, answers
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.state_dir import StateDir


@dataclass(frozen=True, slots=True)
class Document:
    tree: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReadOne(Request[Document], route="GET /v1/ones/{word}"):
    """Reads one."""

    word: str


@dataclass(frozen=True, slots=True)
class MakeOne(Request[Document], route="POST /v1/ones", role=Role.USER, audit="make one"):
    """Makes one more each time."""


@dataclass(frozen=True, slots=True)
class KeepOne(Request[Document], route="PUT /v1/ones", role=Role.USER, audit="keep one", repeatable=True):
    """Makes one, if there is none yet."""


class EndsOnce(OwnAgent):
    """Its agent ends while it answers the first request."""

    def __init__(self, folder: Path) -> None:
        super().__init__(StateDir(folder), OwnWish())
        self.asked: list[str] = []

    def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = 60.0) -> Any:
        self.asked.append(f"{method} {path}")
        if len(self.asked) == 1:
            raise AgentGone("the agent ended before it answered")
        return json.loads('{"tree": {"a": [1]}}')


@pytest.fixture
def reach(tmp_path: Path) -> EndsOnce:
    return EndsOnce(tmp_path)


@pytest.mark.parametrize("asked", [ReadOne("x"), KeepOne()])
def test_what_can_be_repeated_is_asked_again_when_the_agent_ends(reach: EndsOnce, asked: Request[Document]) -> None:
    assert Client.through(reach).ask(asked) == Document({"a": [1]})
    assert len(reach.asked) == 2


def test_what_cannot_be_repeated_is_asked_once(reach: EndsOnce) -> None:
    with pytest.raises(AgentGone):
        Client.through(reach).ask(MakeOne())
    assert len(reach.asked) == 1


def test_a_document_is_decoded_as_it_is() -> None:
    assert decode(Document, {"tree": {"lr": {"min": 0}}}) == Document({"lr": {"min": 0}})
    with pytest.raises(DecodeError, match="expected dict"):
        decode(Document, {"tree": [1]})


@dataclass
class Written:
    thread: str = field(init=False)

    def __getattr__(self, name: str) -> str:
        return threading.current_thread().name


@dataclass(frozen=True, slots=True)
class ReadSmall(Request[Written], route="GET /v1/small"):
    """Says which thread writes its answer."""


@dataclass(frozen=True, slots=True)
class ReadLarge(Request[Written], route="GET /v1/large", is_large=True):
    """Says which thread writes its answer."""


class Writers:
    @answers(ReadSmall)
    async def small(self, asked: ReadSmall, caller: Caller) -> Written:
        return Written()

    @answers(ReadLarge)
    async def large(self, asked: ReadLarge, caller: Caller) -> Written:
        return Written()


def test_a_large_answer_is_written_beside_the_loop() -> None:
    async def scenario() -> None:
        app = FastAPI()
        add_operations(app, (ReadSmall, ReadLarge), handlers_of([Writers()]))
        loops, ann = threading.current_thread().name, person("ann", Role.VIEWER)
        small = await ask(app, "GET", "/v1/small", caller=ann)
        large = await ask(app, "GET", "/v1/large", caller=ann)
        assert small.document == {"thread": loops}
        assert large.document["thread"] != loops

    asyncio.run(scenario())


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    folder: Path = Path("/")


@dataclass(frozen=True, slots=True)
class Made:
    name: str


@dataclass(frozen=True, slots=True)
class MakeParts(
    Request[Made | Needs], route="POST /v1/parts", role=Role.USER, audit="make parts", ends_with_client=True
):
    """Makes parts, or does nothing if there are none to be made."""

    parts: tuple[Part, ...]

    def about(self, answer: Made | Needs) -> str:
        return answer.name if isinstance(answer, Made) else ""


@dataclass(frozen=True, slots=True)
class ReadPart(Request[Raw], route="GET /v1/parts/{word}", media="application/x-part"):
    """Returns a part's bytes."""

    word: str


class Parts:
    @answers(MakeParts)
    async def make(self, asked: MakeParts, caller: Caller) -> Made | Needs:
        return Made(" ".join(one.name for one in asked.parts)) if asked.parts else Needs(("PARTS",))

    @answers(ReadPart)
    async def read(self, asked: ReadPart, caller: Caller) -> AsyncGenerator[bytes]:
        async def pieces() -> AsyncGenerator[bytes]:
            yield asked.word.encode()

        return pieces()


def with_parts() -> FastAPI:
    app = FastAPI()
    add_operations(app, (MakeParts, ReadPart), handlers_of([Parts()]))
    return app


def test_what_is_within_a_request_is_sent_as_maps_and_lists() -> None:
    asked = MakeParts((Part("a", Path("/x")), Part("b")))
    parts = [{"name": "a", "folder": "/x"}, {"name": "b", "folder": "/"}]
    assert asked.to_wire() == ("POST", "/v1/parts", {"parts": parts})


def test_bytes_are_answered_with_their_media_type() -> None:
    found = asyncio.run(ask(with_parts(), "GET", "/v1/parts/wheel", caller=person("ann", Role.VIEWER)))
    assert (found.body, dict(found.headers)["content-type"]) == (b"wheel", "application/x-part")


def test_a_body_that_comes_in_pieces_is_read_whole_also_where_the_client_may_leave() -> None:
    pieces = [b'{"parts": [{"name"', b': "a"}, ', b'{"name": "b"}]}']
    messages: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, 1)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.sleep(0)
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http", "method": "POST", "path": "/v1/parts", "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(b"content-type", b"application/json")], CALLER: person("ann", Role.USER),
    }  # fmt: skip
    asyncio.run(asyncio.wait_for(with_parts()(scope, receive, send), 30))
    assert [one["status"] for one in sent if "status" in one] == [200]
    assert b"".join(one.get("body", b"") for one in sent) == b'{"name":"a b"}'

"""What declarations of operations say to both ends of the API."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.rig.identity import ask, person
from ugro.client.client import Client
from ugro.client.http import AgentGone
from ugro.client.reach import OwnAgent, OwnWish
from ugro.kernel.access.model import Caller, Role
from ugro.kernel.operations.endpoints import add_operations, handlers_of
from ugro.kernel.operations.request import Request, answers
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

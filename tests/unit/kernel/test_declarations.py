"""What follows from a declaration: where each field travels, and what the audit log calls it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from tests.rig.identity import Answer, ask
from ugro.client.http import _request
from ugro.kernel.access.model import Caller, Role
from ugro.kernel.operations.app import answer_errors
from ugro.kernel.operations.audit_rules import _declared
from ugro.kernel.operations.endpoints import add_operations, handlers_of
from ugro.kernel.operations.request import CALLER, Request, answers
from ugro.kernel.support.codec import dumps

ANN = Caller("ann", Role.USER, "pid 1")


@dataclass(frozen=True, slots=True)
class Wheel:
    inches: int


@dataclass(frozen=True, slots=True)
class Heard:
    text: str


@dataclass(frozen=True, slots=True)
class StopCar(
    Request[Heard],
    route="POST /v1/cars/{name:path}/stop",
    audit="stop car",
    in_query=True,
    in_headers=("ugro_settings",),
):
    """Stops a car."""

    name: str
    only_if_idle: bool = False
    ugro_settings: str | None = None


@dataclass(frozen=True, slots=True)
class ChangeWheels(Request[Heard], route="PUT /v1/cars/{name}/wheels", audit="change {name} {wheels}"):
    """Changes wheels."""

    name: str
    wheels: tuple[Wheel, ...]


@dataclass(frozen=True, slots=True)
class Honk(Request[Heard], route="POST /v1/cars/{name}/honk", audit="honk {name}"):
    """Makes a noise."""

    name: str


class Garage:
    @answers(Honk)
    async def honk(self, asked: Honk, caller: Caller) -> Heard:
        return Heard(f"{caller.user} {asked}")

    @answers(StopCar)
    async def stop(self, asked: StopCar, caller: Caller) -> Heard:
        return Heard(f"{caller.user} {asked}")

    @answers(ChangeWheels)
    async def change(self, asked: ChangeWheels, caller: Caller) -> Heard:
        return Heard(f"{caller.user} {asked}")


def sent(asked: Request[Any], **headers: str) -> Answer:
    method, path, body = asked.to_wire()
    return asyncio.run(ask(served, method, path, headers=headers, body=json.loads(dumps(body))))


async def served(scope: Scope, receive: Receive, send: Send) -> None:
    app = FastAPI()
    answer_errors(app)
    add_operations(app, (StopCar, ChangeWheels, Honk), handlers_of((Garage(),)))
    await app({**scope, CALLER: ANN}, receive, send)


def test_fields_arrive_from_the_address_whatever_the_method_and_from_headers_that_commands_send() -> None:
    asked = StopCar("a/b", only_if_idle=True, ugro_settings="not sent by itself")
    assert asked.to_wire() == ("POST", "/v1/cars/a%2Fb/stop?only_if_idle=true", None)
    heard = sent(StopCar("a", only_if_idle=True), **{"ugro-settings": "{}"}).document["text"]
    assert heard == f"ann {StopCar('a', only_if_idle=True, ugro_settings='{}')}"
    assert sent(StopCar("a")).document["text"] == f"ann {StopCar('a')}"


def test_values_within_values_travel_in_a_body() -> None:
    asked = ChangeWheels("a", (Wheel(16), Wheel(17)))
    assert b'{"wheels":[{"inches":16},{"inches":17}]}' in _request(*asked.to_wire(), {})
    assert sent(asked).document["text"] == f"ann {asked}"


def test_what_a_program_sends_as_a_body_is_not_read_where_nothing_is_asked_for() -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    found = asyncio.run(ask(served, "POST", "/v1/cars/a/honk", headers=form, body="loud"))
    assert found.document["text"] == f"ann {Honk('a')}"
    refused = asyncio.run(ask(served, "PUT", "/v1/cars/a/wheels", headers=form, body={"wheels": []}))
    assert (refused.status, refused.kind) == (400, "usage")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [("ugro_settings=1", "ugro_settings: it is a header"), ("name=1", "name: it is in the address"), ("x=1", "x: ")],
)
def test_a_field_is_taken_from_its_place_alone(given: str, complaint: str) -> None:
    found = asyncio.run(ask(served, "POST", f"/v1/cars/a/stop?{given}"))
    assert (found.status, found.kind) == (400, "usage")
    assert str(found.document["error"]["message"]).startswith(complaint)


def test_bytes_of_a_command_that_are_no_text_travel_in_an_address() -> None:
    assert StopCar("a\udcff").to_wire()[1] == "/v1/cars/a%FF/stop?only_if_idle=false"


def test_an_audit_text_needs_no_fields_and_has_those_of_the_path_before_those_of_the_body() -> None:
    stop, about = _declared(StopCar.operation, "/v1/cars/a/stop") or pytest.fail("no rule")
    assert (stop.action, stop.fields, about) == ("stop car", (), "")
    change, about = _declared(ChangeWheels.operation, "/v1/cars/a/wheels") or pytest.fail("no rule")
    assert (change.action, change.fields, about) == ("change", ("wheels",), "a")

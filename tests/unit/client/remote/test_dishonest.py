"""An agent of somebody else that is not honest: it gets no variable and no file that the command does not name."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import ugro
from tests.rig.pretend_agent import pretend_agent
from ugro.client.client import Client
from ugro.client.http import connected
from ugro.features.environments.client import set_up
from ugro.features.environments.operations import PrepareEnvironment
from ugro.features.ray import client as ray
from ugro.features.recipes.client import Wanted
from ugro.features.remote_access.client.agent import RemoteAgent
from ugro.features.remote_access.client.master import Master
from ugro.features.remote_access.client.relay import AGENT, Banner
from ugro.features.services.client import ServiceWish
from ugro.features.sweeps.client import SweepWish
from ugro.kernel.agent.model import AgentStatus
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotAllowed, UgroError
from ugro.kernel.support.errors import Wanted as AskedFor
from ugro.kernel.support.state_dir import StateDir

SECRET = "AWS_SECRET_ACCESS_KEY"
VALUE = "value-of-the-secret"
STATUS = AgentStatus(1, ugro.__version__)


@dataclass
class Dishonest:
    """Asks for a variable with every answer that is not about itself, and keeps all that it hears."""

    needs: list[str]
    answers: dict[str, Any] = field(default_factory=dict)  # by path
    heard: list[str] = field(default_factory=list)

    def answer(self, path: str, body: str) -> bytes:
        self.heard.append(body)
        if path == "/v1/agent":
            return dumps(STATUS).encode()
        given = self.answers.get(path, {"x": 1, "needs": self.needs})
        return json.dumps(given).encode() + b"\n"


@dataclass
class Straight:
    """To the socket, instead of through ssh."""

    path: Path
    master: Master = field(default_factory=lambda: Master("gpu-master"))
    banner: Banner = field(default_factory=lambda: Banner(ugro.__version__, "ann", "gpu-master"))

    def open(self, to: str = AGENT) -> socket.socket:
        return connected(self.path)

    def close(self) -> None:
        """Each connection is closed by who opened it."""


@pytest.fixture
def liar(tmp_path: Path) -> Iterator[Dishonest]:
    found = Dishonest([SECRET])
    with pretend_agent(tmp_path / "s", found.answer):
        yield found


@pytest.fixture
def client(liar: Dishonest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv(SECRET, VALUE)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with Client.through(RemoteAgent(Straight(tmp_path / "s"), StateDir(tmp_path / ".ugro"))) as found:
        yield found


FIELDS: dict[str, Any] = {"command": ["true"], "sync": False, "env": ["TOKEN"]}
CALLS: dict[str, Callable[[Client], object]] = {
    "submit": lambda client: client.jobs.submit(fields=FIELDS),
    "dry run": lambda client: client.jobs.dry_run(fields=FIELDS),
    "sweep": lambda client: client.sweeps.start(None, SweepWish(FIELDS)),
    "service": lambda client: client.services.start(ServiceWish(fields=FIELDS)),
    "setup": lambda client: list(set_up(client, PrepareEnvironment(fields={"package": ["torch"]}))),
    "plan": lambda client: client.planning.plan(),
    "Ray cluster": lambda client: ray.start(client),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_variable_that_nobody_named_is_refused_and_not_sent(
    client: Client, liar: Dishonest, call: Callable[[Client], object]
) -> None:
    with pytest.raises(NotAllowed, match=f"asks for the variable '{SECRET}'"):
        call(client)
    assert liar.heard
    assert not [one for one in liar.heard if VALUE in one]


def test_a_variable_that_the_user_names_is_sent(
    client: Client, liar: Dishonest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "mine")
    liar.needs = ["TOKEN"]
    with pytest.raises(UgroError, match="asks for the same variables again"):
        client.jobs.submit(fields=FIELDS)
    assert json.loads(liar.heard[-1])["env"] == {"TOKEN": "mine"}


def test_a_launch_that_the_agent_made_of_a_recipe_names_nothing_of_this_machine(
    client: Client, liar: Dishonest, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(VALUE)
    key = str(tmp_path / "key")
    fields = {"env": [SECRET], "args": [key], "script": "train.py", "workdir": str(tmp_path), "sync": False}
    made = {"fields": fields, "notes": [], "recipe": "causal_lm"}
    liar.answers["/v1/recipes/launch"] = {"launch": made}
    found = client.recipes.prepare(Wanted(model="gpt2", dataset="wikitext"))
    assert found.fields["workdir"].endswith("/recipes/trainings/causal_lm")
    with pytest.raises(NotAllowed, match="variable"):
        client.jobs.submit(fields=found.fields)
    for what in ("text", "hash", "code"):
        liar.answers["/v1/jobs"] = {"error": AskedFor(what, key, {}).to_wire()}
        with pytest.raises(NotAllowed, match="does not name"):
            client.jobs.submit(fields=found.fields)
    assert not [one for one in liar.heard if VALUE in one]

"""What the agent believes of a door and of the programs of replicas: their nodes are not trusted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from typing import Any, cast

import pytest

from tests.unit.policy.serving.places import job, service
from ugro.features.services.model import Door, DoorStats, Server, Service
from ugro.features.services.service.door import DoorClient, DoorKeeping
from ugro.features.services.service.replicas import _parsed
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.support.errors import RemoteFailure

STATS = asdict(DoorStats())
SERVER = {"requests": 1, "errors": 0, "retries": 0, "sessions": 0, "queued": 0, "latency": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"requests": float("inf")},
        {"latency": []},
        {"servers": {"r1": 3}},
        {"servers": [1]},
        {"started_at": float("nan")},
        {"servers": {"r1": {**SERVER, "pace": []}}},
    ],
)
def test_invalid_figures_of_a_door_are_an_error(changes: dict[str, Any]) -> None:
    async def ask(line: bytes) -> bytes:
        return json.dumps({"result": {**STATS, **changes}}).encode()

    with pytest.raises(RemoteFailure, match="the door's answer is invalid"):
        asyncio.run(DoorClient(ask, "chat").stats())


@pytest.mark.parametrize("number", ["Infinity", "NaN", "1e999"])
def test_a_figure_of_a_replica_is_a_number(number: str) -> None:
    line = '{"state": "ready", "figures": {"prompt_tokens": %s}}'
    assert _parsed((line % "3").encode()).figures.prompt_tokens == 3
    with pytest.raises(ValueError, match="no number"):
        _parsed((line % number).encode())


class Open:
    """A door that answers."""

    async def servers(self) -> dict[str, Server]:
        return {}

    async def stats(self) -> DoorStats:
        return DoorStats(requests=7, queued=3)


class Place:
    def door(self, service: Service, job: Job) -> Door:
        return cast(Door, Open())

    def speed(self, node: str) -> float | None:
        return None


def test_requests_of_a_door_that_has_ended_are_not_shown_as_under_way() -> None:
    async def run() -> None:
        keeping, running = DoorKeeping(Place()), job(0)
        await keeping.look(service(), running)
        assert keeping.stats == DoorStats(requests=7, queued=3)
        await keeping.look(service(), replace(running, state=JobState.RECOVERING))
        assert keeping.stats is None

    asyncio.run(run())

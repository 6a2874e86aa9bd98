"""Waiting for a job, over as many agents as it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ugro.client.client import Client
from ugro.client.http import AgentGone
from ugro.client.reach import OwnAgent, OwnWish
from ugro.kernel.jobs.model import Job, JobSpec, JobState
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.state_dir import StateDir

RUNNING = Job(1, JobSpec("train", ("true",)), "ann", JobState.RUNNING, "as planned", "2026-01-01T00:00:00+00:00")
DONE = replace(RUNNING, state=JobState.SUCCEEDED)


class Agents(OwnAgent):
    """Each says where the job stands and dies; the last one sees it end."""

    def __init__(self, count: int) -> None:
        super().__init__(StateDir(Path("/")), OwnWish())
        self.left = count

    def stream(self, *_: object, **__: object) -> Iterator[bytes]:
        self.left -= 1
        yield f"{dumps(RUNNING)}\n".encode()
        if self.left:
            raise AgentGone("the agent ended in the middle of its answer")
        yield f"{dumps(DONE)}\n".encode()


def test_a_wait_outlives_any_number_of_agents_that_answer() -> None:
    agents = Agents(12)
    assert list(Client.through(agents).jobs.moves(1)) == [RUNNING, DONE]
    assert agents.left == 0

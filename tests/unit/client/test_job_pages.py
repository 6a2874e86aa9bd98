"""A list of all jobs is asked for page by page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ugro.client.client import Client
from ugro.client.reach import OwnAgent, OwnWish
from ugro.kernel.jobs.model import Job, JobSpec, JobState
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.state_dir import StateDir

UNREADABLE = 700


class Agent(OwnAgent):
    """Has that many jobs, of which one cannot be read and is left out of its page."""

    def __init__(self, count: int) -> None:
        super().__init__(StateDir(Path("/")), OwnWish())
        self.count = count
        self.sizes: list[int] = []

    def ask(self, method: str, path: str, body: Any = None, **limits: float) -> Any:
        query = parse_qs(urlsplit(path).query)
        limit, before = int(query["limit"][0]), int(query.get("before", [str(self.count + 1)])[0])
        numbers = list(range(before - 1, 0, -1))[:limit]
        jobs = [Job(number, JobSpec("job", ("true",)), "ann", JobState.QUEUED, "", "") for number in numbers]
        self.sizes.append(limit)
        return json.loads(dumps({"jobs": [job for job in jobs if job.id != UNREADABLE]}))


def test_all_jobs_come_once_and_in_order_although_one_page_is_short() -> None:
    agent = Agent(1300)
    found = Client.through(agent).jobs.newest(None)
    assert [job.id for job in found] == [number for number in range(1300, 0, -1) if number != UNREADABLE]
    assert max(agent.sizes) == 500


def test_a_short_list_is_one_request() -> None:
    agent = Agent(10)
    assert len(Client.through(agent).jobs.newest(20)) == 10
    assert agent.sizes == [20]


def test_a_limit_over_a_page_is_kept() -> None:
    agent = Agent(2000)
    found = Client.through(agent).jobs.newest(600)
    assert [job.id for job in found] == list(range(2000, 1400, -1))
    assert agent.sizes == [500, 100]

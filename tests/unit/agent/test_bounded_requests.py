"""A body of a few MiB may have a million entries: it is refused before the agent looks at each of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.rig.identity import ask, running_agent
from ugro.features.remote_access.api import ItemsBody
from ugro.kernel.access.model import Caller, Role
from ugro.kernel.files.operations import ReadResultFiles
from ugro.kernel.jobs.operations import Submit, SubmitJobs
from ugro.kernel.operations.responses import large_json_response
from ugro.kernel.telemetry.records import StepRecord

OWNER = Caller("ann", Role.ADMIN, "test", shares_account=True)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"jobs": ["a"] * 20_001}, "20,001 entries in one list or map, at most 20,000 are taken"),
        ({"channels": ["a"] * 20_001}, "20,001 entries in one list or map, at most 20,000 are taken"),
        ({"channels": {str(number): 1 for number in range(20_001)}}, "20,001 entries in one list or map"),
        (json.loads("[" * 150 + "]" * 150), "more than 100 maps and lists in each other"),
        ({"channels": [[[]] * 19_000] * 20}, "more than 300,000 [ and {"),
    ],
)
def test_a_body_with_too_much_in_it_is_refused(tmp_path: Path, body: Any, text: str) -> None:
    async def work() -> None:
        async with running_agent(tmp_path) as (_, app):
            route = "/v1/jobs/batch" if "jobs" in body else "/v1/alerts/test"
            answer = await ask(app, "POST", route, caller=OWNER, body=body)
            assert answer.status == 400
            assert text in answer.document["error"]["message"]

    asyncio.run(work())


@pytest.mark.parametrize(("body", "field"), [(SubmitJobs, "jobs"), (ReadResultFiles, "files"), (ItemsBody, "items")])
def test_of_many_things_that_are_all_wrong_the_first_is_described(body: type[Any], field: str) -> None:
    """A few MiB of them would otherwise become hundreds of thousands of errors, of which one is shown."""
    wrong = {f"no_key_{number}": "" for number in range(50)}
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(body).validate_python({field: [wrong] * 100, "word": "1"})
    assert caught.value.error_count() < 100


async def longest_pause(work: Callable[[], Awaitable[object]]) -> float:
    """Returns the longest time without a turn for others, as a part of the whole."""
    turns_s = [began_s := time.process_time()]

    async def others() -> None:
        while True:
            await asyncio.sleep(0)
            turns_s.append(time.process_time())

    beside = asyncio.create_task(others())
    await asyncio.sleep(0)
    await work()
    await asyncio.sleep(0)
    beside.cancel()
    longest_s = max(two - one for one, two in itertools.pairwise(turns_s))
    return longest_s / (time.process_time() - began_s)


def test_others_are_answered_while_large_jobs_are_read(tmp_path: Path) -> None:
    fields = {"command": ["true"], "env": {f"A{number}": "" for number in range(990)}, "sync": False, "cwd": "/"}
    asked = SubmitJobs(tuple(Submit("ann", f"k{number}", fields=fields) for number in range(99)))

    async def work() -> None:
        async with running_agent(tmp_path) as (agent, _):
            assert await longest_pause(partial(agent.jobs.submit_jobs, asked, OWNER)) < 0.3

    asyncio.run(work())


def test_others_are_answered_while_a_large_answer_is_written() -> None:
    """The steps of a training, as its job wrote them, of a few thousand ranks."""
    tenths: tuple[float, ...] = (0.1,) * 4000
    step = StepRecord(1, 0, 1, 1.0, 1.0, (1,) * 4000, tenths, tenths, tenths, tenths, tenths, tenths, tenths)
    steps = [replace(step, step=at) for at in range(60)]
    assert asyncio.run(longest_pause(partial(large_json_response, {"steps": steps}))) < 0.5


def test_a_place_that_no_log_has_is_an_error(tmp_path: Path) -> None:
    asked = {"user": "", "key": "k", "fields": {"name": "long", "command": ["true"], "sync": False, "cwd": "/"}}

    async def work() -> None:
        async with running_agent(tmp_path) as (_, app):
            made = await ask(app, "POST", "/v1/jobs", caller=OWNER, body=asked)
            assert made.status == 200, made.body
            for at in ("1.0:99999999999999", "99.0:1"):
                answer = await ask(app, "GET", f"/v1/jobs/1/logs?at={at}", caller=OWNER)
                assert answer.status == 400
                assert "has 0 bytes, and no byte" in answer.document["error"]["message"]
            assert (await ask(app, "GET", "/v1/jobs/1/logs?at=1.0:0", caller=OWNER)).status == 200

    asyncio.run(work())

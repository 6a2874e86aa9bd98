"""A body of a few MiB may have a million entries: it is refused before the agent looks at each of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.rig.identity import ask, running_agent
from ugro.core.identity import Caller, Role

OWNER = Caller("ann", Role.ADMIN, "test", shares_account=True)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"channels": ["a"] * 20_001}, "20,001 entries in one list or map, at most 20,000 are taken"),
        ({"channels": {str(number): 1 for number in range(20_001)}}, "20,001 entries in one list or map"),
        (json.loads("[" * 150 + "]" * 150), "more than 100 maps and lists in each other"),
    ],
)
def test_a_body_with_too_much_in_it_is_refused(tmp_path: Path, body: Any, text: str) -> None:
    async def work() -> None:
        async with running_agent(tmp_path) as (_, app):
            answer = await ask(app, "POST", "/v1/alerts/test", caller=OWNER, body=body)
            assert answer.status == 400
            assert text in answer.document["error"]["message"]

    asyncio.run(work())


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

"""Environments of jobs that were recorded before it was recorded who chose them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.rig.identity import running_agent
from ugro.agent.agent import Agent
from ugro.core.errors import EnvFailed
from ugro.core.job import Job, JobSpec, JobState, Placement, Share
from ugro.core.python_env import EnvRequest, Whose
from ugro.core.support.codec import decode

SOURCE = "tool @ https://127.0.0.1:1/tool-1.0.tar.gz"  # making a wheel of it would run its code


def recorded() -> EnvRequest:
    document = json.loads(json.dumps(asdict(EnvRequest(requirements=(SOURCE,)))))
    del document["whose"]
    return decode(EnvRequest, document)


async def ended(agent: Agent, user: str) -> Job:
    spec = JobSpec("old", ("true",), environment=recorded())
    job = (await agent.store.jobs.submit(spec, user, f"key of {user}")).job
    return await agent.store.jobs.move(job, JobState.CANCELLED, "cancelled", exit_code=130)


def test_what_another_user_chose_stays_theirs_when_the_owner_runs_the_job_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, _):
            owner = agent.team.owner
            whose = {}
            for user in ("ann", owner):
                old = await ended(agent, user)
                again = await agent.jobs.retry(str(old.id), owner, f"again {user}")
                assert again.spec.environment is not None
                whose[user] = again.spec.environment.whose
            assert whose == {"ann": Whose.OTHER, owner: Whose.OWNER}

    asyncio.run(scenario())


def test_no_code_of_a_package_that_another_user_chose_runs_when_such_a_job_starts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_agent(tmp_path) as (agent, _):
            started = replace(await ended(agent, "ann"), attempt=1, placement=Placement((Share("here"),)))
            with pytest.raises(EnvFailed, match="tool has no wheel"):
                await agent.parts.python_envs.ensure_for(started)

    asyncio.run(scenario())

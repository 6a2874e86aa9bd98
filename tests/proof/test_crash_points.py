"""The agent is killed, or stands still, at every step between two things that last: jobs end as if nothing had been.

A point that is not reached is a failure.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from tests.proof.place import Place
from tests.rig.agent import AgentProcess
from tests.rig.judge import Final, Task
from tests.rig.tiers import sample
from tests.rig.waiting import wait_until
from ugro import Client
from ugro.client.http import account
from ugro.client.jobs import new_key
from ugro.kernel.jobs.operations import RetryJob
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.transport import SshOptions
from ugro.kernel.support.process import POINTS

GOOD = Task("good", lines=40, leaves_child=True)
BAD = Task("bad", codes=(7,))
DOOMED = Task("doomed", lines=100_000, pause_s=0.05)
GANG = Task("gang", ranks=2, lines=20)
# Plain commands, which start and end together.
SMALL_ONES = tuple(Task(f"small-{number}") for number in range(20))
SMALL = SMALL_ONES[:5]
STRAY = Task("stray", lines=100_000, pause_s=0.05)
EXPECTED = {
    "good": Final("succeeded", 1, 0),
    "bad": Final("failed", 1, 7),
    "doomed": Final("cancelled", 1, 130),
    "gang": Final("succeeded", 1, 0),
    **{task.token: Final("succeeded", 1, 0) for task in SMALL},
}
# The mix passes most points several times; a later pass is another job's.
LATER = ("start.asked@2", "conclude.recorded@2", "conclude.removed@3", "finish.recorded@2")
TAKEN_OVER_AT = (
    "start.recorded", "start.asked", "start.answered", "stop.asked", "conclude.begun",
    "finish.begun", "finish.logged",
)  # fmt: skip
_REACHED_S = 30


@pytest.mark.parametrize("point", sample([*POINTS, *LATER], "start.answered"))
def test_an_agent_that_is_killed_at_any_step_goes_on_where_it_was(point: str) -> None:
    killed_at(point)


@pytest.mark.proof
@pytest.mark.parametrize("point", sample(TAKEN_OVER_AT, "start.answered"))
def test_an_agent_that_slept_while_another_took_over_does_no_harm(point: str) -> None:
    asleep_at(point)


def test_two_commands_that_hand_in_the_same_job_to_a_slow_agent_make_one() -> None:
    with Place(1) as place, ThreadPoolExecutor(2) as pool:
        slow = ready(place.agent("submit.recorded:pause"))
        first = pool.submit(place.submit, GOOD)
        wait_until(lambda: slow.stands_still, _REACHED_S, "the agent to stand still")
        second = pool.submit(place.submit, GOOD)
        slow.let_go()
        assert first.result(_REACHED_S) == second.result(_REACHED_S)
        place.judge(place.finals())


@pytest.mark.proof
def test_a_retry_of_the_last_job_whose_answer_is_lost_makes_one_job() -> None:
    with Place(1) as place:
        agent = ready(place.agent("submit.recorded@2"))
        with Client(home=place.home, cluster=place.cluster) as client:
            first = client.jobs.submit(fields={"command": ["true"], "cwd": "/"}, env={})
            client.jobs.wait(first.id)
            second = client.ask(RetryJob("last", new_key(), account()))
            assert wait_until(lambda: agent.was_killed, what="the agent to die over the retry")
            assert [job.id for job in client.jobs.newest()] == [second.id, first.id]
            assert client.jobs.wait(second.id).state == "succeeded"


def asleep_at(point: str) -> None:
    """Its state was restored elsewhere, and the job ended there; then it wakes up in the middle of a step."""
    tasks = {"stop": (DOOMED,), "finish": SMALL_ONES}.get(point.partition(".")[0], (GANG,))
    has_slept = Event()
    with Place(2) as place, ThreadPoolExecutor(1) as pool:
        old = ready(place.agent(f"{point}:pause"))
        command = pool.submit(hand_in, place, tasks, has_slept)
        wait_until(lambda: old.stands_still, _REACHED_S, f"the agent to stand still at {point}")
        has_slept.set()
        for number, task in enumerate(place.book.tasks.values(), start=1):
            place.book.acknowledged(task, number)
        other = place.copy_of_state()
        ready(place.agent(home=other))
        finals = place.finals(other)
        old.let_go()
        command.result(_REACHED_S)
        wait_until(lambda: refused(place) or place.job(task.token).is_final, _REACHED_S, "the old agent to be refused")
        place.judge(finals, other)


def hand_in(place: Place, tasks: Sequence[Task], has_slept: Event) -> None:
    """One after the other: on a busy machine a small one may take as long as a large one, and go the same way."""
    for task in tasks:
        place.submit(task)
        if task is DOOMED:
            place.wait_begun(task.token)
            place.cancel(task.token)
        wait_until(lambda task=task: has_slept.is_set() or place.job(task.token).is_final, _REACHED_S)  # type: ignore[misc]
        if has_slept.is_set():
            return


def killed_at(point: str, place: Place | None = None) -> None:
    with place or Place(3) as place:
        if point.startswith("sweep."):
            plant_stray(place)
        armed = place.agent(point)
        armed.wait_ready()
        submit_all(place)
        place.wait_begun("doomed")
        place.cancel("doomed")
        finals = place.finals()
        try:
            wait_until(lambda: armed.was_killed, _REACHED_S, "the agent to die")
        except AssertionError as error:
            raise AssertionError(place.seen(f"{point} was not reached")) from error
        finally:
            armed.kill()
        assert finals == EXPECTED, place.seen(f"killed at {point}")
        place.ask(lambda client: client.agent())
        place.judge(finals)


def submit_all(place: Place) -> None:
    place.submit_together(SMALL)
    for task in (GOOD, BAD, DOOMED, GANG):
        place.submit(task)


def ready(agent: AgentProcess) -> AgentProcess:
    assert agent.wait_ready()
    return agent


def refused(place: Place) -> bool:
    return "copied or restored" in (place.home / "agent.log").read_text()


def plant_stray(place: Place) -> None:
    """A run of an attempt that is over, as of one that was given up while its node was away."""
    before = ready(place.agent())
    job = place.ask(lambda client: client.jobs.submit(fields={"command": ["true"], "cwd": "/"}, env={}, key="first"))
    place.wait(lambda: place.ask(lambda client: client.jobs.get(job.id)).is_final, "a job to end")
    before.stop()
    meta = dict(place.sql("SELECT key, value FROM meta"))
    [[text]] = place.sql(f"SELECT placement FROM attempts WHERE job = {job.id}")
    place.sql(
        "INSERT INTO attempts (job, number, placement, started_at, ended_at) "
        f"SELECT job, 2, placement, started_at, started_at FROM attempts WHERE job = {job.id}"
    )
    place.sql(f"UPDATE jobs SET attempt = 2 WHERE id = {job.id}")
    [share] = json.loads(text)["shares"]
    asyncio.run(_start_stray(place, share["node"], job.id, meta))
    wait_until(lambda: place.ledger.alive(), _REACHED_S, "the stray to begin")


async def _start_stray(place: Place, node: str, job: int, meta: dict[str, str]) -> None:
    spec = NodeSpec(node, remote_root=str(place.folder / node), transport="local")
    link = await Link.open(spec, SshOptions(), timeout_s=_REACHED_S, env=dict(os.environ))
    rank = {"rank": 0, "argv": place.ledger.fields(STRAY)["command"], "env": place.ledger.env}
    run = {"job": str(job), "attempt": 2, "spec": {"ranks": [rank], "grace_s": 1}}
    who = {"agent": meta["agent_id"], "generation": int(meta["generation"])}
    await link.call("runs.start", {**who, "runs": [run]}, timeout_s=_REACHED_S)
    link.close()
    await link.wait_closed()

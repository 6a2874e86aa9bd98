"""A service's door while things break: replicas killed, stopped and cut off, and the door's own processes killed."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.conftest import in_loop
from tests.rig.door import DoorRig, Load, open_door, request
from tests.rig.waiting import descendants, is_alive, wait_until, wait_until_dead
from ugro.core.door import ServerState
from ugro.core.errors import UgroError

BODY = b"x" * 20_000


@pytest.mark.proof
@pytest.mark.parametrize("options", [{}, {"method": "POST", "body": BODY}], ids=["GET", "POST"])
@in_loop
async def test_a_replica_killed_under_load_costs_no_request(options: dict[str, Any]) -> None:
    async with open_door() as rig:
        for name in ("one", "two", "three"):
            await rig.add_replica(name, 0.02)
        load = Load(rig.port, 60, options=options)
        running = asyncio.create_task(load.run(120))
        await load.more(60)
        rig.kill_replica("one")
        await load.more(150)
        load.is_enough = True
        await running
        assert load.failures == []
        stats = await rig.door.stats()
        assert stats.errors == 0
        assert stats.servers["one"].retries > 0


@pytest.mark.proof
@in_loop
async def test_the_only_replica_is_killed_and_its_requests_go_to_the_next_one() -> None:
    async with open_door() as rig:
        await rig.add_replica("one", 1.0)
        running = [asyncio.create_task(rig.request(method="POST", body=BODY)) for _ in range(10)]
        await rig.until(lambda stats, _: stats.servers["one"].sessions == 10)
        rig.kill_replica("one")
        late = [asyncio.create_task(rig.request()) for _ in range(5)]
        await rig.until(lambda stats, _: stats.held == 15)
        await rig.add_replica("two", 0.0)
        answers = await asyncio.gather(*running, *late)
        assert {(answer.status, answer.name) for answer in answers} == {(200, "two")}


@pytest.mark.proof
@in_loop
async def test_a_post_is_not_repeated_if_that_was_asked_for() -> None:
    async with open_door(retries_posts=False) as rig:
        await rig.add_replica("one", 5.0)
        post = asyncio.create_task(rig.request(method="POST", body=b"x"))
        get = asyncio.create_task(rig.request())
        await rig.until(lambda stats, _: stats.servers["one"].sessions == 2)
        await rig.add_replica("two", 0.0)
        rig.kill_replica("one")
        answer = await post
        assert answer.status == 502
        assert answer.document["error"]["message"] == "the replica ended before it had answered"
        assert (await get).name == "two"


@pytest.mark.proof
@in_loop
async def test_all_replicas_are_replaced_under_load_without_a_failed_request() -> None:
    async with open_door() as rig:
        for number in range(3):
            await rig.add_replica(f"old-{number}", 0.02)
        load = Load(rig.port, 40, options={"method": "POST", "body": BODY})
        running = asyncio.create_task(load.run(120))
        for number in range(3):
            await load.more(40)
            await rig.add_replica(f"new-{number}", 0.02)
            await _leave(rig, f"old-{number}")
        await load.more(40)
        load.is_enough = True
        await running
        assert load.failures == []
        assert sorted(await rig.door.servers()) == ["new-0", "new-1", "new-2"]
        assert len(load.names) == 6


async def _leave(rig: DoorRig, name: str) -> None:
    await rig.door.drain(name)
    await rig.until(lambda _, servers: not servers[name].sessions)
    rig.signal_replica(name, signal.SIGTERM)
    await rig.door.remove(name)


@pytest.mark.proof
@pytest.mark.parametrize("which", ["haproxy", "the one between"])
@in_loop
async def test_a_door_that_was_killed_is_back_with_the_same_servers(which: str) -> None:
    async with open_door(needs_key=True) as rig:
        await rig.add_replica("one")
        await rig.add_replica("two")
        await rig.door.add(replace(await rig.start_replica("new"), canary=True))
        await rig.door.set_weight("two", 17)
        await rig.door.drain("one")
        await rig.door.share_canary(0.5)
        await rig.door.set_keys({"ab" * 32: "ann"})
        before = {name: replace(one, sessions=0) for name, one in (await rig.door.servers()).items()}
        old = rig.haproxy_pid
        os.kill(old if which == "haproxy" else rig.middle_pid, signal.SIGKILL)
        wait_until_dead([old])
        # Nobody is refused: who connects meanwhile waits.
        answers = [await request(rig.port) for _ in range(20)]
        assert {answer.status for answer in answers} == {401}
        assert max(answer.seconds for answer in answers) < 10
        assert await _servers(rig) == before
        assert rig.haproxy_pid != old
        assert (rig.folder / "door" / "share.map").read_text() == "canary 500\n"
        assert "ab" * 32 in (rig.folder / "door" / "keys.map").read_text()


async def _servers(rig: DoorRig) -> object:
    async with asyncio.timeout(20):
        while True:
            try:
                return await rig.door.servers()
            except UgroError:
                await asyncio.sleep(0.02)


@pytest.mark.proof
@in_loop
async def test_requests_go_on_after_the_door_was_killed_under_load() -> None:
    """Those that it had in its hands are lost, and no others."""
    async with open_door() as rig:
        await rig.add_replica("one", 0.02)
        await rig.add_replica("two", 0.02)
        load = Load(rig.port, 40)
        running = asyncio.create_task(load.run(120))
        await load.more(40)
        pid = rig.haproxy_pid
        while not load.under_way:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        in_hands = load.under_way + 1  # one may come before the signal does
        os.kill(pid, signal.SIGKILL)
        await load.more(100)
        load.is_enough = True
        await running
        assert len(load.failures) <= in_hands


@pytest.mark.proof
@in_loop
async def test_nothing_outlives_the_first_process() -> None:
    async with open_door() as rig:
        below = descendants([rig.process.pid])
        assert len(below) == 2
        rig.process.kill()
        rig.process.wait()
        wait_until_dead(below)


@pytest.mark.proof
@in_loop
async def test_a_door_that_ends_finishes_what_it_has_and_refuses_the_rest() -> None:
    async with open_door() as rig:
        await rig.add_replica("one", 1.0)
        running = asyncio.create_task(rig.request())
        await rig.until(lambda stats, _: stats.servers["one"].sessions == 1)
        rig.process.terminate()
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            except ConnectionRefusedError:
                break
            writer.close()
        assert (await running).status == 200
        wait_until(lambda: rig.process.poll() is not None, 10)
        assert rig.process.returncode == 0


@pytest.mark.proof
@in_loop
async def test_a_replica_that_stands_still_loses_its_requests_to_another() -> None:
    async with open_door(answer_s=1.0, health_path="/health", health_interval_s=0.5) as rig:
        await rig.add_replica("one")
        await rig.add_replica("two")
        rig.signal_replica("one", signal.SIGSTOP)
        answers = [await rig.request(method="POST", body=BODY) for _ in range(10)]
        assert {(answer.status, answer.name) for answer in answers} == {(200, "two")}
        await rig.until(lambda _, servers: servers["one"].state is ServerState.DOWN)
        rig.signal_replica("one", signal.SIGCONT)
        await rig.until(lambda _, servers: servers["one"].state is ServerState.READY)
        assert is_alive(rig.haproxy_pid)

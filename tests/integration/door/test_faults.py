"""A service's door while things break: replicas killed, stopped and cut off, and the door's own processes killed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import in_loop
from tests.rig.door import DoorRig, Load, open_door, request
from tests.rig.ports import free_port
from tests.rig.waiting import descendants, is_alive, wait_until, wait_until_dead
from ugro.features.services.model import DoorSettings, ServerState
from ugro.features.services.node.door_machine import LASTING, find_haproxy
from ugro.features.services.node.door_records import parsed
from ugro.features.services.service.door import door_argv, door_env
from ugro.kernel.support.errors import UgroError

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


@pytest.mark.parametrize("wait_s", [300.0, pytest.param(0.0, marks=pytest.mark.proof)])
@in_loop
async def test_a_door_that_was_killed_gives_a_replica_that_loads_nothing_before_it_is_ready(wait_s: float) -> None:
    """It listens and answers 503, as servers of models do: only a check tells that it is not ready."""
    async with open_door(health_path="/health", health_interval_s=1.0, wait_s=wait_s) as rig:
        await rig.add_replica("one", 0.01)
        await rig.add_replica("two", 0.01)
        rig.signal_replica("two", signal.SIGUSR1)
        await rig.until(lambda _, servers: servers["two"].state is ServerState.DOWN)
        load = Load(rig.port, 60)
        running = asyncio.create_task(load.run(120))
        for which in ("haproxy", "the one between"):
            await load.more(20)
            pid = rig.haproxy_pid
            os.kill(pid if which == "haproxy" else rig.middle_pid, signal.SIGKILL)
            wait_until_dead([pid])
            await load.more(60)
        assert set(load.names) == {"one"}
        rig.signal_replica("two", signal.SIGUSR1)
        while "two" not in load.names:
            await load.more(1)
        load.is_enough = True
        await running
        assert [one for one in load.failures if one.startswith("5")] == []


@in_loop
async def test_what_canaries_drop_goes_to_no_replica_that_loads() -> None:
    async with open_door(health_path="/health", health_interval_s=1.0) as rig:
        for name in ("one", "two"):
            await rig.add_replica(name)
        await rig.door.add(replace(await rig.start_replica("new"), canary=True))
        await rig.door.share_canary(1.0)
        assert (await rig.request()).name == "new"
        rig.signal_replica("two", signal.SIGUSR1)
        rig.kill_replica("new")
        async with asyncio.timeout(60):
            while not {"two", "new"} <= await _down_among_canaries(rig):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for _ in range(2):
            answers = [await rig.request() for _ in range(6)]
            assert {(answer.status, answer.name) for answer in answers} == {(200, "one")}
            pid = rig.haproxy_pid
            os.kill(pid, signal.SIGKILL)
            wait_until_dead([pid])
        await _servers(rig)
        await rig.door.drain("two")
        await rig.door.remove("two")
        await rig.door.add(await rig.start_replica("three"))
        assert set(await rig.door.servers()) == {"one", "three", "new"}


async def _down_among_canaries(rig: DoorRig) -> set[str]:
    rows = parsed(await _at_haproxy(rig, "show stat"))["canary"]
    return {name for name, row in rows.items() if row["status"].startswith("DOWN")}


@in_loop
async def test_requests_wait_at_a_door_that_was_killed_until_a_replica_is_ready() -> None:
    async with open_door(health_path="/health", health_interval_s=1.0) as rig:
        await rig.add_replica("one")
        rig.signal_replica("one", signal.SIGUSR1)
        pid = rig.haproxy_pid
        os.kill(pid, signal.SIGKILL)
        wait_until_dead([pid])
        waiting = [asyncio.create_task(rig.request(method="POST", body=BODY)) for _ in range(5)]
        await _servers(rig)
        await rig.until(lambda stats, _: stats.held == 5)
        rig.signal_replica("one", signal.SIGUSR1)
        assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}


@pytest.mark.proof
@in_loop
async def test_a_haproxy_that_was_stopped_is_continued_with_all_that_it_has() -> None:
    async with open_door() as rig:
        await rig.add_replica("one", 1.0)
        running = asyncio.create_task(rig.request())
        await rig.until(lambda stats, _: stats.servers["one"].sessions == 1)
        pid = rig.haproxy_pid
        os.kill(pid, signal.SIGSTOP)
        late = asyncio.create_task(rig.request())
        assert {answer.status for answer in await asyncio.gather(running, late)} == {200}
        assert rig.haproxy_pid == pid
        wait_until(lambda: "HAProxy was stopped; it is continued" in rig.log.read_text(), 10, "words about it")


@pytest.mark.proof
@in_loop
async def test_a_haproxy_that_does_not_answer_is_replaced() -> None:
    async with open_door() as rig:
        await rig.add_replica("one")
        hung = rig.haproxy_pid
        async with asyncio.timeout(120):
            while is_alive(hung):  # whoever continues it
                with suppress(ProcessLookupError):
                    os.kill(hung, signal.SIGSTOP)
                await asyncio.sleep(0.002)
        assert (await rig.request()).status == 200
        assert rig.haproxy_pid != hung
        assert "HAProxy has not answered for 20 s; it is killed" in rig.log.read_text()


@in_loop
async def test_what_was_done_by_half_is_done_when_it_is_asked_for_again() -> None:
    """As after an answer of HAProxy that did not come in time: it has one part, and the door does not know which."""
    revoked, kept = (hashlib.sha256(key.encode()).hexdigest() for key in ("sk-a", "sk-b"))
    async with open_door(needs_key=True) as rig:
        one, two = await rig.add_replica("one"), await rig.start_replica("two")
        await rig.door.set_keys({kept: "bob"})
        await _at_haproxy(rig, f"add map keys.map {revoked} ann", "add server replicas/two 127.0.0.1:1")
        await _at_haproxy(rig, "set server replicas/one state maint", "del server replicas/one")
        with pytest.raises(UgroError):
            await rig.door.drain("one")
        assert (await rig.door.servers())["one"].state is ServerState.DOWN, "nothing was drained"
        await rig.door.remove("one")
        await rig.door.add(two)
        await rig.door.add(replace(one, name="three"))
        await rig.door.set_keys({kept: "bob"})
        assert (await rig.request(headers={"authorization": "Bearer sk-a"})).status == 401
        answers = [await rig.request(headers={"authorization": "Bearer sk-b"}) for _ in range(4)]
        assert {(answer.status, answer.name) for answer in answers} == {(200, "one"), (200, "two")}
        assert set(await rig.door.servers()) == {"two", "three"}


async def _at_haproxy(rig: DoorRig, *commands: str) -> str:
    """The answer to the last one."""
    answer = b""
    for one in commands:
        reader, writer = await asyncio.open_unix_connection(str(rig.folder / "door" / "admin"))
        writer.write(one.encode() + b"\n")
        answer = await reader.read(-1)
        writer.close()
    return answer.decode()


@pytest.mark.proof
@in_loop
async def test_a_haproxy_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    script, mark = tmp_path / "haproxy", tmp_path / "killed"
    program = find_haproxy()
    script.write_text(
        f'#!/bin/sh\n[ "$1" = -v ] || [ -e {mark} ] || {{ touch {mark}; kill -9 $$; }}\nexec {program} "$@"\n'
    )
    script.chmod(0o700)
    async with open_door(haproxy=str(script)) as rig:
        assert mark.exists()
        await rig.add_replica("one")
        assert (await rig.request()).status == 200


@pytest.mark.proof
def test_a_door_that_is_asked_to_end_while_it_starts_ends(tmp_path: Path) -> None:
    """The signal comes when the child is there and its number is not known yet."""
    settings = DoorSettings("try", free_port(), str(tmp_path / "state"), drain_s=1.0)
    python, *options, boot, word, name = door_argv(sys.executable, "try")
    early = "import os, signal; first = os.getpid()\nos.register_at_fork(after_in_parent=lambda: "
    early += "os.kill(first, signal.SIGTERM) if os.getpid() == first else None)"
    env = {**os.environ, **door_env(settings), "UGRO_RUN_DIR": str(tmp_path)}
    with subprocess.Popen([python, *options, f"{early}\n{boot}", word, name], env=env) as door:
        try:
            assert door.wait(60) == 0
        finally:
            door.kill()


def refused(place: Path, state: str) -> tuple[int, list[str]]:
    """Of a door that keeps its state there: its exit code and what it said."""
    settings = DoorSettings("try", free_port(), str(place / state), drain_s=1.0)
    env = {**os.environ, **door_env(settings), "UGRO_RUN_DIR": str(place)}
    done = subprocess.run(door_argv(sys.executable, "try"), env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.splitlines()


def test_a_door_that_cannot_make_its_folder_ends_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    code, said = refused(tmp_path, "state/k")
    assert (code, said) == (LASTING, [f"ugro: the door cannot make its folder {tmp_path}/state/k: Not a directory"])


@pytest.mark.proof
def test_a_door_that_fails_again_and_again_ends_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "state" / "door.json").mkdir(parents=True)
    code, said = refused(tmp_path, "state")
    assert code == LASTING
    assert said[-1].startswith("ugro: the door cannot go on: [Errno 21] Is a directory"), said
    assert len([line for line in said if "it is started again" in line]) > 5, said


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

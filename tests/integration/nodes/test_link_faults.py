"""Nodes that hang, cables that are cut, processes that are killed: noticed, named, mended, and nothing left behind."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, RawProgram, Ugro, in_loop, kept_nodes, link_to, run_command, until
from tests.rig.netns import Way
from tests.rig.sshd import SshdFarm, SshdNode
from tests.rig.waiting import descendants, is_alive, name_of, parent_of, signal_all, wait_until
from ugro.kernel.links.link import Link
from ugro.kernel.links.node import Node
from ugro.kernel.support.errors import RemoteFailure, Unreachable
from ugro.node import wire

# What is promised is 10 s; the rest is for a loaded machine.
NOTICED_S = 11.0
# Leaves its group, its session and its parent; ignores SIGTERM; loses its environment. Each part writes its pid.
HOSTILE = """
import os, signal, subprocess, sys, time
def note(name):
    with open(os.path.join(sys.argv[1], name), "w") as file: file.write(str(os.getpid()))
def stay(name):
    note(name)
    while True: time.sleep(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        stay("double-forked")
    os._exit(0)
if os.fork() == 0:
    code = "import os,sys,time,signal;signal.signal(15,1);open(sys.argv[1],'w').write(str(os.getpid()));time.sleep(1e6)"
    os.setsid()
    os.execve(sys.executable, [sys.executable, "-c", code, os.path.join(sys.argv[1], "without-environment")], {})
if os.fork() == 0:
    import ctypes, threading
    thread = threading.Thread(target=stay, args=("threaded",))
    thread.start()
    ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # ends its first thread alone
stay("main")
"""
PARTS = {"main", "double-forked", "without-environment", "threaded"}


def start_hostile(link: Link, folder: Path, *, grace_s: float = 0.5) -> Any:
    folder.mkdir()
    params = {"argv": ["/usr/bin/python3", "-c", HOSTILE, str(folder)], "marker": "hostile", "grace_s": grace_s}
    return link.stream("exec", params)


def pids(folder: Path) -> dict[str, int]:
    return {path.name: int(text) for path in folder.iterdir() if (text := path.read_text())}


def runs(pid: int) -> bool:
    """Also a process whose first thread has ended, which looks like a zombie from afar."""
    try:
        stats = [Path(task, "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(stat.rpartition(")")[2].split()[0] not in "ZX" for stat in stats)


async def hostile_tree(link: Link, folder: Path) -> tuple[Any, list[int]]:
    stream = start_hostile(link, folder)
    await until(lambda: set(pids(folder)) == PARTS, 15, "all parts of the tree to run")
    return stream, list(pids(folder).values())


async def all_end(tree: list[int], timeout_s: float = 15) -> None:
    await until(lambda: not [pid for pid in tree if runs(pid)], timeout_s, f"the tree {tree} to end")


def program_of(node: SshdNode) -> int:
    """The node program: the first Python below sshd."""
    found = [pid for pid in node.sessions() if name_of(pid).startswith("python")]
    assert found, [name_of(pid) for pid in node.sessions()]
    return found[0]


async def comes_back(node: Node, timeout_s: float = 45) -> None:
    """By itself: nobody asks for it."""
    await until(lambda: node.link is not None, timeout_s, f"{node.spec.name} to come back; {node.error}")


# --- silence -------------------------------------------------------------------------------------------------------


async def cut_off(nodes: list[Node], *failures: Callable[[], None]) -> list[Unreachable]:
    """Each failure takes its node away in the middle of a call; the other nodes' calls go on meanwhile."""
    links = [await node.ready(20) for node in nodes]
    victims, others = links[: len(failures)], links[len(failures) :]
    params = {"argv": ["sleep", "1000"], "marker": "m", "grace_s": 0}
    calls = [asyncio.create_task(link.stream("exec", params).result()) for link in victims]
    for fail in failures:
        fail()
    began = time.monotonic()
    while not all(call.done() for call in calls):
        asked = time.monotonic()
        assert asked - began < NOTICED_S, f"not noticed: {[call.done() for call in calls]}"
        for link in others:
            await link.call("echo", {}, timeout_s=5)
        assert time.monotonic() - asked < 5, "the other nodes' calls must go on"
        await asyncio.sleep(0.05)
    # The calls of a link end with it; its node hears of that in its own task, on a busy machine a little later.
    await until(lambda: all(node.link is None for node in nodes[: len(victims)]), 5, "the nodes to have no link")
    assert [node.link for node in nodes[len(victims) :]] == others
    return [error for call in calls if isinstance(error := call.exception(), Unreachable)]


@pytest.mark.proof
@in_loop
async def test_a_node_that_hangs_is_noticed_in_time_and_comes_back_by_itself(farm_of: Farms) -> None:
    farm = farm_of(3)
    async with kept_nodes(farm) as nodes:
        assert [error.cause for error in await cut_off(nodes, farm.nodes[0].freeze)] == ["hung"]
        farm.nodes[0].thaw()
        await comes_back(nodes[0])
        assert (await run_command(await nodes[0].ready(5), "true"))[0]["code"] == 0
        await until(lambda: "sleep" not in map(name_of, farm.nodes[0].processes()), 15, "the old command to end")


@pytest.mark.proof
@in_loop
async def test_a_cut_cable_is_noticed_in_time_whichever_way_is_cut_and_heals_by_itself(farm_of: Farms) -> None:
    farm = farm_of.with_cables(len(Way) + 1)
    async with kept_nodes(farm) as nodes:
        cuts = [functools.partial(node.cut, way) for node, way in zip(farm.nodes, Way, strict=False)]
        assert [error.cause for error in await cut_off(nodes, *cuts)] == ["hung"] * len(Way)
        for node in farm.nodes:
            node.heal()
        for kept in nodes:
            await comes_back(kept)
            assert (await run_command(await kept.ready(5), "true"))[0]["code"] == 0


# --- death ---------------------------------------------------------------------------------------------------------


def kill_program(node: SshdNode) -> None:
    os.kill(program_of(node), signal.SIGKILL)


def kill_ssh(node: SshdNode) -> None:
    signal_all(signal.SIGKILL, [pid for pid in descendants([os.getpid()]) if name_of(pid) == "ssh"])


def kill_session(node: SshdNode) -> None:
    node.kill_sessions(commands=False)


@pytest.mark.parametrize("kill", [kill_program, kill_ssh, kill_session])
@in_loop
async def test_when_a_part_of_the_way_is_killed_calls_fail_the_tree_ends_and_the_node_comes_back(
    farm_of: Farms, tmp_path: Path, kill: Callable[[SshdNode], None]
) -> None:
    farm = farm_of(1)
    async with kept_nodes(farm) as [node]:
        link = await node.ready(20)
        stream, tree = await hostile_tree(link, tmp_path / "tree")
        kill(farm.nodes[0])
        with pytest.raises(Unreachable) as caught:
            await asyncio.wait_for(stream.result(), 10)
        assert caught.value.cause == "link-lost"
        await all_end(tree)
        await comes_back(node)
        assert (await run_command(await node.ready(5), "true"))[0]["code"] == 0
    await until(lambda: not farm.nodes[0].processes(), 10, "everything on the node to end")


@in_loop
async def test_a_cancelled_command_ends_with_its_whole_tree(farm_of: Farms, tmp_path: Path) -> None:
    farm = farm_of(1)
    async with link_to(farm, farm.nodes[0]) as link:
        stream, tree = await hostile_tree(link, tmp_path / "tree")
        stream.ask_to_stop()
        ended = await asyncio.wait_for(stream.result(), 15)
        assert ended["unkillable"] == []
        assert not [pid for pid in tree if runs(pid)]


@in_loop
async def test_what_a_command_leaves_behind_ends_with_it(farm_of: Farms, tmp_path: Path) -> None:
    farm = farm_of(1)
    left = tmp_path / "pid"
    async with link_to(farm, farm.nodes[0]) as link:
        script = 'setsid sh -c "echo \\$\\$ >$0; exec sleep 1000" & while ! test -s $0; do sleep 0.01; done; exit 5'
        ended, _ = await asyncio.wait_for(run_command(link, "sh", "-c", script, str(left), grace_s=0.2), 15)
        assert ended["code"] == 5
        assert not is_alive(int(left.read_text()))


@pytest.mark.proof
@in_loop
async def test_when_even_the_guard_is_killed_the_tree_ends_and_other_commands_go_on(
    farm_of: Farms, tmp_path: Path
) -> None:
    farm = farm_of(1)
    async with link_to(farm, farm.nodes[0]) as link:
        other = asyncio.create_task(run_command(link, "sh", "-c", "sleep 2; echo fine"))
        stream, tree = await hostile_tree(link, tmp_path / "tree")
        os.kill(parent_of(pids(tmp_path / "tree")["main"]), signal.SIGKILL)
        with pytest.raises(RemoteFailure, match="killed"):
            await asyncio.wait_for(stream.result(), 10)
        await all_end(tree, 5)
        assert (await other)[1] == b"fine\n"
        assert await link.call("echo", {}, timeout_s=5) == {}


@in_loop
async def test_whoever_else_holds_the_output_of_a_command_does_not_keep_it_from_ending(farm_of: Farms) -> None:
    farm = farm_of(1)
    async with link_to(farm, farm.nodes[0]) as link:
        params = {"argv": ["sh", "-c", "echo $$; read _ < /dev/zero"], "marker": "m", "grace_s": 0.2}
        stream = link.stream("exec", params)
        chunks = aiter(stream)
        _, pid = await anext(chunks)
        holder = os.open(f"/proc/{int(pid)}/fd/1", os.O_WRONLY)  # as a daemon that was handed the descriptor
        try:
            stream.ask_to_stop()
            assert (await asyncio.wait_for(stream.result(), 10))["signal"] == signal.SIGTERM
        finally:
            os.close(holder)


@in_loop
async def test_many_commands_leave_the_node_program_as_it_was(farm_of: Farms) -> None:
    farm = farm_of(1)
    async with link_to(farm, farm.nodes[0]) as link:
        await run_command(link, "true")
        program = program_of(farm.nodes[0])
        before = sorted(os.listdir(f"/proc/{program}/fd"))
        ended = await asyncio.gather(*(run_command(link, "sh", "-c", f"exit {n}") for n in range(30)))
        assert [result["code"] for result, _ in ended] == list(range(30))
        assert sorted(os.listdir(f"/proc/{program}/fd")) == before
        assert Path(f"/proc/{program}/task/{program}/children").read_text() == ""  # no zombie either


HANGING_SMI = """#!/bin/sh
echo asked >> "$ASKED"
while test -e "$HANG"; do sleep 0.05; done
"""


def test_a_gpu_driver_that_hangs_is_not_asked_again_and_again(tmp_path: Path) -> None:
    tool, asked, hang = tmp_path / "nvidia-smi", tmp_path / "asked", tmp_path / "hang"
    tool.write_text(HANGING_SMI)
    tool.chmod(0o755)
    hang.touch()
    env = (("ASKED", str(asked)), ("HANG", str(hang)), ("PATH", f"{tmp_path}:/usr/bin:/bin"))
    with RawProgram(tmp_path / "root", env=env) as program:
        for number in range(1, 21):
            program.call(number, "probe", {"gpu_timeout_s": 0.02})
            answer = wire.parse(program.frame()[2])
            assert answer["gpu_error"] == "the GPU driver does not answer"
            assert answer["memory_total_bytes"] > 0
        wait_until(asked.exists, 30, "the driver to be asked")
        assert len(asked.read_text().split()) == 1
        hang.unlink()
        wait_until(lambda: is_read(program), 10, "the driver to be read again")
        assert is_read(program)  # by then everything that was asked before is worked off
        assert len(asked.read_text().split()) <= 6


def is_read(program: RawProgram) -> bool:
    program.call(1, "probe", {"gpu_timeout_s": 1.0})
    return "does not answer" not in wire.parse(program.frame()[2])["gpu_error"]


@pytest.mark.proof
def test_when_the_agent_is_killed_nodes_end_what_it_ran(cluster: SshdFarm, ugro: Ugro, tmp_path: Path) -> None:
    node = cluster.nodes[0]
    folder = tmp_path / "tree"
    folder.mkdir()
    running = ugro.start("exec", node.name, "--", "/usr/bin/python3", "-c", HOSTILE, str(folder))
    try:
        wait_until(lambda: set(pids(folder)) == PARTS, 20, "all parts of the tree to run")
        tree = list(pids(folder).values())
        agent = json.loads(ugro("agent", "status", "--json").stdout)["agent"]
        os.kill(agent["pid"], signal.SIGKILL)
        _, stderr = running.communicate(timeout=20)
        assert running.returncode == 5
        assert b"Traceback" not in stderr
    finally:
        running.kill()
        running.communicate()
    wait_until(lambda: not [pid for pid in tree if runs(pid)], 20, "the tree to end")
    wait_until(lambda: not [pid for one in cluster.nodes for pid in one.processes()], 20, "node programs to end")
    assert not ugro.processes()


def test_a_node_program_that_hears_nothing_any_more_ends_itself_and_its_commands(tmp_path: Path) -> None:
    with RawProgram(tmp_path, silence_s=1.0) as program:
        program.call(1, "exec", {"argv": ["sleep", "1000"], "marker": "m", "grace_s": 0})
        pid = program.process.pid
        wait_until(lambda: "sleep" in map(name_of, descendants([pid])), 10, "the command to run")
        command = descendants([pid])
        program.process.wait(10)  # its pipes are open, and nothing comes
        wait_until(lambda: not any(map(is_alive, command)), 10, "the command to end")


def woken(node: Node) -> Node:
    """Asked for, it comes back sooner than its growing pauses would let it."""
    node.wake()
    return node


# --- again and again -----------------------------------------------------------------------------------------------


@pytest.mark.proof
@in_loop
async def test_a_node_that_loses_its_link_again_and_again_leaks_nothing(farm_of: Farms) -> None:
    farm = farm_of(1)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with kept_nodes(farm) as [node]:
        await node.ready(20)
        before, tasks = descriptors(), len(asyncio.all_tasks())
        for _ in range(3):
            kill_ssh(farm.nodes[0])
            await until(lambda: node.link is None, 5, "the loss to be noticed")
            await until(lambda: woken(node).link is not None, 20, "the node to come back")
        assert (descriptors(), len(asyncio.all_tasks())) == (before, tasks)
    await until(lambda: not farm.nodes[0].processes(), 10, "everything on the node to end")

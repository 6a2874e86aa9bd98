"""Checkpoints when something goes wrong: either side is killed in the middle, or a node lies."""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.conftest import in_loop, memory_bytes, until
from tests.integration.nodes.test_link_fuzz import GREETING, fake
from tests.rig.checkpoints import Rig, job, name_at_home, nodes_and_home, write
from tests.rig.nodeprogram import AGENT
from tests.rig.waiting import wait_until
from ugro.kernel.files.node_files import Found, NodeFiles, Where
from ugro.kernel.files.results.checkpoints import CheckpointSync
from ugro.kernel.links.node import Identity
from ugro.kernel.support.errors import RemoteFailure, Unreachable
from ugro.node import wire
from ugro.node.files.listing import RunFile, encoded, fingerprint

MIB = 1 << 20


@pytest.fixture
def rig() -> Iterator[Rig]:
    with nodes_and_home() as rig:
        yield rig


# --- killed in the middle ---------------------------------------------------------------------------------------


def large(folder: Path, name: str, size: int = 100 * MIB) -> str:
    """Takes long enough to be caught in the middle; returns its hash."""
    block = os.urandom(MIB)
    fresh = folder / f"{name}.tmp"
    with fresh.open("wb") as file:
        for _ in range(size // MIB):
            file.write(block)
    fresh.rename(folder / name)
    return hash_of(folder / name)


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bytes_arriving(folder: Path) -> int:
    found = 0
    # os.walk minds no folder that goes away meanwhile.
    for parent, _, names in os.walk(folder):
        for name in names if "/.arriving." in parent else ():
            with suppress(FileNotFoundError):
                found += os.path.getsize(os.path.join(parent, name))
    return found


def arriving_file(folder: Path) -> int:
    """The inode of the one file that is incomplete."""
    [path] = folder.glob(".arriving.*/files.partial/*")
    return path.stat().st_ino


@pytest.mark.proof
@in_loop
async def test_a_node_killed_while_it_sends_leaves_nothing_half_and_is_asked_again(rig: Rig) -> None:
    wanted = large(rig.written("n1"), "step_1.pt")
    async with rig.agent("n1") as checkpoints:
        await checkpoints.place(job(1), "n1")
        collecting = asyncio.create_task(checkpoints.collect(job(1), ["n1"], timeout_s=60))
        await until(lambda: bytes_arriving(rig.kept()) > 5 * MIB, 20, "some of it to arrive")
        so_far = arriving_file(rig.kept())
        rig.kill_programs("n1")
        assert not collecting.done()
        collected = await collecting
        assert collected.newest is not None, collected.problems
        arrived = Path(collected.newest.path) / "step_1.pt"
        assert hash_of(arrived) == wanted
        assert arrived.stat().st_ino == so_far, "the transfer went on where it was"
        assert {path.name for path in rig.kept().iterdir()} == {"attempt_1.json", "1"}


@in_loop
async def test_a_node_killed_while_it_receives_gets_it_whole_the_next_time(rig: Rig) -> None:
    wanted = large(rig.written("n1"), "step_1.pt")
    async with rig.agent("n1", "n2") as checkpoints:
        await checkpoints.collect(job(1), ["n1"])
        placing = asyncio.create_task(checkpoints.place(job(2), "n2"))
        await until(lambda: bytes_arriving(rig.resumed("n2")) > 5 * MIB, 20, "some of it to arrive")
        rig.kill_programs("n2")
        with pytest.raises(Unreachable):
            await placing
        left = list(rig.resumed("n2").iterdir())
        assert [path.name.startswith(".arriving.") for path in left] == [True]
        resume = await placed_when_back(checkpoints, "n2")
        assert resume is not None
        assert hash_of(Path(resume) / "step_1.pt") == wanted
        assert [str(path) for path in rig.resumed("n2").iterdir()] == [resume]


async def placed_when_back(checkpoints: CheckpointSync, node: str) -> str | None:
    """As an agent does it: tried again until the node has a link again."""
    deadline = asyncio.get_running_loop().time() + 20
    while True:
        try:
            return (await checkpoints.place(job(2), node)).resume
        except Unreachable:
            assert asyncio.get_running_loop().time() < deadline, f"{node} did not come back"
            await asyncio.sleep(0.02)


@in_loop
async def test_a_transfer_that_is_given_up_ends_on_the_node_too(rig: Rig) -> None:
    large(rig.written("n1"), "step_1.pt")
    async with rig.agent("n1", "n2") as checkpoints:
        await checkpoints.place(job(1), "n1")
        assert len(rig.programs("n1")) == 1
        checkpoints.follow(job(1), ["n1"])
        await until(lambda: bytes_arriving(rig.kept()) > 5 * MIB, 20, "some of it to arrive")
        assert len(rig.programs("n1")) == 2
        collected = await checkpoints.collect(job(1), ["n1"], timeout_s=0.01)
        assert collected.problems == ("the newest checkpoint was not fetched within 0.01 s",)
        await until(lambda: len(rig.programs("n1")) == 1, 20, "the sending process to end")
        so_far = arriving_file(rig.kept())
        await checkpoints.collect(job(1), ["n1"])
        assert await name_at_home(checkpoints) == "step_1.pt"
        assert so_far == next(rig.kept().glob("*/content/step_1.pt")).stat().st_ino, "what had arrived was used"
        placing = asyncio.create_task(checkpoints.place(job(2), "n2"))
        await until(lambda: bytes_arriving(rig.resumed("n2")) > 5 * MIB, 20, "some of it to arrive")
        placing.cancel()
        await until(lambda: len(rig.programs("n2")) == 1, 20, "the receiving process to end")


def agent_process(rig: Rig, task: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tests.rig.checkpoints", str(rig.folder), task]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


@pytest.mark.proof
@pytest.mark.parametrize("task", ["collect", "place"])
def test_an_agent_killed_in_the_middle_finishes_when_it_is_back(rig: Rig, task: str) -> None:
    wanted = large(rig.written("n1"), "step_1.pt")
    arriving = rig.kept() if task == "collect" else rig.resumed("n2")
    with agent_process(rig, task) as agent:
        wait_until(lambda: bytes_arriving(arriving) > 5 * MIB, 30, "some of it to arrive")
        agent.kill()
    wait_until(lambda: not rig.programs("n1") and not rig.programs("n2"), 20, "the node programs to end with it")

    async def again() -> None:
        async with rig.agent("n1", "n2", generation=2) as checkpoints:
            collected = await checkpoints.collect(job(1), ["n1"])
            assert collected.newest is not None
            assert hash_of(Path(collected.newest.path) / "step_1.pt") == wanted
            resume = (await checkpoints.place(job(2), "n2")).resume
            assert resume is not None
            assert hash_of(Path(resume) / "step_1.pt") == wanted
            assert [str(path) for path in rig.resumed("n2").iterdir()] == [resume]
            assert len(list(rig.kept().glob("[0-9.]*"))) == 1

    asyncio.run(again())


@pytest.mark.proof
def test_a_large_checkpoint_passes_in_both_directions_without_filling_memory(rig: Rig) -> None:
    wanted = large(rig.written("n1"), "step_1.pt", 200 * MIB)
    most_on_nodes: list[int] = [0]

    def watch() -> bool:
        for pid in [*rig.programs("n1"), *rig.programs("n2")]:
            with suppress(FileNotFoundError, ProcessLookupError, ValueError):
                most_on_nodes[0] = max(most_on_nodes[0], memory_bytes(pid))
        return agent.poll() is not None

    with agent_process(rig, "place") as agent:
        wait_until(watch, 100, "the agent to be done")
        said, _ = agent.communicate()
    resume, _, grown = said.rpartition(" ")
    assert hash_of(Path(resume) / "step_1.pt") == wanted
    assert int(grown) < 24 * MIB
    assert 0 < most_on_nodes[0] < 60 * MIB


# --- a node that lies -------------------------------------------------------------------------------------------

HEADER, TRAILER = struct.Struct(">IBQQQqQI"), struct.Struct(">BI")


def offered(*files: RunFile, name: str = "step_1", size: int = 4) -> list[bytes]:
    """The newest checkpoint of a node; then the list of its files, the first of them of this size."""
    found = {
        "name": name, "kind": "folder", "bytes": sum(file.size for file in files), "changed_ns": 1, "number": 1,
        "fingerprint": fingerprint(files),
    }  # fmt: skip
    lines = b"".join(encoded([files[0]._replace(size=size), *files[1:]]))
    listing = wire.frame(wire.OUT, 2, lines) + wire.message(wire.RESULT, 2, {"unlisted": 0, "now_ns": 1})
    return [wire.message(wire.RESULT, 1, {"found": [found]}), listing]


def listed(name: str, size: int = 4) -> RunFile:
    return RunFile(name.encode(), size, 1, 1)


def sent(content: bytes) -> bytes:
    return wire.frame(wire.OUT, 3, content) + wire.message(wire.RESULT, 3, {})


def file(content: bytes) -> bytes:
    whole = HEADER.pack(0, 1, 0, len(content), len(content), 1, 1, 0o644) + content
    return whole + TRAILER.pack(0, zlib.crc32(whole + b"\0"))


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (offered(listed("../../../../evil")), "not a file below a folder"),
        (offered(listed("/tmp/evil")), "not a file below a folder"),
        (offered(listed("evil/../../")), "not a file below a folder"),
        (offered(listed("a"), size=5), "it changed"),
        ([*offered(listed("a")), sent(file(b"far more than it said"))], "it changed"),
        ([*offered(listed("a")), sent(file(b"evil")[:-1])], "cut short"),
        ([*offered(listed("a")), sent(file(b"evil").replace(b"evil", b"live"))], "damaged"),
        ([*offered(listed("a")), wire.message(wire.RESULT, 3, {})], "cut short"),
        (offered(listed("a"), name="../../evil_1"), "invalid answer"),
        ([wire.message(wire.RESULT, 1, {"found": [7]})], "invalid answer"),
    ],
)
@in_loop
async def test_a_node_that_lies_gets_nothing_out_of_its_folder(rig: Rig, said: list[bytes], problem: str) -> None:
    liar = rig.root("n1")
    liar.mkdir()
    changed = wire.message(wire.RESULT, 4, {"unlisted": 0, "now_ns": 1})
    rig.specs["n1"] = fake(liar, GREETING, *said, changed)
    async with rig.agent("n1") as checkpoints:
        look = await checkpoints._look(job(1), ["n1"])
        assert await name_at_home(checkpoints) is None
    assert problem in look.problems[0]
    assert {path.name for path in rig.folder.iterdir()} <= {"n1", "jobs"}
    assert {path.name for path in rig.kept().glob("*/content/*")} <= {"a"}
    assert not Path("/tmp/evil").exists()


@in_loop
async def test_a_node_that_says_it_took_more_than_it_got_is_not_believed(rig: Rig) -> None:
    home, content = rig.folder / "liar", rig.folder / "content"
    home.mkdir()
    write(content, "step_1", bytes(2 * MIB))
    rig.specs["liar"] = fake(home, GREETING, wire.frame(wire.OUT, 1, wire.AMOUNT.pack(1 << 31)))
    node = rig.node("liar")
    there = NodeFiles(node, Identity(AGENT, 1), 5)
    try:
        with pytest.raises(RemoteFailure, match="acknowledged bytes that were not sent"):
            await there.put(Where(7), Found("step_1", "folder", 2 * MIB, 1, 1, "a" * 32), content)
    finally:
        await node.close()

"""The way of a checkpoint on real node programs: written there, brought home, put where the next attempt runs."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.integration.conftest import in_loop
from tests.integration.nodes.test_shells import needs
from tests.rig.checkpoints import Rig, contents, is_home, job, name_at_home, nodes_and_home, write
from tests.rig.clock import HOUR_S, RigClock
from tests.rig.nodeprogram import AGENT, agent_folder
from ugro.kernel.files.node_files import Found, NodeFiles, Where
from ugro.kernel.jobs.engine.runs import Runs, RunStart
from ugro.kernel.jobs.model import Retry
from ugro.kernel.jobs.records import NodePlan, RankPlan
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.node import Identity
from ugro.kernel.support.errors import RemoteFailure

MIB = 1 << 20


@pytest.fixture
def rig() -> Iterator[Rig]:
    with nodes_and_home() as rig:
        yield rig


# --- the way of a checkpoint ------------------------------------------------------------------------------------


@in_loop
async def test_a_job_resumes_on_another_node_when_the_one_that_wrote_is_lost(rig: Rig) -> None:
    async with rig.agent("n1", "n2", "n3") as checkpoints:
        first = await checkpoints.place(job(1), "n1")
        assert first.env == {"UGRO_CHECKPOINT_DIR": str(rig.workdir("n1", 1) / "checkpoints")}
        checkpoints.follow(job(1), ["n1", "n2"])
        write(rig.written("n1"), "step_000100", b"old")
        await is_home(checkpoints, "step_000100")
        write(rig.written("n1"), "step_000200", b"new" * MIB)
        (rig.written("n1") / "step_000300.partial").mkdir()
        await is_home(checkpoints, "step_000200")
        assert await checkpoints.has_progressed(job(1))
        wanted = contents(rig.written("n1") / "step_000200")
        rig.lost.add("n1")
        rig.kill_programs("n1")
        collected = await checkpoints.collect(job(1), ["n1", "n2"])
        assert collected.newest is not None
        assert (collected.newest.name, collected.newest.number, collected.newest.node) == ("step_000200", 200, "n1")
        assert collected.problems == ("no node n1",)
        placed = [await checkpoints.place(job(2), node) for node in ("n2", "n3")]
        for node, place in zip(("n2", "n3"), placed, strict=True):
            assert place.env["UGRO_CHECKPOINT_DIR"] == str(rig.workdir(node, 2) / "checkpoints")
            assert contents(place.env["UGRO_RESUME_DIR"]) == wanted
        assert not await checkpoints.has_progressed(job(2))


@in_loop
async def test_a_checkpoint_that_is_one_file_is_resumed_from_a_folder_with_just_this_file(rig: Rig) -> None:
    async with rig.agent("n1", "n2") as checkpoints:
        for name in ("epoch-2.pt", "epoch-10.pt", "last.pt"):
            (rig.written("n1") / name).write_text(name)
        assert (await checkpoints.collect(job(1), ["n1"])).problems == ()
        for node in ("n1", "n2"):
            resume = (await checkpoints.place(job(2), node)).resume
            assert resume is not None
            assert contents(resume) == {"epoch-10.pt": b"epoch-10.pt"}
        # On the node that wrote it, nothing was copied.
        written = rig.written("n1") / "epoch-10.pt"
        assert next(rig.resumed("n1").glob("*/epoch-10.pt")).samefile(written)


@in_loop
async def test_a_node_that_has_the_very_same_is_not_sent_it_again(rig: Rig) -> None:
    async with rig.agent("n1", "n2") as checkpoints:
        write(rig.written("n1"), "step_1")
        await checkpoints.collect(job(1), ["n1"])
        here = (await checkpoints.place(job(2), "n1")).resume
        assert here is not None
        weights = Path("shard") / "weights.bin"
        assert (Path(here) / weights).samefile(rig.written("n1") / "step_1" / weights)
        shutil.rmtree(rig.written("n1") / "step_1")
        assert (await checkpoints.place(job(2), "n1")).resume == here
        assert contents(here) == {"shard/weights.bin": b"weights", "step.txt": b"step_1"}
        resume = (await checkpoints.place(job(2), "n2")).resume
        assert resume is not None
        before = Path(resume).stat().st_ino
        assert (await checkpoints.place(job(2), "n2")).resume == resume
        assert Path(resume).stat().st_ino == before
        (Path(resume) / "step.txt").write_text("spoilt")
        assert (await checkpoints.place(job(2), "n2")).resume == resume
        assert (Path(resume) / "step.txt").read_text() == "step_1"
        assert [path.name for path in rig.resumed("n2").iterdir()] == [Path(resume).name]


@in_loop
async def test_a_node_whose_clock_is_hours_behind_does_not_hide_what_a_later_attempt_wrote_there(rig: Rig) -> None:
    late = rig.clocks["n2"] = RigClock(rig.folder / "rig")
    late.jump(-5 * HOUR_S)
    async with rig.agent("n1", "n2") as checkpoints:
        await checkpoints.place(job(1), "n1")
        write(rig.written("n1"), "last", b"first")
        assert (await checkpoints.collect(job(1), ["n1"])).problems == ()
        await checkpoints.place(job(2), "n2")
        write(rig.written("n2"), "last", b"second")
        stamp(rig.written("n2") / "last", -5 * HOUR_S)
        newest = (await checkpoints.collect(job(2), ["n1", "n2"])).newest
        assert newest is not None
        assert (newest.node, newest.attempt) == ("n2", 2)
        place = await checkpoints.place(job(3), "n1")
        assert place.resume is not None
        assert contents(place.resume)["shard/weights.bin"] == b"second"


@in_loop
async def test_in_a_folder_of_the_user_a_clock_that_is_behind_does_not_make_a_checkpoint_older_than_the_job(
    rig: Rig,
) -> None:
    rig.clocks["n1"] = RigClock(rig.folder / "rig")
    rig.clocks["n1"].jump(-5 * HOUR_S)
    folder = rig.folder / "theirs"
    folder.mkdir()
    (folder / "before.pt").write_text("of another job")
    stamp(folder / "before.pt", -6 * HOUR_S)
    mine = job(1, directory=str(folder), submitted=datetime.now(UTC).isoformat())
    async with rig.agent("n1") as checkpoints:
        await checkpoints.place(mine, "n1")
        assert (await checkpoints.collect(mine, ["n1"])).newest is None
        (folder / "last.pt").write_text("mine")
        stamp(folder / "last.pt", -5 * HOUR_S)
        newest = (await checkpoints.collect(mine, ["n1"])).newest
        assert newest is not None
        assert newest.name == "last.pt"


def stamp(path: Path, by_s: float) -> None:
    """As a kernel whose clock is off by so much stamps what is written now."""
    at_s = time.time() + by_s
    for each in (*path.rglob("*"), path):
        os.utime(each, (at_s, at_s))


@in_loop
async def test_of_several_nodes_the_one_that_came_furthest_counts(rig: Rig) -> None:
    async with rig.agent("n1", "n2") as checkpoints:
        write(rig.written("n1"), "step_9", b"nine")
        write(rig.written("n2"), "step_10", b"ten")
        newest = (await checkpoints.collect(job(1), ["n1", "n2"])).newest
        assert newest is not None
        assert (newest.node, newest.name) == ("n2", "step_10")


@in_loop
async def test_one_that_is_written_again_under_its_name_comes_home_again(rig: Rig) -> None:
    async with rig.agent("n1") as checkpoints:
        (rig.written("n1") / "last.pt").write_text("first")
        await checkpoints.collect(job(1), ["n1"])
        fresh = rig.written("n1") / "last.pt.tmp"
        fresh.write_text("second")
        fresh.rename(rig.written("n1") / "last.pt")
        newest = (await checkpoints.collect(job(1), ["n1"])).newest
        assert newest is not None
        assert contents(newest.path) == {"last.pt": b"second"}
        assert len(list(rig.kept().iterdir())) == 1


@in_loop
async def test_what_cannot_be_sent_is_said_and_the_newest_that_can_is_taken(rig: Rig) -> None:
    async with rig.agent("n1") as checkpoints:
        write(rig.written("n1"), "step_1")
        write(rig.written("n1"), "step_2")
        (rig.written("n1") / "step_2" / "shard" / "link").symlink_to("/etc/passwd")
        (rig.written("n1") / "latest_99").symlink_to("step_2")
        collected = await checkpoints.collect(job(1), ["n1"])
        assert collected.newest is not None
        assert collected.newest.name == "step_1"
        [problem] = collected.problems
        assert problem.startswith("n1: checkpoint step_2: 'shard/link' is a symbolic link")


@in_loop
async def test_a_job_without_checkpoints_begins_anew_and_leaves_nothing_at_home(rig: Rig) -> None:
    async with rig.agent("n1") as checkpoints:
        assert (await checkpoints.collect(job(1), ["n1"])).newest is None
        assert (await checkpoints.place(job(2), "n1")).resume is None
        assert await checkpoints.drop_on(job(2), ["n1"]) == ()


@in_loop
async def test_a_node_with_the_oldest_python_sends_and_receives(rig: Rig) -> None:
    rig.specs["n1"] = NodeSpec("n1", remote_root=str(rig.root("n1")), python=str(needs("3.9")), transport="local")
    async with rig.agent("n1", "n2") as checkpoints:
        write(rig.written("n1"), "step_1", os.urandom(3 * MIB))
        wanted = contents(rig.written("n1") / "step_1")
        assert (await checkpoints.collect(job(1), ["n1"])).problems == ()
        (rig.written("n1") / "step_1").rename(rig.folder / "gone")
        resume = (await checkpoints.place(job(2), "n1")).resume
        assert resume is not None
        assert contents(resume) == wanted


# --- where they are ---------------------------------------------------------------------------------------------


@in_loop
async def test_a_folder_of_the_users_own_is_used_as_it_is_and_never_deleted(rig: Rig) -> None:
    chosen = rig.folder / "data" / "run1"
    chosen.mkdir(parents=True)
    write(chosen, "step_900", b"of another job")
    os.utime(chosen / "step_900", (1, 1))
    mine = job(1, directory=str(chosen), submitted=datetime.now(UTC).isoformat())
    async with rig.agent("n1") as checkpoints:
        assert (await checkpoints.place(mine, "n1")).env == {"UGRO_CHECKPOINT_DIR": str(chosen)}
        write(chosen, "step_5")
        newest = (await checkpoints.collect(mine, ["n1"])).newest
        assert newest is not None
        assert newest.name == "step_5"
        resume = (await checkpoints.place(replace(mine, attempt=2), "n1")).resume
        assert resume is not None
        assert contents(resume) == contents(chosen / "step_5")
        assert await checkpoints.drop_on(mine, ["n1"]) == ()
        assert {path.name for path in chosen.iterdir()} == {"step_900", "step_5"}


@in_loop
async def test_a_job_that_is_submitted_again_begins_with_the_newest_of_the_one_before(rig: Rig) -> None:
    async with rig.agent("n1", "n2") as checkpoints:
        write(rig.written("n1"), "latest", b"of the first job")
        await checkpoints.collect(job(3), ["n1"])
        again = replace(job(1), id=8, spec=replace(job(1).spec, earlier=7))
        resume = (await checkpoints.place(again, "n2")).resume
        assert resume is not None
        assert contents(resume)["shard/weights.bin"] == b"of the first job"
        assert rig.told == ["checkpoint latest of job 7 is put back"]
        write(rig.written("n2", 8), "latest", b"of the second job")
        await checkpoints.collect(again, ["n2"])
        resume = (await checkpoints.place(replace(again, attempt=2), "n1")).resume
        assert resume is not None
        assert contents(resume)["shard/weights.bin"] == b"of the second job"
        off = replace(again, id=9, spec=replace(again.spec, retry=Retry(puts_back=False)))
        assert (await checkpoints.place(off, "n1")).resume is None


@in_loop
async def test_what_is_older_than_the_job_in_a_folder_of_the_user_is_named(rig: Rig) -> None:
    chosen = rig.folder / "mine"
    chosen.mkdir()
    for number in (3, 9):
        write(chosen, f"step_{number}")
        os.utime(chosen / f"step_{number}", (number, number))  # as "cp -p" leaves them
    (chosen / "step_10.tmp").touch()
    async with rig.agent("n1") as checkpoints:
        mine = job(1, directory=str(chosen))
        assert (await checkpoints.place(mine, "n1")).resume is None
        [told] = rig.told
        assert f"in {chosen}: step_9, step_3 (" in told
        await checkpoints.place(mine, "n1")
        assert len(rig.told) == 1, "it is said once"
        write(chosen, "step_4")
        await checkpoints.collect(mine, ["n1"])
        assert (await checkpoints.place(replace(mine, attempt=2), "n1")).resume is not None
        await checkpoints.place(job(1), "n1")
        assert len(rig.told) == 1, "a folder of ours has none"


@in_loop
async def test_a_folder_on_another_file_system_is_resumed_from_where_it_is(rig: Rig) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == rig.folder.stat().st_dev:
            pytest.skip("there is only one file system here")
        async with rig.agent("n1") as checkpoints:
            mine = job(1, directory=elsewhere)
            write(Path(elsewhere), "step_5")
            await checkpoints.collect(mine, ["n1"])
            assert (await checkpoints.place(mine, "n1")).resume == f"{elsewhere}/step_5"
            (Path(elsewhere) / "step_6.pt").write_text("weights")
            await checkpoints.collect(mine, ["n1"])
            resume = (await checkpoints.place(replace(mine, attempt=2), "n1")).resume
            assert resume is not None
            assert contents(resume) == {"step_6.pt": b"weights"}


@in_loop
async def test_a_relative_folder_is_below_the_working_directory(rig: Rig) -> None:
    async with rig.agent("n1") as checkpoints:
        below = await checkpoints.place(job(1, directory="out/ckpt", cwd=str(rig.folder)), "n1")
        assert below.dir == str(rig.folder / "out" / "ckpt")
        assert Path(below.dir).is_dir()
        ours = await checkpoints.place(job(1, directory="out/ckpt"), "n1")
        assert ours.dir == str(rig.workdir("n1", 1) / "out" / "ckpt")
        unnamed = await checkpoints.place(job(1, cwd=str(rig.folder)), "n1")
        assert unnamed.dir == str(rig.written("n1")), "two jobs in one folder must not mix their checkpoints"
        for bad in ("../elsewhere", "/data/../etc"):
            with pytest.raises(RemoteFailure, match="not a folder for checkpoints"):
                await checkpoints.place(job(1, directory=bad), "n1")
        (rig.folder / "file").touch()
        with pytest.raises(RemoteFailure, match=r"checkpoint\.dir cannot be created"):
            await checkpoints.place(job(1, directory=str(rig.folder / "file" / "x")), "n1")


@in_loop
async def test_the_nodes_forget_a_job_but_not_while_it_runs(rig: Rig) -> None:
    async with rig.agent("n1", "n2") as checkpoints:
        write(rig.written("n1"), "step_1")
        await checkpoints.collect(job(1), ["n1"])
        await checkpoints.place(job(2), "n2")
        node = rig.node("n2")
        runs = Runs(node, Identity(AGENT, 1), 5, 10)
        plan = NodePlan("n2", (RankPlan(0, 0, ("sleep", "7773"), ()),))
        try:
            await runs.start([RunStart(7, 2, plan, {})])
            assert await checkpoints.drop_on(job(2), ["n1", "n2", "unknown"]) == ("n2",)
            await runs.stop(7, 2, "test", 1)
        finally:
            await node.close()
        assert await checkpoints.drop_on(job(2), ["n2"]) == ()
        for node_name in ("n1", "n2"):
            assert not rig.resumed(node_name).exists()
            agent = agent_folder(rig.root(node_name), node_name)
            assert list((agent / "checkpoints").iterdir()) == []
        assert await name_at_home(checkpoints) == "step_1"


@in_loop
async def test_the_next_attempt_finds_what_runs_before_it_wrote_wherever_that_is(rig: Rig) -> None:
    """Removed runs and runs that are still there; whatever a program does to its folder."""
    node = rig.node("n1")
    runs = Runs(node, Identity(AGENT, 1), 5, 10)

    async def attempt(number: int, script: str) -> Path:
        plan = NodePlan("n1", (RankPlan(0, 0, ("sh", "-c", script), ()),))
        await runs.start([RunStart(7, number, plan, {"checkpoint_dir": "out/ckpt"})])
        async for news in runs.watch():
            if any(run.attempt == number and run.has_ended for run in news.runs):
                break
        return rig.workdir("n1", number) / "out" / "ckpt"

    try:
        folder = await attempt(1, "cd out/ckpt; mkdir step_1; echo 1 > step_1/part; echo last > last.pt")
        assert contents(folder) == {"step_1/part": b"1\n", "last.pt": b"last\n"}
        assert await runs.remove([(7, 1)]) == [None]
        assert not folder.exists()
        assert contents(rig.written("n1")) == {"step_1/part": b"1\n", "last.pt": b"last\n"}
        folder = await attempt(2, "echo 2 > out/ckpt/step_2; echo newer > out/ckpt/last.pt; rm -r out/ckpt/step_1")
        assert contents(folder) == {"step_2": b"2\n", "last.pt": b"newer\n"}
        assert contents(rig.written("n1")) == {}, "each checkpoint is in one place"
        folder = await attempt(3, "ls out/ckpt > seen; rm -r out; mkdir -p out/ckpt; echo 3 > out/ckpt/step_3")
        assert (folder.parent.parent / "seen").read_text().split() == ["last.pt", "step_2"]
        assert contents(folder) == {"step_3": b"3\n"}
        assert await runs.remove([(7, 2), (7, 3)]) == [None, None]
        assert contents(rig.written("n1")) == {"step_3": b"3\n"}
    finally:
        await node.close()


@in_loop
async def test_an_agent_that_was_replaced_has_no_say(rig: Rig) -> None:
    async with rig.agent("n1", generation=2) as checkpoints:
        await checkpoints.place(job(1), "n1")
    async with rig.agent("n1", generation=1) as stale:
        with pytest.raises(RemoteFailure, match="generation 1"):
            await stale.place(job(1), "n1")


@in_loop
async def test_one_that_does_not_fit_or_is_not_what_was_said_is_refused_by_the_node(rig: Rig) -> None:
    write(rig.folder / "content", "step_1", bytes(4 * MIB))
    node = rig.node("n1")
    there = NodeFiles(node, Identity(AGENT, 1), 5)
    found = Found("step_1", "folder", 1 << 49, 1, 1, "a" * 32)
    try:
        with pytest.raises(RemoteFailure, match="is full"):
            await there.put(Where(7), found, rig.folder / "content")
        with pytest.raises(RemoteFailure, match="larger than announced"):
            await there.put(Where(7), replace(found, bytes=MIB), rig.folder / "content")
        assert list(rig.resumed("n1").iterdir()) == []
    finally:
        await node.close()

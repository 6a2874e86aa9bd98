"""Code on its way to real node programs: it arrives as it was, whatever is cut, damaged, full or asked for twice."""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.conftest import in_loop, until
from tests.rig import disk
from tests.rig.code import AGENT, CHUNK, MARK, TREES, CodeRig, make, seen
from tests.rig.disk import SmallDisk
from tests.rig.waiting import processes_with_variable
from ugro.kernel.files.code.service import Code
from ugro.kernel.files.code.transfer import CodeTransfers
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.node import Identity
from ugro.kernel.links.transport import node_program
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import RemoteFailure, TimedOut, Unreachable
from ugro.kernel.support.state_dir import StateDir
from ugro.node import trees
from ugro.node.files.contents import store_in
from ugro.node.trees import block, record

MIB = 1 << 20
FEW = settings(max_examples=settings().max_examples // 5, suppress_health_check=list(HealthCheck))


@pytest.fixture
def rig(tmp_path: Path) -> CodeRig:
    return CodeRig(tmp_path)


def fill(rig: CodeRig, files: int, size: int) -> None:
    for number in range(files):
        (rig.source / f"f{number}").write_bytes(os.urandom(size))


async def sent_to(sending: CodeTransfers, node: str, tree: str) -> int:
    """However often the link is cut; returns how often it was."""
    cuts = 0
    async with asyncio.timeout(60):
        while True:
            try:
                await sending.ensure(node, tree)
            except (Unreachable, TimedOut):
                cuts += 1
                await asyncio.sleep(0.05)
            else:
                return cuts


@pytest.mark.proof
@FEW
@given(st.lists(TREES, min_size=1, max_size=3))
def test_random_trees_and_random_edits_of_them_arrive_identical(versions: list[object]) -> None:
    async def scenario(rig: CodeRig) -> None:
        async with rig.agent("n1") as sending:
            for tree in versions:
                make(tree, os.fsencode(rig.source))
                taken = rig.take()
                await sending.ensure("n1", taken.id)
                assert rig.there("n1", taken.id) == seen(os.fsencode(rig.source))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(CodeRig(Path(folder))))


@pytest.mark.proof
@FEW
@given(st.lists(st.integers(0, 3_000_000), min_size=1, max_size=3), st.integers(0, 2**32))
def test_a_link_that_is_cut_at_any_byte_goes_on_where_it_was(cuts: list[int], seed: int) -> None:
    async def scenario(rig: CodeRig) -> None:
        for number in range(20):
            (rig.source / f"f{number}").write_bytes(bytes([seed % 251, number]) * 30_000)
        (rig.source / "large").write_bytes(os.urandom(CHUNK + 5))
        taken = rig.take()
        # The program goes first: what is cut is the code.
        rig.limits("n1").write_text("\n".join(str(len(node_program().content) + 4000 + cut) for cut in cuts))
        async with rig.agent("n1") as sending:
            assert await sent_to(sending, "n1", taken.id) >= 1
            assert rig.there("n1", taken.id) == seen(os.fsencode(rig.source))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(CodeRig(Path(folder))))


@in_loop
async def test_what_came_before_a_cut_does_not_travel_again(rig: CodeRig) -> None:
    fill(rig, 24, MIB)
    taken = rig.take()
    rig.limits("n1").write_text(str(len(node_program().content) + 16 * MIB))
    async with rig.agent("n1") as sending:
        assert await sent_to(sending, "n1", taken.id) >= 1
        # Both halves together, and the little that was on its way when it was cut.
        assert sending.totals.bytes < 30 * MIB
        assert rig.there("n1", taken.id) == seen(os.fsencode(rig.source))


@in_loop
async def test_an_unchanged_tree_costs_one_question_and_a_change_only_itself(rig: CodeRig) -> None:
    for folder in range(5):
        (rig.source / f"d{folder}").mkdir()
        for number in range(20):
            (rig.source / f"d{folder}" / f"f{number}").write_bytes(os.urandom(5000))
    first = rig.take()
    async with rig.agent("n1") as sending:
        done = await sending.ensure("n1", first.id)
        assert (done.state, done.files) == ("done", 100)
    async with rig.agent("n1") as sending:  # another agent, which remembers nothing but what is on its disk
        again = await sending.ensure("n1", first.id)
        assert (again.files, again.bytes, sending.totals.unchanged) == (0, 0, 1)
        (rig.source / "d3" / "f7").write_text("edited")
        second = rig.take()
        done = await sending.ensure("n1", second.id)
        assert done.files == 1
        assert done.bytes < 10_000, "the file, its folder's tree and the root's"
        assert rig.there("n1", second.id) == seen(os.fsencode(rig.source))
        (rig.source / "d3" / "f7").unlink()
        (rig.source / "d3").rename(rig.source / "moved")
        third = rig.take()
        assert (await sending.ensure("n1", third.id)).wire_bytes < 10_000
        assert rig.there("n1", third.id) == seen(os.fsencode(rig.source))


@in_loop
async def test_files_are_counted_as_files_while_they_travel_and_in_the_end(rig: CodeRig) -> None:
    (rig.source / "sub").mkdir()
    large = os.urandom(2 * CHUNK + 7)  # three chunks
    (rig.source / "large").write_bytes(large)
    for path in ("one", "sub/same as one"):
        (rig.source / path).write_bytes(b"equal")
    (rig.source / "empty").touch()
    first = rig.take()
    seen_files: list[int] = []
    async with rig.agent("n1") as sending:
        report = await sending.ensure("n1", first.id)
        assert (report.files, report.sent_files, report.state) == (3, 3, "done")
        assert (report.sent_bytes, sending.totals.files) == (report.bytes, 3)
        (rig.source / "large").write_bytes(large + b"more")  # its last chunk alone
        (rig.source / "sub" / "new").write_bytes(b"new")
        second = rig.take()
        transfer = asyncio.create_task(sending.ensure("n1", second.id))
        while not transfer.done():
            if (under_way := sending.transfer("n1", second.id)) is not None:
                seen_files.append(under_way.progress.done_files)
            await asyncio.sleep(0)
        assert (await transfer).files == 2
    assert max(seen_files) <= 2


@in_loop
async def test_the_same_code_asked_for_by_many_at_once_travels_once_to_each_node(rig: CodeRig) -> None:
    fill(rig, 10, 100_000)
    taken = rig.take()
    async with rig.agent("n1", "n2", "n3") as sending:
        nodes = ["n1", "n2", "n3"] * 5
        await asyncio.gather(*(sending.ensure(node, taken.id) for node in nodes))
        assert (sending.totals.syncs, sending.totals.files) == (3, 30)


@in_loop
async def test_who_gives_up_ends_no_transfer_that_others_wait_for(rig: CodeRig) -> None:
    fill(rig, 40, MIB)
    taken = rig.take()
    async with rig.agent("n1") as sending:
        waiting = [asyncio.create_task(sending.ensure("n1", taken.id)) for _ in range(2)]
        await until(lambda: sending.transfer("n1", taken.id), 20, "the transfer")
        waiting[0].cancel()
        assert (await waiting[1]).state == "done"
        assert sending.totals.syncs == 1


@in_loop
async def test_code_that_a_node_has_lost_is_sent_again(rig: CodeRig) -> None:
    fill(rig, 20, 50_000)
    first = rig.take()
    async with rig.agent("n1") as sending:
        await sending.ensure("n1", first.id)
        (rig.source / "f3").write_text("edited")
        second = rig.take()
        for path in Path(store_in(str(rig.root("n1"))).folder).rglob("*"):
            if path.is_file():
                path.unlink()
        await sending.ensure("n1", second.id)
        assert rig.there("n1", second.id) == seen(os.fsencode(rig.source))


@in_loop
async def test_contents_that_arrive_damaged_are_not_kept_and_are_named(rig: CodeRig) -> None:
    fill(rig, 3, 50_000)
    taken = rig.take()
    ids = rig.home.candidates(taken.id, None)
    store = rig.home.store
    async with rig.agent("n1") as sending:
        there = sending.contents("n1")
        link = await there.node.ready(20)
        params = there.identity.params(root=taken.id, size=200_000, limit_bytes=1 << 40)
        stream = link.stream("contents.receive", params)
        parts = [part for key in ids for part in record(key, store.locate(key).kind, store.read(key))]
        damaged = bytearray(b"".join(parts))
        damaged[-1] ^= 1
        link.send(3, stream.number, block(bytes(damaged), compressed=True))
        link.send(3, stream.number)
        async for _ in stream:
            pass
        answer = await stream.result()
        assert (answer["bad"], answer["lacking"]) == (1, [ids[-1].hex()])
        assert not await there.has(taken.id)
        done = await sending.ensure("n1", taken.id)
        assert done.files == 1, "only what is missing"
        assert rig.there("n1", taken.id) == seen(os.fsencode(rig.source))


@in_loop
async def test_what_is_no_stream_of_contents_is_refused_and_changes_nothing(rig: CodeRig) -> None:
    fill(rig, 1, 10)
    taken = rig.take()
    async with rig.agent("n1") as sending:
        there = sending.contents("n1")
        link = await there.node.ready(20)
        for nonsense in (b"\xff" * 100, b"\0" * 9 + b"x", block(b"x" * 20, compressed=False), b"\1" + b"\0" * 3):
            params = there.identity.params(root=taken.id, size=100, limit_bytes=1 << 40)
            stream = link.stream("contents.receive", params)
            link.send(3, stream.number, nonsense)
            link.send(3, stream.number)
            async for _ in stream:
                pass
            with pytest.raises(RemoteFailure, match="damaged during the transfer"):
                await stream.result()
        with pytest.raises(RemoteFailure, match="not the hash of a tree"):
            await there.has("../../etc")
        await sending.ensure("n1", taken.id)
        assert rig.there("n1", taken.id) == seen(os.fsencode(rig.source))


def is_arriving(rig: CodeRig, node: str) -> bool:
    return any(name.endswith(".arriving") for name in os.listdir(store_in(str(rig.root(node))).packs))


@pytest.mark.proof
@in_loop
async def test_a_full_disk_is_named_and_harms_nothing_that_is_there(rig: CodeRig) -> None:
    if (reason := disk.available()) is not None:
        pytest.skip(reason)
    small = SmallDisk(rig.root("n1"), 200 * MIB)
    small.mount()
    try:
        fill(rig, 4, MIB)
        first = rig.take()
        before = seen(os.fsencode(rig.source))
        async with rig.agent("n1") as sending:
            await sending.ensure("n1", first.id)
            fill(rig, 150, MIB)
            second = rig.take()
            with pytest.raises(RemoteFailure, match=r"is full: .* MiB free; the code needs 1\d\d") as refused:
                await sending.ensure("n1", second.id)
            assert refused.value.subject == "n1"
            fill(rig, 100, MIB)
            for number in range(100, 150):
                (rig.source / f"f{number}").unlink()
            third = rig.take()
            bringing = asyncio.create_task(sending.ensure("n1", third.id))
            await until(lambda: is_arriving(rig, "n1") or bringing.done(), 20, "the node to have found room")
            small.fill()  # in the middle, by somebody else
            with pytest.raises(RemoteFailure, match=r"the disk of .* is full"):
                await bringing
            assert rig.there("n1", first.id) == before
            small.free()
            await sending.ensure("n1", third.id)
            assert rig.there("n1", third.id) == seen(os.fsencode(rig.source))
    finally:
        small.unmount()


@pytest.mark.proof
@in_loop
async def test_neither_side_holds_a_large_file_in_memory(rig: CodeRig) -> None:
    random = os.urandom(MIB)
    with (rig.source / "large").open("wb") as file:
        for number in range(200):
            file.write(number.to_bytes(8, "big") + random[8:])

    async with rig.agent("n1") as sending:
        await sending.contents("n1").node.ready(20)
        before = _own_bytes(os.getpid())

        async def bring() -> str:
            taken = await asyncio.to_thread(rig.take)
            await sending.ensure("n1", taken.id)
            return taken.id

        bringing = asyncio.create_task(bring())
        most = {"here": 0, "there": 0}
        while not bringing.done():
            most["here"] = max(most["here"], _own_bytes(os.getpid()) - before)
            for pid in processes_with_variable(MARK, [str(rig.root("n1"))]):
                with suppress(OSError, ValueError):  # it ended, or is a zombie
                    most["there"] = max(most["there"], _own_bytes(pid))
            await asyncio.sleep(0.02)
        assert 0 < most["there"] < 80 * MIB, most
        assert most["here"] < 100 * MIB, most
        store = store_in(str(rig.root("n1")))
        with store.using():
            [large] = store.entries(trees.parse_id(await bringing))
            assert large.size == 200 * MIB


def _own_bytes(pid: int) -> int:
    """Without what is only mapped from files: the system has that back whenever it wants."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [anonymous] = [int(line.split()[1]) for line in lines if line.startswith("RssAnon:")]
    return anonymous * 1024


@in_loop
async def test_code_is_taken_while_other_code_is_on_its_way_and_room_is_made_later(rig: CodeRig) -> None:
    """Room can only be made when nothing is on its way; nobody who hands in a job waits for that."""
    cluster_file = rig.folder / "cluster.yaml"
    cluster_file.write_text("sync: {store_limit: 1MB}\nnodes:\n  n1: {transport: local}\n")
    store = Store(rig.folder / "state.db")
    await store.open()
    code = Code(StateDir(rig.folder), store, Cluster(cluster_file), Identity(AGENT, 1))
    packs, roots = rig.folder / "contents" / "packs", rig.folder / "contents" / "roots"
    try:
        (rig.source / "data").write_bytes(os.urandom(3_000_000))
        async with code._transfers.lock.shared(), asyncio.timeout(20):
            old = await code.take(rig.source)
            async with code._transfers.lock.shared():  # others pass meanwhile
                assert code._making_room is not None
                assert not code._making_room.done()
        await code._making_room
        for root in roots.iterdir():
            os.utime(root, (1, 1))  # long ago: what was taken lately stays
        (rig.source / "data").write_bytes(b"new")
        await code.take(rig.source)
        await code._making_room
        assert not code.has(old.id)
        assert sum(path.stat().st_size for path in packs.iterdir()) < 1_000_000
    finally:
        await code.close()
        await store.close()

"""What a run leaves in files: logs that come home without a gap, floods, full disks, memory, other users, ports."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import AGENT, LocalNode
from tests.rig.waiting import wait_until
from tests.rig.watcher import comes
from ugro.kernel.links.link import Link
from ugro.kernel.support.errors import RemoteFailure
from ugro.node import wire
from ugro.node.runs import logs as capped_log
from ugro.node.runs.runspec import LEAST_LOG_CAP_BYTES

MIB = 1 << 20
FLOOD_BLOCK = (b"y" * 1023 + b"\n") * 1024
NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Other users may look into it."""
    path = Path(tempfile.mkdtemp(prefix="r"))
    path.chmod(0o755)
    (path / "root").mkdir()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def ledger(folder: Path) -> Iterator[Ledger]:
    book = Ledger(folder)
    yield book
    book.end_all()


@pytest.fixture
def node(folder: Path, ledger: Ledger) -> Iterator[LocalNode]:
    yield from closing(LocalNode(folder / "root"))


def closing(node: LocalNode) -> Iterator[LocalNode]:
    try:
        yield node
    finally:
        node.close()


def start(node: LocalNode, link: Link, *ranks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return node.call(link, "start", job="train", attempt=1, spec={"ranks": list(ranks), "grace_s": 1, **more})


def ended(node: LocalNode, timeout_s: float = 20) -> dict[str, Any]:
    path = node.run_dir("train", 1) / "exit.json"
    wait_until(path.exists, timeout_s, "exit.json")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def log_of(node: LocalNode, rank: int = 0) -> Path:
    return node.run_dir("train", 1) / "logs" / f"rank_{rank}.log"


class Mirror:
    """The agent's side of a followed file: what it has, and from which offset on."""

    def __init__(self, node: LocalNode, file: str = "logs/rank_0.log", offset: int = 0) -> None:
        self.node = node
        self.file = file
        self.offset = offset
        self.pieces: list[tuple[int, bytes]] = []
        self.end: dict[str, Any] = {}

    def follow(self, link: Link, enough: Callable[[int], bool] = lambda offset: False) -> Mirror:
        """Until the run is over, or ``enough`` is there."""
        self.node.wait(self._follow(link, enough))
        return self

    async def _follow(self, link: Link, enough: Callable[[int], bool]) -> None:
        params = self.node.params(job="train", attempt=1, file=self.file, offset=self.offset)
        stream = link.stream("runs.follow", params)
        async with asyncio.timeout(60):
            async for kind, chunk in stream:
                self.take(kind, chunk)
                if enough(self.offset):
                    return
            self.end = await stream.result()

    def take(self, kind: int, chunk: bytes) -> None:
        if kind == wire.ERR:
            self.offset = json.loads(chunk)["offset"]
        else:
            self.pieces.append((self.offset, chunk))
            self.offset += len(chunk)

    @property
    def content(self) -> bytes:
        return b"".join(chunk for _, chunk in self.pieces)


# --- following --------------------------------------------------------------------------------------------------


def test_a_log_comes_home_without_gap_or_repeat_while_links_are_cut(node: LocalNode, ledger: Ledger) -> None:
    start(node, node.link(), ledger.rank(0, "write_lines", 1500, 0.001))
    mirror = Mirror(node)
    for cut_after in (1, 5_000, 5_001, 60_000, 90_000):
        mirror.follow(node.link(), cut_after.__le__)
        node.kill_programs()
    mirror.follow(node.link())
    assert mirror.content == log_of(node).read_bytes()
    assert mirror.content.count(b"\n") == 1500
    assert (mirror.end["offset"], mirror.end["has_file"], mirror.end["status"]) == (len(mirror.content), True, "exited")


def test_a_finished_file_can_be_read_from_any_offset(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, ledger.rank(0, "write_lines", 3000, 0))
    ended(node)
    whole = log_of(node).read_bytes()
    for offset in [0, 1, len(whole) - 1, len(whole), *random.Random(1).sample(range(len(whole)), 20)]:
        mirror = Mirror(node, offset=offset).follow(link)
        assert mirror.content == whole[offset:]
        assert mirror.end["offset"] == len(whole)
    assert Mirror(node, offset=len(whole) + 5).follow(link).end["offset"] == len(whole) + 5
    record = Mirror(node, file="exit.json").follow(link)
    assert json.loads(record.content)["outcome"] == "succeeded"


def test_who_does_not_read_is_sent_no_more_than_a_window(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, ledger.rank(0, "flood", 4, 1000))
    ended(node)

    async def lazily() -> bytes:
        params = node.params(job="train", attempt=1, file="logs/rank_0.log", offset=0)
        stream = link.stream("runs.follow", params)
        await comes(lambda: stream._unread > wire.WINDOW - wire.CHUNK)
        for _ in range(3):  # the node goes on answering others meanwhile
            await link.call("echo", {}, timeout_s=5)
        assert stream._unread <= wire.WINDOW
        return b"".join([chunk async for _, chunk in stream])

    assert node.wait(lazily()) == FLOOD_BLOCK * 4 + b"the last line\n"


def test_a_file_that_comes_later_is_followed_and_one_that_never_comes_ends_empty(
    node: LocalNode, ledger: Ledger, folder: Path
) -> None:
    link = node.link()
    start(node, link, ledger.rank(0, "wait_for", folder / "go"))
    later = node.run_dir("train", 1) / "output" / "deep" / "metrics.jsonl"

    async def both() -> list[Mirror]:
        mirrors = [Mirror(node, file="output/deep/metrics.jsonl"), Mirror(node, file="output/never")]
        tasks = [asyncio.create_task(mirror._follow(link, lambda offset: False)) for mirror in mirrors]
        await link.call("echo", {}, timeout_s=5)  # answered after what was asked before it
        later.parent.mkdir()
        later.write_text("one\n")
        await comes(lambda: mirrors[0].offset > 0)
        with later.open("a") as file:
            file.write("two\n")
        (folder / "go").touch()
        await asyncio.gather(*tasks)
        return mirrors

    found, missing = node.wait(both())
    assert found.content == b"one\ntwo\n"
    assert (missing.content, missing.end["offset"], missing.end["has_file"]) == (b"", 0, False)


@pytest.mark.proof
def test_what_a_dead_supervisor_left_is_followed_until_it_is_ended(node: LocalNode) -> None:
    link = node.link()
    writes_on = "while :; do echo on and on; sleep 0.01; done"
    start(node, link, {"rank": 0, "argv": ["sh", "-c", f"(trap '' TERM; {writes_on}) & sleep 600"]})

    async def follow() -> bytes:
        mirror = Mirror(node)
        task = asyncio.create_task(mirror._follow(link, lambda offset: False))
        await comes(lambda: mirror.offset > 0)
        node.kill_supervisor("train", 1)
        # Longer than anybody who thought it over would look on.
        await comes(lambda: mirror.offset > 2000)
        assert not task.done()
        await node.acall(link, "stop", job="train", attempt=1, grace_s=1)
        await asyncio.wait_for(task, 10)
        return b"".join(content for _, content in mirror.pieces)

    assert node.wait(follow()) == log_of(node).read_bytes()


@pytest.mark.parametrize(
    "file",
    [
        "", ".", "/etc/passwd", "../../../secret", "output/../../x", "logs",
        "output/pipe", "output/out", "output/way/secret",
    ],
)  # fmt: skip
def test_nothing_outside_of_a_run_can_be_followed(node: LocalNode, ledger: Ledger, folder: Path, file: str) -> None:
    link = node.link()
    (folder / "secret").write_text("secret")
    start(node, link, ledger.rank(0, "sleep"))
    (node.run_dir("train", 1) / "output" / "out").symlink_to(folder / "secret")
    (node.run_dir("train", 1) / "output" / "way").symlink_to(folder)
    os.mkfifo(node.run_dir("train", 1) / "output" / "pipe")
    with pytest.raises(RemoteFailure, match="not a file of"):
        Mirror(node, file=file).follow(link)


def test_a_run_that_is_not_there_cannot_be_followed(node: LocalNode) -> None:
    with pytest.raises(RemoteFailure, match="no run train"):
        Mirror(node).follow(node.link())


# --- floods -----------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_flood_of_half_a_gigabyte_keeps_disk_and_memory_small(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    cap, rate = 64 * MIB, 200 * MIB
    start(node, link, ledger.rank(0, "flood", 500, 200), log_cap_bytes=cap)
    supervisor = node.supervisor("train", 1)
    log = log_of(node)
    most = 0
    memory = 0
    while not (node.run_dir("train", 1) / "exit.json").exists():
        most = max(most, log.stat().st_blocks * 512)
        memory = max(memory, _most_memory(supervisor))
        time.sleep(0.02)
    assert log.stat().st_size == 500 * MIB + 14
    assert most <= cap + rate * 0.5
    assert 0 < memory < 30 * MIB
    mirror = Mirror(node).follow(link)
    assert mirror.content.endswith(b"\nthe last line\n")
    assert cap // 2 <= len(mirror.content) <= cap
    assert mirror.pieces[0][0] == 500 * MIB + 14 - len(mirror.content)
    assert b"\0" not in mirror.content


def test_a_reader_that_is_slower_than_a_flood_is_told_where_it_goes_on(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, ledger.rank(0, "flood", 150, 100), log_cap_bytes=MIB)
    mirror = Mirror(node)

    async def slowly() -> None:
        stream = link.stream("runs.follow", node.params(job="train", attempt=1, file="logs/rank_0.log", offset=0))
        async for kind, chunk in stream:
            mirror.take(kind, chunk)
            await asyncio.sleep(0.02)
        mirror.end = await stream.result()

    node.wait(slowly())
    assert mirror.end["offset"] == 150 * MIB + 14
    assert len(mirror.content) < 150 * MIB
    for offset, chunk in mirror.pieces:
        assert chunk == _flood_at(offset, len(chunk), 150)


@needs_root
def test_where_no_holes_can_be_punched_a_log_is_emptied_and_offsets_go_on(folder: Path, ledger: Ledger) -> None:
    with mounted(folder / "root", "ramfs"):
        for node in closing(LocalNode(folder / "root")):
            link = node.link()
            cap = LEAST_LOG_CAP_BYTES * 4
            start(node, link, ledger.rank(0, "write_lines", 6000, 0.0002, cap), log_cap_bytes=cap)
            ended(node)
            assert capped_log.read_cut(str(log_of(node))).base > 0
            assert log_of(node).stat().st_size <= 4 * cap
            mirror = Mirror(node).follow(link)
            assert mirror.pieces[0][0] > 0
            assert mirror.content.splitlines()[-1].startswith(b"line 00005999")
            assert mirror.end["offset"] >= mirror.pieces[0][0] + len(mirror.content)


# --- full disks and memory --------------------------------------------------------------------------------------


@needs_root
def test_a_full_disk_does_not_lose_how_a_run_ended(folder: Path, ledger: Ledger) -> None:
    with mounted(folder / "root", "tmpfs", "size=4m"):
        for node in closing(LocalNode(folder / "root")):
            link = node.link()
            big = folder / "root" / "big"
            start(node, link, ledger.rank(0, "fill", big, 7), ledger.rank(1, "polite", 0))
            record = ended(node)
            assert [line.split()[2] for line in ledger.lines("full")] == ["0"]
            assert (record["outcome"], record["failure"]["code"]) == ("failed", 7)
            subprocess.run(["dd", "if=/dev/zero", f"of={big}.2", "bs=4k"], check=False, capture_output=True, timeout=10)
            with pytest.raises(RemoteFailure, match=r"the disk of .* is full: 0 B free"):
                node.call(link, "start", job="next", attempt=1, spec={"ranks": [ledger.rank(0, "sleep")]})
            big.unlink()  # the second stays: there is space now, and not much
            node.call(link, "start", job="next", attempt=1, spec={"ranks": [ledger.rank(0, "sleep")]})
            wait_until(lambda: len(ledger.starts(f"{AGENT}/next.1")) == 1)


@needs_root
def test_on_a_full_disk_a_run_can_be_stopped_and_another_generation_comes(folder: Path, ledger: Ledger) -> None:
    with mounted(folder / "root", "tmpfs", "size=4m"):
        for node in closing(LocalNode(folder / "root")):
            link = node.link()
            start(node, link, ledger.rank(0, "fill", folder / "root" / "big", 0), ledger.rank(1, "sleep"))
            wait_until(lambda: ledger.lines("full"))
            node.generation = 2
            link = node.link()
            answer = node.call(link, "stop", job="train", attempt=1, grace_s=0)
            assert answer["run"]["exit"]["outcome"] == "stopped"
            node.call(link, "remove", job="train", attempt=1)
            node.generation = 1
            with pytest.raises(RemoteFailure, match="generation"):
                node.call(link, "stop", job="train", attempt=9)


@needs_root
def test_a_rank_that_the_kernel_killed_for_memory_is_told_apart(node: LocalNode, ledger: Ledger) -> None:
    with memory_limit(40 * MIB) as tasks:
        start(node, node.link(), ledger.rank(0, "eat", tasks), ledger.rank(1, "sleep"))
        record = ended(node)
    assert record["outcome"] == "oom"
    assert record["failure"]["signal"] == 9
    assert record["failure"]["is_oom"]
    assert not record["ranks"][1]["is_oom"]


def test_a_rank_that_somebody_killed_is_no_matter_of_memory(node: LocalNode, ledger: Ledger) -> None:
    start(node, node.link(), ledger.rank(0, "kill_self", 9))
    record = ended(node)
    assert (record["outcome"], record["failure"]["signal"], record["failure"]["is_oom"]) == ("failed", 9, False)


# --- other users, removal, ports --------------------------------------------------------------------------------


@needs_root
@pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason=f"no {SYSTEM_PYTHON}")
def test_a_run_works_for_a_user_without_any_rights(folder: Path, ledger: Ledger) -> None:
    os.chown(folder / "root", NOBODY, NOBODY)
    folder.chmod(0o1777)  # where the ranks write their ledger
    prefix = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all")
    for node in closing(LocalNode(folder / "root", prefix=prefix, python=SYSTEM_PYTHON)):
        link = node.link()
        spec = [ledger.rank(0, "hostile", python=SYSTEM_PYTHON), ledger.rank(1, "sleep", python=SYSTEM_PYTHON)]
        start(node, link, *spec)
        wait_until(lambda: len(ledger.entries()) == 8)
        assert {Path(f"/proc/{entry.pid}").stat().st_uid for entry in ledger.entries()} == {NOBODY}
        node.kill_programs()
        link = node.link()
        answer = node.call(link, "stop", job="train", attempt=1, grace_s=0.2)
        assert (answer["run"]["exit"]["outcome"], answer["run"]["exit"]["unkillable"]) == ("stopped", [])
        ledger.expect_nothing_alive(1)
        locked = node.run_dir("train", 1) / "output" / "locked"
        (locked / "deeper").mkdir(parents=True)
        for folder_of_user in (locked / "deeper", locked):
            os.chown(folder_of_user, NOBODY, NOBODY)
            folder_of_user.chmod(0)
        node.call(link, "remove", job="train", attempt=1)
        assert os.listdir(node.run_dir("train", 1).parent) == []


def test_ports_for_a_rendezvous_can_be_had_and_given_back(node: LocalNode) -> None:
    link = node.link()
    ports = node.call(link, "reserve_port", job="train", attempt=1, count=2)["ports"]
    assert node.call(node.link(), "reserve_port", job="train", attempt=1, count=2)["ports"] == ports
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("0.0.0.0", port))
    assert node.call(link, "free_port", job="train", attempt=1)["ports"] == ports
    with pytest.raises(RemoteFailure, match="count"):
        node.call(link, "reserve_port", job="train", attempt=1, count=0)


def test_a_call_that_is_given_up_leaves_the_link_in_order(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, ledger.rank(0, "hostile", "plain"))
    wait_until(lambda: ledger.lines("ready"))

    async def impatiently() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(node.acall(link, "stop", job="train", attempt=1, grace_s=60), 0.3)
        assert await link.call("echo", {"still": "here"}, timeout_s=5) == {"still": "here"}

    node.wait(impatiently())
    assert node.call(link, "stop", job="train", attempt=1, grace_s=0)["run"]["status"] == "exited"
    assert not link.lost.done()


@contextmanager
def mounted(path: Path, kind: str, options: str = "defaults") -> Iterator[None]:
    subprocess.run(["mount", "-t", kind, "-o", options, kind, path], check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True, timeout=10)


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """A control group with little memory; a process that writes its pid into the file is in it."""
    group = Path(f"/sys/fs/cgroup/memory/ugro-test-{os.getpid()}")
    if not group.parent.is_dir():
        group = Path(f"/sys/fs/cgroup/ugro-test-{os.getpid()}")
    limit = "memory.limit_in_bytes" if group.parent.name == "memory" else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield group / "cgroup.procs"
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def _most_memory(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def _flood_at(offset: int, length: int, blocks: int) -> bytes:
    """What the flood wrote at an offset, for less than a block."""
    block = offset // MIB
    around = b"".join(FLOOD_BLOCK if number < blocks else b"the last line\n" for number in (block, block + 1))
    return around[offset - block * MIB :][:length]

"""What an agent is told of its runs as it happens, with real node programs, supervisors and ranks."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import LocalNode
from tests.rig.waiting import wait_until
from tests.rig.watcher import Watcher, comes
from ugro.kernel.support.errors import RemoteFailure
from ugro.node import wire

# In a user namespace of its own, a user has as many inotify instances as is written there: none.
WITHOUT_INOTIFY = (
    "unshare", "--user", "--map-root-user",
    "sh", "-c", 'echo 0 > /proc/sys/user/max_inotify_instances && exec "$@"', "sh",
)  # fmt: skip
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
TRUE = {"ranks": [{"rank": 0, "argv": ["true"]}]}


@pytest.fixture(params=["told by the kernel", pytest.param("polling", marks=needs_root)])
def node(request: pytest.FixtureRequest, tmp_path: Path, ledger: Ledger) -> Iterator[LocalNode]:
    yield from made(tmp_path, WITHOUT_INOTIFY if request.param == "polling" else ())


@pytest.fixture
def told_node(tmp_path: Path, ledger: Ledger) -> Iterator[LocalNode]:
    yield from made(tmp_path, ())


def made(folder: Path, prefix: tuple[str, ...]) -> Iterator[LocalNode]:
    (folder / "root").mkdir()
    local = LocalNode(folder / "root", prefix=prefix)
    try:
        yield local
    finally:
        local.close()


def test_all_runs_are_told_first_and_then_each_change(node: LocalNode, ledger: Ledger, tmp_path: Path) -> None:
    link = node.link()
    node.call(node.link(), "start", job="old", attempt=1, spec=TRUE)
    wait_until(lambda: [run["status"] for run in node.runs()] == ["exited"])
    go = tmp_path / "go"

    async def story() -> Watcher:
        watcher = Watcher(node, link)
        await watcher.until(lambda: len(watcher.documents) == 1)
        first = watcher.documents[0]
        assert (first["is_first"], first["has_more"]) == (True, False)
        assert [(run["job"], run["status"]) for run in first["runs"]] == [("old", "exited")]
        failing = {"ranks": [ledger.rank(0, "wait_for", go, 3)]}
        failing["ranks"][0]["argv"] = ["sh", "-c", 'echo the last line; exec "$@"', "sh", *failing["ranks"][0]["argv"]]
        await node.acall(link, "start", job="new", attempt=1, spec=failing)
        await watcher.until(lambda: watcher.status("new.1") == "running")
        go.touch()
        await watcher.until(lambda: watcher.status("new.1") == "exited")
        await node.acall(link, "remove", job="old", attempt=1)
        await watcher.until(lambda: "old.1" not in watcher.runs)
        await watcher.is_quiet_for(0.7)
        return watcher

    watcher = node.wait(story())
    assert watcher.runs["new.1"]["exit"]["failure"]["tail"] == ["the last line"]
    assert all({"now", "runs", "gone"} == set(document) for document in watcher.documents[1:])
    told = [run["status"] for document in watcher.documents for run in document["runs"] if run["job"] == "new"]
    assert told in (["running", "exited"], ["starting", "running", "exited"])


def test_a_killed_supervisor_is_told_although_it_wrote_nothing(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping())

    async def story() -> float:
        watcher = Watcher(node, link)
        await watcher.until(lambda: watcher.status("train.1") == "running")
        os.kill(node.supervisor("train", 1), signal.SIGKILL)
        killed_at = time.monotonic()
        await watcher.until(lambda: watcher.status("train.1") == "dead")
        seen_after_s = time.monotonic() - killed_at
        await node.acall(link, "stop", job="train", attempt=1)
        await watcher.until(lambda: watcher.status("train.1") == "exited")
        return seen_after_s

    assert node.wait(story()) < 1.5


def test_the_kernel_tells_of_a_killed_supervisor_before_any_look_at_its_lock(
    told_node: LocalNode, ledger: Ledger
) -> None:
    """A look at the locks comes every two seconds, and cannot explain that most are told at once."""
    node, link = told_node, told_node.link()
    names = [f"job{number}" for number in range(5)]
    for name in names:
        node.call(link, "start", job=name, attempt=1, spec={"ranks": [{"rank": 0, "argv": ["sleep", "600"]}]})

    async def story() -> list[float]:
        watcher = Watcher(node, link)
        await watcher.until(lambda: len(watcher.runs) == len(names))
        delays = []
        for name in names:
            os.kill(node.supervisor(name, 1), signal.SIGKILL)
            killed_at = time.monotonic()
            await watcher.until(lambda name=name: watcher.status(f"{name}.1") == "dead")  # type: ignore[misc]
            delays.append(time.monotonic() - killed_at)
        return delays

    delays = node.wait(story())
    assert sorted(delays)[len(delays) // 2] < 0.3
    for name in names:
        node.call(link, "stop", job=name, attempt=1)


def test_what_another_link_does_is_told_and_two_watches_are_told_the_same(node: LocalNode, ledger: Ledger) -> None:
    ours, other = node.link(), node.link()

    async def story() -> None:
        watchers = [Watcher(node, ours), Watcher(node, ours)]
        for watcher in watchers:
            await watcher.until(lambda watcher=watcher: bool(watcher.documents))  # type: ignore[misc]
        await node.acall(other, "start", job="train", attempt=1, spec=ledger.sleeping())
        for word in ("running", "exited"):
            for watcher in watchers:
                await watcher.until(lambda watcher=watcher, word=word: watcher.status("train.1") == word)  # type: ignore[misc]
            await node.acall(other, "stop", job="train", attempt=1)
        await node.acall(other, "remove", job="train", attempt=1)
        for watcher in watchers:
            await watcher.until(lambda watcher=watcher: not watcher.runs)  # type: ignore[misc]

    node.wait(story())


def test_a_large_picture_comes_in_documents_that_fit(told_node: LocalNode, ledger: Ledger) -> None:
    node, link = told_node, told_node.link()
    node.call(link, "start", job="one", attempt=1, spec=TRUE)
    wait_until((node.run_dir("one", 1) / "exit.json").exists)
    names = leave_large_runs(node, 60)

    async def story() -> Watcher:
        watcher = Watcher(node, link)
        await watcher.until(lambda: bool(watcher.documents) and not watcher.documents[-1].get("has_more"))
        await watcher.is_quiet_for(0.3)
        return watcher

    watcher = node.wait(story())
    assert sorted(watcher.runs) == sorted([*names, "one.1"])
    assert all(document["is_first"] for document in watcher.documents)
    assert [document["has_more"] for document in watcher.documents] == [True] * (len(watcher.documents) - 1) + [False]
    assert len(watcher.documents) > 5
    assert max(watcher.sizes) < wire.MAX_PAYLOAD // 2


def test_a_reader_that_does_not_read_gets_the_latest_and_no_more_than_a_window(
    told_node: LocalNode, ledger: Ledger
) -> None:
    node, link = told_node, told_node.link()
    node.call(link, "start", job="one", attempt=1, spec=TRUE)
    wait_until((node.run_dir("one", 1) / "exit.json").exists)
    names = leave_large_runs(node, 60)

    async def story() -> Watcher:
        watcher = Watcher(node, link)
        stream = watcher.stream
        await comes(lambda: stream._unread >= wire.WINDOW // 2)
        for attempt in range(1, 6):  # nobody reads what became of those before it is over
            await node.acall(link, "start", job="short", attempt=attempt, spec=TRUE)
            await node.acall(link, "stop", job="short", attempt=attempt)
            await node.acall(link, "remove", job="short", attempt=attempt)
        await node.acall(link, "start", job="last", attempt=1, spec=TRUE)
        await node.acall(link, "stop", job="last", attempt=1)
        assert stream._unread <= wire.WINDOW
        await watcher.until(lambda: watcher.status("last.1") == "exited")
        return watcher

    watcher = node.wait(story())
    assert sorted(watcher.runs) == sorted([*names, "one.1", "last.1"])
    told = [run["job"] for document in watcher.documents for run in document["runs"]]
    assert told.count("short") == 0


def test_a_watch_ends_when_it_is_cancelled_and_the_node_goes_on(node: LocalNode) -> None:
    link = node.link()

    async def story() -> None:
        for _ in range(200):  # more than a user may have inotify instances: each is given back
            watcher = Watcher(node, link)
            await watcher.until(lambda watcher=watcher: bool(watcher.documents))  # type: ignore[misc]
            watcher.stream.cancel()
        assert await link.call("echo", {"still": "here"}, timeout_s=5) == {"still": "here"}

    node.wait(story())
    [program] = node.pids()
    wait_until(lambda: len(os.listdir(f"/proc/{program}/fd")) < 30)


def test_a_watch_costs_nothing_while_nothing_happens(told_node: LocalNode, ledger: Ledger) -> None:
    """Judged by what the kernel counts: how often the node program was on a processor."""
    node, link = told_node, told_node.link()
    node.call(link, "start", job="one", attempt=1, spec=TRUE)
    wait_until((node.run_dir("one", 1) / "exit.json").exists)
    leave_large_runs(node, 50)
    [program] = node.pids()

    async def story() -> int:
        watcher = Watcher(node, link)
        await watcher.until(lambda: bool(watcher.documents) and not watcher.documents[-1].get("has_more"))
        before = switches(program)
        await watcher.is_quiet_for(1.5)
        return switches(program) - before

    assert node.wait(story()) < 10  # a ping or two


def test_a_folder_that_goes_away_ends_the_watch_with_a_word(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()

    async def story() -> None:
        watcher = Watcher(node, link)
        await watcher.until(lambda: bool(watcher.documents))
        await node.acall(link, "start", job="train", attempt=1, spec=TRUE)
        await watcher.until(lambda: watcher.status("train.1") == "exited")
        shutil.rmtree(node.run_dir("train", 1))
        await watcher.until(lambda: not watcher.runs)
        assert await link.call("echo", {}, timeout_s=5) == {}

    node.wait(story())


def test_an_older_generation_may_not_watch(node: LocalNode) -> None:
    node.generation = 2
    node.call(node.link(), "stop", job="none", attempt=1)  # makes the agent's folder
    node.generation = 1
    with pytest.raises(RemoteFailure, match="generation"):
        node.call(node.link(), "watch")


def leave_large_runs(node: LocalNode, count: int) -> list[str]:
    """As supervisors of failed runs with long last words left them."""
    runs = node.run_dir("one", 1).parent
    record = json.loads((runs / "one.1" / "exit.json").read_text())
    failure = {"rank": 0, "code": 1, "tail": ["x" * 300] * 50}
    for number in range(count):
        wide = {**record, "run": f"wide{number:02}.1", "failure": failure}
        (runs / f"wide{number:02}.1").mkdir()
        (runs / f"wide{number:02}.1" / "exit.json").write_text(json.dumps(wide))
    return [f"wide{number:02}.1" for number in range(count)]


def switches(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def test_an_agent_that_has_a_successor_is_told_so_without_asking(told_node: LocalNode) -> None:
    link = told_node.link()

    async def scenario() -> None:
        watcher = Watcher(told_node, link)
        await watcher.until(lambda: len(watcher.documents) == 1)
        told_node.generation = 2
        await told_node.acall(link, "tickets", runs=[], admits=True)
        with pytest.raises(RemoteFailure, match="generation 1, and the node has met 2") as caught:
            async with asyncio.timeout(30):
                await watcher.stream.result()
        assert caught.value.cause == "fenced-agent"

    told_node.wait(scenario())

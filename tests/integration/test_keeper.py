"""Many small runs in the hands of one keeper: each has the guards and the end of a run with its own supervisor.

The judge is the ledger that the ranks write, and /proc; see ``tests.rig.ledger``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_run_watch import Watcher, comes
from tests.rig import disk
from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import AGENT, LocalNode
from tests.rig.waiting import is_alive, processes_with_variable, wait_until
from ugro.core.errors import RemoteFailure, UgroError
from ugro.nodes.link import Link
from ugro.remote.rundir import KEEPER_POINTS, boot_id

NO_DISK = disk.available()
ENDS = ["supervisor.ending", "exit.written", "exit.renamed"]
BEFORE_THE_CLAIM = KEEPER_POINTS[: KEEPER_POINTS.index("keeper.claimed")]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    book = Ledger(tmp_path)
    yield book
    book.end_all()


@pytest.fixture
def node(tmp_path: Path, ledger: Ledger) -> Iterator[LocalNode]:
    (tmp_path / "root").mkdir()
    local = LocalNode(tmp_path / "root")
    try:
        yield local
        ledger.judge()
    finally:
        local.close()


def spec_of(ledger: Ledger, device: int, *words: Any, **more: Any) -> dict[str, Any]:
    """A run of rank 0 that holds a device of its own."""
    return {"ranks": [{**ledger.rank(device, *words), "rank": 0}], "grace_s": 1, **more}


def saying(text: str) -> dict[str, Any]:
    return {"ranks": [{"rank": 0, "argv": ["printf", "%s", text]}]}


def wanted(specs: dict[str, dict[str, Any]], attempt: int = 1) -> list[dict[str, Any]]:
    return [{"job": job, "attempt": attempt, "spec": spec} for job, spec in specs.items()]


def start(node: LocalNode, link: Link, specs: dict[str, dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    answer = node.call(link, "start_many", runs=wanted(specs), boot_id=boot_id(), **more)
    return list(answer["results"])


def statuses(node: LocalNode, link: Link) -> dict[str, str]:
    return {run["job"]: run["status"] for run in node.call(link, "list")["runs"]}


def records(node: LocalNode, link: Link, timeout_s: float = 20) -> dict[str, dict[str, Any]]:
    """How each ended, once all have."""
    wait_until(lambda: set(statuses(node, link).values()) <= {"exited"}, timeout_s, "all runs to end")
    return {run["job"]: run["exit"] for run in node.call(link, "list")["runs"]}


def end_as_told(node: LocalNode, link: Link, specs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns when the node program has heard from the keeper that all are over, with how they began."""

    async def story() -> list[dict[str, Any]]:
        watcher = Watcher(node, link)
        answer = await node.acall(link, "start_many", runs=wanted(specs))
        await watcher.until(lambda: all(watcher.status(f"{job}.1") == "exited" for job in specs))
        watcher.stream.cancel()
        return list(answer["results"])

    return node.wait(story())


def keeper_of(result: dict[str, Any]) -> int:
    return int(result["run"]["state"]["pid"])


def keepers(node: LocalNode) -> list[int]:
    """With their wardens."""
    found = processes_with_variable("UGRO_RUN", [f"{AGENT}/keeper"])
    return [pid for pid in found if is_alive(pid) and _is_of(pid, node)]


def _is_of(pid: int, node: LocalNode) -> bool:
    with suppress(OSError):
        return f"TEST_NODE_ROOT={node.root}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


# --- the plain life of many runs --------------------------------------------------------------------------------


def test_many_runs_have_few_keepers_and_each_its_own_end_files_and_log(node: LocalNode) -> None:
    link = node.link()
    texts = {str(number): f"text {number} ü\n" * number for number in range(30)}
    results = start(node, link, {job: saying(text) for job, text in texts.items()})
    assert len({keeper_of(result) for result in results}) <= 2
    assert [result["run"]["job"] for result in results] == list(texts)
    assert {record["outcome"] for record in records(node, link).values()} == {"succeeded"}
    for job, text in texts.items():
        folder = node.run_dir(job, 1)
        assert (folder / "logs" / "rank_0.log").read_text() == text
        assert json.loads((folder / "exit.json").read_text())["ranks"][0]["code"] == 0
        assert (folder / "claim").read_text() == boot_id()


def test_a_small_log_travels_with_the_end_and_is_what_the_file_holds(node: LocalNode) -> None:
    link = node.link()
    sizes = {"10": 0, "11": 1, "12": 8192, "13": 8193}
    specs: dict[str, dict[str, Any]] = {
        job: {"ranks": [{"rank": 0, "argv": ["head", "-c", str(size), "/dev/urandom"]}]} for job, size in sizes.items()
    }

    async def told() -> dict[str, Any]:
        watcher = Watcher(node, link)
        await watcher.until(lambda: bool(watcher.documents))
        await node.acall(link, "start_many", runs=wanted(specs))
        await watcher.until(lambda: all(watcher.status(f"{job}.1") == "exited" for job in sizes))
        watcher.stream.cancel()
        return watcher.runs

    runs = node.wait(told())
    for job, size in sizes.items():
        log = (node.run_dir(job, 1) / "logs" / "rank_0.log").read_bytes()
        assert len(log) == size
        if size > 8192:
            assert "logs" not in runs[f"{job}.1"]
        else:
            assert runs[f"{job}.1"]["logs"] == {"0": {"content": base64.b64encode(log).decode(), "size": size}}


def test_what_a_keeper_tells_is_what_the_files_say(node: LocalNode) -> None:
    link, other = node.link(), node.link()
    specs = {"1": saying("out"), "2": {"ranks": [{"rank": 0, "argv": ["sh", "-c", "echo ü >&2; exit 3"]}]}}

    async def told() -> list[dict[str, Any]]:
        found = []
        watchers = [Watcher(node, link), Watcher(node, other)]
        for watcher in watchers:
            await watcher.until(lambda watcher=watcher: bool(watcher.documents))  # type: ignore[misc]
        await node.acall(link, "start_many", runs=wanted(specs))
        for watcher in [*watchers, Watcher(node, node_link)]:
            await watcher.until(
                lambda watcher=watcher: [watcher.status(f"{job}.1") for job in specs] == ["exited"] * 2  # type: ignore[misc]
            )
            found.append(watcher.runs)
            watcher.stream.cancel()
        return found

    node_link = node.link()
    by_keeper, by_kernel, first = node.wait(told())
    assert by_keeper == by_kernel == first
    assert by_keeper["2.1"]["exit"]["failure"]["tail"] == ["ü"]


def test_a_rank_of_a_keeper_sees_what_a_rank_of_a_supervisor_sees(node: LocalNode, ledger: Ledger) -> None:
    link = node.link(crash="no.such.point")
    start(node, link, {"17": spec_of(ledger, 0, "environment", env={"BOTH": "run"})})
    assert records(node, link)["17"]["outcome"] == "succeeded"
    folder = node.run_dir("17", 1)
    said = (folder / "logs" / "rank_0.log").read_text()
    assert "UGRO_CRASH_POINT" not in said
    for line in ("BOTH=run", f"UGRO_RUN={AGENT}/17.1", f"UGRO_RUN_DIR={folder}", f"UGRO_OUTPUT={folder}/output"):
        assert line in said.splitlines()
    pid = ledger.starts()[0].pid
    assert f"cwd={folder}/work sid={pid} pid={pid} oom=200" in said


def test_a_program_that_is_not_there_fails_alone_and_says_why(node: LocalNode, tmp_path: Path) -> None:
    link = node.link()
    (tmp_path / "here").write_text("#!/bin/sh\necho it must not be found in the working directory\n")
    (tmp_path / "here").chmod(0o755)
    bad = {"ranks": [{"rank": 0, "argv": ["here"]}], "cwd": str(tmp_path)}
    worse = {"ranks": [{"rank": 0, "argv": ["true"]}], "cwd": "/no/such"}
    results = start(node, link, {"1": bad, "2": saying("x"), "3": worse})
    assert [result["run"]["status"] for result in results] == ["exited", "running", "exited"]
    ends = records(node, link)
    assert ends["1"]["reason"] == "rank 0: here: no such file or directory"
    assert ends["1"]["ranks"][0]["code"] == 127
    assert ends["3"]["reason"] == "rank 0: working directory /no/such: no such file or directory"
    assert [ends[job]["outcome"] for job in "123"] == ["start-failed", "succeeded", "start-failed"]


# --- at most one start ------------------------------------------------------------------------------------------


def test_the_same_starts_again_answer_and_start_nothing(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    specs = {str(number): spec_of(ledger, number, "sleep") for number in range(5)}
    first = start(node, link, specs)
    assert start(node, link, specs) == first
    assert start(node, node.link(), specs) == first
    [conflict] = start(node, link, {"1": saying("else")})
    assert conflict["error"]["kind"] == "conflict"
    wait_until(lambda: len(ledger.starts()) == 5)
    for job in specs:
        node.call(link, "stop", job=job, attempt=1)
    assert len(ledger.starts()) == 5


def test_each_run_of_a_batch_has_its_own_answer(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    node.call(link, "stop", job="3", attempt=1)  # comes before its start
    two = {"ranks": [{"rank": number, "argv": ["true"]} for number in range(2)]}
    specs = {"1": saying("x"), "2": two, "3": saying("x"), "4": saying("x") | {"lease_s": 5}, "5": {"ranks": 7}}
    specs |= {"6": saying("x") | {"unheard": "of"}, "no name": saying("x"), "8": saying("x")}
    kinds = [result.get("error", {}).get("kind") for result in start(node, link, specs)]
    assert kinds == [None, "usage", "fenced", "usage", "usage", "usage", "usage", None]
    for runs in ([], wanted(specs) * 63, {"no": "list"}):
        with pytest.raises(RemoteFailure, match="1 to 500"):
            node.call(link, "start_many", runs=runs)


def test_a_start_that_was_decided_before_a_restart_of_the_machine_is_refused(node: LocalNode) -> None:
    link = node.link()
    [run] = wanted({"1": saying("x")})
    with pytest.raises(RemoteFailure, match="restarted") as caught:
        node.call(link, "start", boot_id="another", **run)
    assert caught.value.cause == "other-boot"
    [refused] = node.call(link, "start_many", boot_id="another", runs=[run])["results"]
    assert refused["error"]["kind"] == "other-boot"
    each = [{**run, "boot_id": "another"}, *wanted({"2": saying("x")})]
    refused, taken = node.call(link, "start_many", runs=each, boot_id=boot_id())["results"]
    assert (refused["error"]["kind"], taken["run"]["status"]) == ("other-boot", "running")
    records(node, link)
    node.call(link, "remove_many", runs=[["2", 1]])
    assert node.call(link, "list")["runs"] == []
    node.call(link, "start", job="1", attempt=1, spec=saying("x"), boot_id=boot_id())
    assert records(node, link)["1"]["outcome"] == "succeeded"


def test_two_node_programs_that_start_the_same_runs_at_once_start_each_once(node: LocalNode, ledger: Ledger) -> None:
    links = [node.link(), node.link()]
    specs = {str(number): spec_of(ledger, number, "sleep") for number in range(20)}

    async def both() -> list[dict[str, Any]]:
        runs = wanted(specs)
        first = node.acall(links[0], "start_many", runs=runs)
        return list(await asyncio.gather(first, node.acall(links[1], "start_many", runs=runs[::-1])))

    for answer in node.wait(both()):
        assert {result["run"]["status"] for result in answer["results"]} == {"running"}
    wait_until(lambda: len(ledger.starts()) == 20)
    for job in specs:
        node.call(links[0], "stop", job=job, attempt=1, grace_s=0)
    assert len(ledger.starts()) == 20
    ledger.expect_nothing_alive()


@pytest.mark.parametrize("point", BEFORE_THE_CLAIM)
def test_of_two_starts_at_once_one_starts_the_rank(node: LocalNode, ledger: Ledger, point: str) -> None:
    """The first stands still at a point while the second comes; then it goes on."""
    first, second = node.link(crash=f"{point}:pause"), node.link()
    runs = wanted({"7": spec_of(ledger, 0, "sleep")})

    async def both() -> list[dict[str, Any]]:
        slow = asyncio.create_task(node.acall(first, "start_many", runs=runs))
        await node.stopped_at(point, slow)
        quick = asyncio.create_task(node.acall(second, "start_many", runs=runs))
        await asyncio.wait([quick], timeout=0.5)
        node.let_go(node.stopped())
        return list(await asyncio.gather(slow, quick))

    for answer in node.wait(both()):
        assert answer["results"][0]["run"]["status"] == "running"
    wait_until(lambda: ledger.starts())
    node.call(second, "stop", job="7", attempt=1)
    assert len(ledger.starts()) == 1
    ledger.expect_nothing_alive()


def test_a_newer_attempt_ends_the_older_and_the_older_never_starts_again(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, {"7": spec_of(ledger, 0, "hostile")})
    wait_until(lambda: ledger.lines("ready"))
    runs = [{"job": "7", "attempt": attempt, "spec": spec_of(ledger, 0, "sleep")} for attempt in (2, 1)]
    newer, older = node.call(link, "start_many", runs=runs)["results"]
    assert newer["run"]["status"] == "running"
    assert older["error"]["kind"] in ("fenced", "conflict")
    assert ledger.alive_of(f"{AGENT}/7.1") == []
    node.call(link, "stop", job="7", attempt=2)
    node.call(link, "remove_many", runs=[["7", 1], ["7", 2]])
    [again] = start(node, link, {"7": spec_of(ledger, 0, "sleep")})
    assert again["error"]["kind"] == "fenced"
    [third] = node.call(link, "start_many", runs=wanted({"7": spec_of(ledger, 0, "sleep")}, attempt=3))["results"]
    assert (third["run"]["status"], third["run"]["attempt"]) == ("running", 3)


@pytest.mark.parametrize("point", [*KEEPER_POINTS, *ENDS, "start.launched"])
def test_after_a_kill_of_a_keeper_at_any_point_all_goes_on(node: LocalNode, ledger: Ledger, point: str) -> None:
    crashing = node.link(crash=f"{point}:pause")
    runs = wanted({"7": spec_of(ledger, 0, "polite", 0)})

    async def live_until_killed() -> None:
        life = asyncio.create_task(whole_life(node, crashing, runs))
        paused = await node.stopped_at(point, life)
        for pid in paused if point != "start.launched" else [*node.pids(), *paused]:
            os.kill(pid, signal.SIGKILL)
        with suppress(UgroError):
            await asyncio.wait_for(life, 30)

    node.wait(live_until_killed())
    sound = node.link()
    known = node.call(sound, "list")["runs"]
    node.call(sound, "start_many", runs=runs)
    [second] = node.call(sound, "start_many", runs=wanted({"7": spec_of(ledger, 0, "sleep")}, attempt=2))["results"]
    assert second["run"]["status"] == "running", known
    wait_until(lambda: len(ledger.starts(f"{AGENT}/7.2")) == 1)
    assert ledger.alive_of(f"{AGENT}/7.1") == []
    for attempt in (1, 2):
        assert node.call(sound, "stop", job="7", attempt=attempt)["run"]["status"] in ("exited", "absent")
    assert node.call(sound, "remove_many", runs=[["7", 1], ["7", 2]])["results"] == [{}, {}]
    ledger.expect_nothing_alive()
    assert os.listdir(node.run_dir("7", 1).parent) == []


async def whole_life(node: LocalNode, link: Link, runs: list[dict[str, Any]]) -> None:
    await node.acall(link, "start_many", runs=runs)
    await node.acall(link, "stop", job="7", attempt=1, grace_s=1)
    await node.acall(link, "remove_many", runs=[["7", 1]])


# --- who dies, and who goes on ----------------------------------------------------------------------------------


def test_with_a_killed_keeper_all_its_runs_are_dead_and_nothing_of_them_lives_on(
    node: LocalNode, ledger: Ledger
) -> None:
    link = node.link()
    kinds = ["plain", "setsid-double", "empty", "setsid-empty-double"]
    specs = {str(number): spec_of(ledger, number, "hostile", *kinds) for number in range(3)}

    async def story() -> None:
        watcher = Watcher(node, link)
        await watcher.until(lambda: bool(watcher.documents))
        answer = await node.acall(link, "start_many", runs=wanted(specs))
        wait_until(lambda: len(ledger.lines("ready")) == 3)
        wait_until(lambda: len(ledger.entries()) == 15)
        old.extend(keepers(node))
        os.kill(keeper_of(answer["results"][0]), signal.SIGKILL)
        killed_at = time.monotonic()
        await watcher.until(lambda: [watcher.status(f"{job}.1") for job in specs] == ["dead"] * 3)
        assert time.monotonic() - killed_at < 2
        watcher.stream.cancel()

    old: list[int] = []
    node.wait(story())
    ledger.expect_nothing_alive(5)
    wait_until(lambda: not any(map(is_alive, old)), what="the warden to end")
    assert start(node, link, specs)[0]["run"]["status"] == "dead"
    for job in specs:
        record = node.call(link, "stop", job=job, attempt=1)["run"]["exit"]
        assert (record["outcome"], record["reason"]) == ("lost", "its supervisor was killed")
    assert start(node, link, {"9": saying("another keeper")})[0]["run"]["status"] == "running"


def test_runs_go_on_without_their_node_program_and_another_tells_how_they_ended(
    node: LocalNode, ledger: Ledger, tmp_path: Path
) -> None:
    link = node.link()
    go = tmp_path / "go"
    specs = {str(number): spec_of(ledger, number, "wait_for", go, number % 2) for number in range(12)}

    async def cut_in_the_middle() -> None:
        call = asyncio.create_task(node.acall(link, "start_many", runs=wanted(specs)))
        await comes(lambda: len(ledger.starts()) >= 4)
        node.kill_programs()
        with suppress(UgroError):
            await call

    node.wait(cut_in_the_middle())
    other = node.link()

    async def told() -> dict[str, Any]:
        watcher = Watcher(node, other)
        await watcher.until(lambda: bool(watcher.documents))
        await node.acall(other, "start_many", runs=wanted(specs))
        assert all(watcher.status(f"{job}.1") in (None, "starting", "running") for job in specs)
        go.touch()
        await watcher.until(lambda: all(watcher.status(f"{job}.1") == "exited" for job in specs))
        watcher.stream.cancel()
        return watcher.runs

    runs = node.wait(told())
    codes = [run["exit"]["ranks"][0]["code"] for run in sorted(runs.values(), key=lambda run: int(run["job"]))]
    assert codes == [0, 1] * 6
    assert len(ledger.starts()) == 12
    other.close()
    wait_until(lambda: not keepers(node), what="all keepers to end")


def test_a_stop_reaches_a_keeper_from_any_node_program_and_no_other_run(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    specs = {str(number): spec_of(ledger, number, "polite", 0, grace_s=20) for number in range(3)}
    start(node, link, specs)
    wait_until(lambda: len(ledger.lines("ready")) == 3)
    link.close()
    other = node.link()
    record = node.call(other, "stop", job="1", attempt=1, reason="enough", grace_s=20)["run"]["exit"]
    assert (record["outcome"], record["reason"], record["ranks"][0]["code"]) == ("stopped", "enough", 0)
    assert len(ledger.lines("asked")) == 1
    assert statuses(node, other) == {"0": "running", "1": "exited", "2": "running"}


def test_a_stopped_keeper_counts_as_alive_and_hears_a_stop(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    [result] = start(node, link, {"7": spec_of(ledger, 0, "sleep")})
    os.kill(keeper_of(result), signal.SIGSTOP)
    assert statuses(node, link) == {"7": "running"}
    assert node.call(link, "stop", job="7", attempt=1)["run"]["exit"]["outcome"] == "stopped"


def test_a_keeper_that_is_asked_to_end_ends_all_its_runs_and_says_so(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    specs = {str(number): spec_of(ledger, number, "polite", 0, grace_s=20) for number in range(3)}
    [result, *_] = start(node, link, specs)
    wait_until(lambda: len(ledger.lines("ready")) == 3)
    os.kill(keeper_of(result), signal.SIGTERM)
    assert {record["outcome"] for record in records(node, link).values()} == {"interrupted"}
    assert len(ledger.lines("asked")) == 3


def test_a_keeper_is_no_child_of_the_node_program_and_ends_with_it_when_it_has_no_run(node: LocalNode) -> None:
    link = node.link()
    [program] = node.pids()
    [result] = start(node, link, {"7": saying("x")})
    keeper = keeper_of(result)
    assert len(keepers(node)) == 2
    assert os.getsid(keeper) not in (os.getsid(program), keeper)
    assert Path(f"/proc/{keeper}/cwd").readlink() == Path("/")
    records(node, link)
    link.close()
    wait_until(lambda: not keepers(node), 5, "the keeper and its warden to end")
    assert os.listdir(node.run_dir("7", 1).parent.parent / "keepers") == []


# --- the whole tree ends ----------------------------------------------------------------------------------------


def test_what_a_rank_left_ends_with_its_run_and_that_of_others_does_not(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    kinds = ["plain", "setsid", "double", "setsid-double", "empty", "empty-double"]
    stays = spec_of(ledger, 0, "hostile", *kinds)
    leaves = spec_of(ledger, 1, "hostile", *kinds)
    argv = leaves["ranks"][0]["argv"]
    script = 'trap "" TERM; "$@" & while [ $(grep -c ready "$TEST_LEDGER") -lt 2 ]; do sleep 0.01; done; kill -9 $!'
    leaves["ranks"][0]["argv"] = ["sh", "-c", script, "sh", *argv]
    start(node, link, {"1": stays, "2": leaves})
    wait_until(lambda: statuses(node, link)["2"] == "exited")
    left = [entry for entry in ledger.entries() if entry.is_alive]
    assert {entry.run for entry in left} == {f"{AGENT}/1.1"}
    assert len(left) == 7
    record = node.call(link, "stop", job="1", attempt=1, grace_s=0.2)["run"]["exit"]
    assert (record["unkillable"], record["leftovers"]) == ([], 6)
    ledger.expect_nothing_alive(0.1)


def test_one_that_left_every_trace_ends_when_no_run_can_have_left_it(node: LocalNode, ledger: Ledger) -> None:
    """Its own session, no environment, no parent: two runs were there when it began."""
    link = node.link()
    specs = {"1": spec_of(ledger, 1, "sleep")}
    start(node, link, specs)
    child = spec_of(ledger, 2, "hostile", "setsid-empty-double")
    argv = child["ranks"][0]["argv"]
    script = '"$@" & while ! grep -q ready "$TEST_LEDGER"; do sleep 0.01; done; sleep 0.1; kill -9 $!'
    child["ranks"][0]["argv"] = ["sh", "-c", script, "sh", *argv]
    start(node, link, {"2": child})
    wait_until(lambda: statuses(node, link)["2"] == "exited")
    [escaped] = [entry for entry in ledger.entries() if entry.kind == "setsid-empty-double"]
    node.call(link, "stop", job="1", attempt=1)
    wait_until(lambda: not escaped.is_alive, 10, "the process that left every trace to end")
    assert records(node, link)["2"]["outcome"] == "succeeded"
    ledger.expect_nothing_alive(1)


@pytest.mark.parametrize("pause_s", [0.002, 0])
def test_a_process_that_is_never_the_same_for_long_ends_too(node: LocalNode, ledger: Ledger, pause_s: float) -> None:
    link = node.link()
    start(node, link, {"1": spec_of(ledger, 1, "sleep"), "2": spec_of(ledger, 2, "hop", pause_s)})
    wait_until(lambda: ledger.lines("ready"))
    record = node.call(link, "stop", 10, job="2", attempt=1, grace_s=0.1)["run"]["exit"]
    assert (record["outcome"], record["unkillable"]) == ("stopped", [])
    assert [entry.run for entry in ledger.entries() if entry.is_alive] == [f"{AGENT}/1.1"]
    assert ledger.held() == ["ledger.held.1"]


def test_a_stubborn_run_and_a_flood_do_not_keep_others_waiting(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    stubborn = spec_of(ledger, 1, "hostile", grace_s=30)
    flood = spec_of(ledger, 2, "flood", 400, 100, log_cap_bytes=64 * 1024)
    start(node, link, {"1": stubborn, "2": flood})
    wait_until(lambda: ledger.lines("ready"))

    async def story() -> float:
        stopping = asyncio.create_task(node.acall(link, "stop", job="1", attempt=1, grace_s=30))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        answer = await node.acall(link, "start_many", runs=wanted({"3": saying("quick")}))
        assert keeper_of(answer["results"][0]) == keeper_of(started[0])
        await comes((node.run_dir("3", 1) / "exit.json").exists)
        took_s = time.monotonic() - began
        assert not stopping.done()
        await node.acall(link, "stop", job="1", attempt=1, grace_s=0)
        await stopping
        return took_s

    started = start(node, link, {"1": stubborn})
    assert node.wait(story()) < 2
    ends = records(node, link)
    assert ends["2"]["outcome"] == "succeeded"
    log = node.run_dir("2", 1) / "logs" / "rank_0.log"
    assert log.stat().st_blocks * 512 < 64 << 20
    assert log.read_bytes().endswith(b"the last line\n")


# --- disks and folders ------------------------------------------------------------------------------------------


@pytest.mark.skipif(NO_DISK is not None, reason=str(NO_DISK))
def test_a_full_disk_does_not_lose_how_a_kept_run_ended(tmp_path: Path, ledger: Ledger) -> None:
    small = disk.SmallDisk(tmp_path / "root", 4 << 20)
    small.mount()
    node = LocalNode(tmp_path / "root")
    try:
        link = node.link()
        node.call(link, "remove", job="0", attempt=1)  # the first sweeps, and uses nothing again
        end_as_told(node, link, {"7": spec_of(ledger, 0, "say", "first\n", 0)})
        node.call(link, "remove_many", runs=[["7", 1]])  # the next one has its folder
        filling = spec_of(ledger, 0, "fill", tmp_path / "root" / "big", 7)
        filling["ranks"][0]["argv"] = ["sh", "-c", 'seq 5000; exec "$@"', "sh", *filling["ranks"][0]["argv"]]
        start(node, link, {"8": filling, "9": spec_of(ledger, 1, "sleep")})
        wait_until((node.run_dir("8", 1) / "exit.json").exists)
        record = json.loads((node.run_dir("8", 1) / "exit.json").read_text())
        assert [line.split()[2] for line in ledger.lines("full")] == ["0"]
        assert (record["outcome"], record["failure"]["code"]) == ("failed", 7)
        assert record["failure"]["tail"][-1] == "5000"
        small.fill()
        assert node.call(link, "stop", job="9", attempt=1)["run"]["exit"]["outcome"] == "stopped"
        [refused] = start(node, link, {"10": saying("x")})
        assert refused["error"]["kind"] == "os"
    finally:
        node.close()
        small.unmount()


def test_many_are_removed_at_once_and_each_says_why_not(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    specs = {str(number): saying(str(number)) for number in range(40)}
    start(node, link, {**specs, "40": spec_of(ledger, 0, "sleep")})
    wait_until(lambda: [status for status in statuses(node, link).values()].count("exited") == 40)
    asked = [[job, 1] for job in [*specs, "40", "41"]]
    results = node.call(link, "remove_many", runs=asked)["results"]
    assert results[:40] == [{}] * 40
    assert results[40]["error"]["kind"] == "alive"
    assert results[41] == {}
    assert list(statuses(node, link)) == ["40"]
    assert node.call(link, "remove_many", runs=asked[:40])["results"] == [{}] * 40
    [refused] = start(node, link, {"3": specs["3"]})
    assert refused["error"]["kind"] == "fenced"


def test_a_run_has_nothing_of_the_one_that_had_its_folder_before(node: LocalNode) -> None:
    link = node.link()
    loud = {"ranks": [{"rank": 0, "argv": ["sh", "-c", "seq 3000; exit 5"]}]}
    node.call(link, "remove", job="0", attempt=1)  # the first also sweeps, and uses nothing again
    [result] = end_as_told(node, link, {"1": loud})
    inode = node.run_dir("1", 1).stat().st_ino
    node.call(link, "remove_many", runs=[["1", 1]])
    start(node, link, {"2": {"ranks": [{"rank": 0, "argv": ["sleep", "600"]}]}})
    folder = node.run_dir("2", 1)
    assert folder.stat().st_ino == inode
    assert (folder / "logs" / "rank_0.log").read_bytes() == b""
    assert json.loads((folder / "spec.json").read_text())["spec"]["ranks"][0]["argv"] == ["sleep", "600"]
    assert not (folder / "exit.json").exists()
    assert statuses(node, link) == {"2": "running"}
    os.kill(keeper_of(result), signal.SIGKILL)
    record = node.call(link, "stop", job="2", attempt=1)["run"]["exit"]
    assert (record["outcome"], record["failure"]) == ("lost", None)
    assert (folder / "logs" / "rank_0.log").read_bytes() == b""


@pytest.mark.parametrize("name", ["exit.json", "exit.reserve", "state.json", "spec.json"])
def test_what_a_power_cut_brings_back_of_another_run_is_not_believed(node: LocalNode, name: str) -> None:
    link = node.link()
    [result] = start(node, link, {"1": {"ranks": [{"rank": 0, "argv": ["sleep", "600"]}]}, "2": saying("x")})[:1]
    wait_until((node.run_dir("2", 1) / "exit.json").exists)
    content = (node.run_dir("2", 1) / name.replace("reserve", "json")).read_bytes()
    os.kill(keeper_of(result), signal.SIGKILL)
    wait_until(lambda: statuses(node, link)["1"] == "dead")
    (node.run_dir("1", 1) / name).write_bytes(content)
    [found] = [run for run in node.call(link, "list")["runs"] if run["job"] == "1"]
    assert found["status"] == "dead"
    assert (found["state"] or {"run": "1.1"})["run"] == "1.1"
    assert node.call(link, "stop", job="1", attempt=1)["run"]["exit"]["outcome"] == "lost"


@pytest.mark.parametrize(
    "script",
    [
        "ln $UGRO_RUN_DIR/logs/rank_0.log {kept}",
        "ln $UGRO_RUN_DIR/spec.json {kept}",
        "touch $UGRO_OUTPUT/left",
        "touch $UGRO_RUN_DIR/left",
        "mv $UGRO_RUN_DIR/output $UGRO_RUN_DIR/was; ln -s {kept}.d $UGRO_RUN_DIR/output",
        "mv $UGRO_RUN_DIR/logs/rank_0.log {kept}; ln -s {kept} $UGRO_RUN_DIR/logs/rank_0.log",
        "chmod 755 $UGRO_OUTPUT",
    ],
)
def test_a_folder_that_a_run_has_changed_goes_to_no_other(node: LocalNode, tmp_path: Path, script: str) -> None:
    link = node.link()
    kept = tmp_path / "kept"
    Path(f"{kept}.d").mkdir()
    argv = ["sh", "-c", f"echo precious; {script.format(kept=kept)}"]
    node.call(link, "remove", job="0", attempt=1)  # the first sweeps, and uses nothing again
    end_as_told(node, link, {"1": {"ranks": [{"rank": 0, "argv": argv}]}})
    assert records(node, link)["1"]["outcome"] == "succeeded"
    held = kept.read_bytes() if kept.exists() else b""
    assert node.call(link, "remove_many", runs=[["1", 1]])["results"] == [{}]
    assert not node.run_dir("1", 1).exists()
    start(node, link, {"2": saying("other")})
    records(node, link)
    assert (kept.read_bytes() if kept.exists() else b"") == held
    assert (node.run_dir("2", 1) / "logs" / "rank_0.log").read_bytes() == b"other"
    assert (node.run_dir("2", 1) / "output").stat().st_ino != Path(f"{kept}.d").stat().st_ino
    assert not (node.run_dir("2", 1) / "left").exists()
    assert (node.run_dir("2", 1) / "output").stat().st_mode & 0o777 == 0o700


def test_what_a_killed_node_program_left_is_swept_by_the_next(node: LocalNode) -> None:
    link = node.link()
    node.call(link, "remove", job="no-such", attempt=1)  # the first sweeps, and uses nothing again
    end_as_told(node, link, {str(number): saying("x") for number in range(5)})
    node.call(link, "remove_many", runs=[[str(number), 1] for number in range(5)])
    agent = node.run_dir("1", 1).parent.parent
    [pool] = (agent / "blanks").iterdir()
    assert len(list(pool.iterdir())) == 5
    node.kill_programs()
    other = node.link()
    start(node, other, {"9": saying("x")})
    records(node, other)
    node.call(other, "remove_many", runs=[["9", 1]])
    wait_until(lambda: not pool.exists(), what="the old blanks to go")

"""Many small runs that share a supervisor: each has the guards and the files of a run with its own supervisor.

The judge is the ledger that the ranks write, and /proc; see ``tests.rig.ledger``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.rig.keeping import (
    records,
    saying,
    spec_of,
    start,
    supervisor_of,
    wanted,
)
from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import AGENT, LocalNode
from tests.rig.tiers import sample
from tests.rig.waiting import signal_all, wait_until
from tests.rig.watcher import Watcher, comes
from ugro.kernel.links.link import Link
from ugro.kernel.support.errors import RemoteFailure, UgroError
from ugro.node.clock import boot_id
from ugro.node.runs.rundir import POINTS

# One that is shared waits for nothing, so also not for older attempts to end.
SHARED_POINTS = [*POINTS[1 : POINTS.index("exit.renamed") + 1]]
SHARED_POINTS.remove("supervisor.alone")
BEFORE_THE_CLAIM = SHARED_POINTS[: SHARED_POINTS.index("supervisor.claimed")]


# --- the plain life of many runs --------------------------------------------------------------------------------


def test_many_runs_have_few_supervisors_and_each_its_own_end_files_and_log(node: LocalNode) -> None:
    link = node.link()
    texts = {str(number): f"text {number} ü\n" * number for number in range(30)}
    results = start(node, link, {job: saying(text) for job, text in texts.items()})
    assert len({supervisor_of(result) for result in results}) <= 2
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
        await node.acall(link, "start", runs=wanted(specs))
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


def test_what_a_supervisor_reports_is_what_the_files_say(node: LocalNode) -> None:
    link, other = node.link(), node.link()
    specs = {"1": saying("out"), "2": {"ranks": [{"rank": 0, "argv": ["sh", "-c", "echo ü >&2; exit 3"]}]}}

    async def told() -> list[dict[str, Any]]:
        found = []
        watchers = [Watcher(node, link), Watcher(node, other)]
        for watcher in watchers:
            await watcher.until(lambda watcher=watcher: bool(watcher.documents))  # type: ignore[misc]
        await node.acall(link, "start", runs=wanted(specs))
        for watcher in [*watchers, Watcher(node, node_link)]:
            await watcher.until(
                lambda watcher=watcher: [watcher.status(f"{job}.1") for job in specs] == ["exited"] * 2  # type: ignore[misc]
            )
            found.append(watcher.runs)
            watcher.stream.cancel()
        return found

    node_link = node.link()
    by_supervisor, by_kernel, first = node.wait(told())
    assert by_supervisor == by_kernel == first
    assert by_supervisor["2.1"]["exit"]["failure"]["tail"] == ["ü"]


def test_a_rank_of_a_shared_supervisor_sees_what_a_rank_of_its_own_sees(node: LocalNode, ledger: Ledger) -> None:
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
    assert kinds == [None, None, "fenced", None, "usage", "usage", "usage", None]
    for runs in ([], wanted(specs) * 63, {"no": "list"}):
        with pytest.raises(RemoteFailure, match="1 to 500"):
            node.call(link, "start", runs=runs)


def test_a_start_that_was_decided_before_a_restart_of_the_machine_is_refused(node: LocalNode) -> None:
    link = node.link()
    [run] = wanted({"1": saying("x")})
    with pytest.raises(RemoteFailure, match="restarted") as caught:
        node.call(link, "start", boot_id="another", **run)
    assert caught.value.cause == "other-boot"
    each = [{**run, "boot_id": "another"}, *({**one, "boot_id": boot_id()} for one in wanted({"2": saying("x")}))]
    refused, taken = node.call(link, "start", runs=each)["results"]
    assert (refused["error"]["kind"], taken["run"]["status"]) == ("other-boot", "running")
    records(node, link)
    node.call(link, "remove", runs=[["2", 1]])
    assert node.runs() == []
    node.call(link, "start", job="1", attempt=1, spec=saying("x"), boot_id=boot_id())
    assert records(node, link)["1"]["outcome"] == "succeeded"


def test_a_start_that_was_decided_for_another_folder_is_refused(node: LocalNode) -> None:
    link = node.link()
    assert link.machine is not None
    [run] = wanted({"1": saying("x")})
    with pytest.raises(RemoteFailure, match="/elsewhere") as caught:
        node.call(link, "start", root="/elsewhere", **run)
    assert caught.value.cause == "other-root"
    each = [{**run, "root": "/elsewhere"}, *({**one, "root": link.machine.root} for one in wanted({"2": saying("x")}))]
    refused, taken = node.call(link, "start", runs=each)["results"]
    assert (refused["error"]["kind"], taken["run"]["status"]) == ("other-root", "running")
    assert set(records(node, link)) == {"2"}


def test_two_node_programs_that_start_the_same_runs_at_once_start_each_once(node: LocalNode, ledger: Ledger) -> None:
    links = [node.link(), node.link()]
    specs = {str(number): spec_of(ledger, number, "sleep") for number in range(20)}

    async def both() -> list[dict[str, Any]]:
        runs = wanted(specs)
        first = node.acall(links[0], "start", runs=runs)
        return list(await asyncio.gather(first, node.acall(links[1], "start", runs=runs[::-1])))

    for answer in node.wait(both()):
        assert {result["run"]["status"] for result in answer["results"]} == {"running"}
    wait_until(lambda: len(ledger.starts()) == 20)
    for job in specs:
        node.call(links[0], "stop", job=job, attempt=1, grace_s=0)
    assert len(ledger.starts()) == 20
    ledger.expect_nothing_alive()


@pytest.mark.parametrize("point", sample(BEFORE_THE_CLAIM, BEFORE_THE_CLAIM[-1]))
def test_of_two_starts_at_once_one_starts_the_rank(node: LocalNode, ledger: Ledger, point: str) -> None:
    """The first stands still at a point while the second comes; then it goes on."""
    first, second = node.link(crash=f"{point}:pause"), node.link()
    runs = wanted({"7": spec_of(ledger, 0, "sleep")})

    async def both() -> list[dict[str, Any]]:
        slow = asyncio.create_task(node.acall(first, "start", runs=runs))
        await node.stopped_at(point, slow)
        quick = asyncio.create_task(node.acall(second, "start", runs=runs))
        await asyncio.wait([quick], timeout=0.5)
        node.let_go(node.stopped())
        return list(await asyncio.gather(slow, quick))

    for answer in node.wait(both()):
        assert answer["results"][0]["run"]["status"] == "running"
    wait_until(lambda: ledger.starts())
    node.call(second, "stop", job="7", attempt=1)
    assert len(ledger.starts()) == 1
    ledger.expect_nothing_alive()


def test_a_run_that_another_supervisor_has_started_meanwhile_is_reported_too(node: LocalNode) -> None:
    """While a supervisor has a run in hand, its node program does not look at it; this one hands it back."""
    first, second = node.link(crash="supervisor.locked:pause"), node.link()
    supervisor = supervisor_of(start(node, second, {"1": saying("x")})[0])
    runs = wanted({"7": saying("x")})

    async def story() -> None:
        watcher = Watcher(node, second)
        await watcher.until(lambda: bool(watcher.documents))
        quick_one = asyncio.create_task(node.acall(first, "start", runs=runs))
        [paused] = await node.stopped_at("supervisor.locked", quick_one)
        os.kill(supervisor, signal.SIGSTOP)
        slow_one = asyncio.create_task(node.acall(second, "start", runs=runs))
        await asyncio.sleep(0)
        await second.call("echo", {}, timeout_s=5)
        node.let_go([paused])
        await quick_one
        await comes((node.run_dir("7", 1) / "exit.json").exists)
        await watcher.is_quiet_for(0.2)
        node.let_go([supervisor])
        assert (await slow_one)["results"][0]["run"]["status"] == "exited"
        await watcher.until(lambda: watcher.status("7.1") == "exited")
        watcher.stream.cancel()

    node.wait(story())


def test_a_newer_attempt_ends_the_older_and_the_older_never_starts_again(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, {"7": spec_of(ledger, 0, "hostile")})
    wait_until(lambda: ledger.lines("ready"))
    runs = [wanted({"7": spec_of(ledger, 0, "sleep")}, attempt)[0] for attempt in (2, 1)]
    newer, older = node.call(link, "start", runs=runs)["results"]
    assert newer["run"]["status"] == "running"
    assert older["error"]["kind"] in ("fenced", "conflict")
    assert ledger.alive_of(f"{AGENT}/7.1") == []
    node.call(link, "stop", job="7", attempt=2)
    node.call(link, "remove", runs=[["7", 1], ["7", 2]])
    [again] = start(node, link, {"7": spec_of(ledger, 0, "sleep")})
    assert again["error"]["kind"] == "fenced"
    [third] = node.call(link, "start", runs=wanted({"7": spec_of(ledger, 0, "sleep")}, attempt=3))["results"]
    assert (third["run"]["status"], third["run"]["attempt"]) == ("running", 3)


@pytest.mark.parametrize("point", sample([*SHARED_POINTS, "start.launched"], "supervisor.stated", "exit.written"))
def test_after_a_kill_of_a_shared_supervisor_all_goes_on(node: LocalNode, ledger: Ledger, point: str) -> None:
    crashing = node.link(crash=f"{point}:pause")
    runs = wanted({"7": spec_of(ledger, 0, "polite", 0)})

    async def live_until_killed() -> None:
        life = asyncio.create_task(whole_life(node, crashing, runs))
        paused = await node.stopped_at(point, life)
        signal_all(signal.SIGKILL, paused if point != "start.launched" else [*node.pids(), *paused])
        await node.kill_all_that_stop(life)
        with suppress(UgroError):
            await life

    node.wait(live_until_killed())
    sound = node.link()
    known = node.runs()
    node.call(sound, "start", runs=runs)
    [second] = node.call(sound, "start", runs=wanted({"7": spec_of(ledger, 0, "sleep")}, attempt=2))["results"]
    assert second["run"]["status"] == "running", known
    wait_until(lambda: len(ledger.starts(f"{AGENT}/7.2")) == 1)
    assert ledger.alive_of(f"{AGENT}/7.1") == []
    for attempt in (1, 2):
        assert node.call(sound, "stop", job="7", attempt=attempt)["run"]["status"] in ("exited", "absent")
    assert node.call(sound, "remove", runs=[["7", 1], ["7", 2]])["results"] == [{}, {}]
    ledger.expect_nothing_alive()
    assert os.listdir(node.run_dir("7", 1).parent) == []


async def whole_life(node: LocalNode, link: Link, runs: list[dict[str, Any]]) -> None:
    await node.acall(link, "start", runs=runs)
    await node.acall(link, "stop", job="7", attempt=1, grace_s=1)
    await node.acall(link, "remove", runs=[["7", 1]])

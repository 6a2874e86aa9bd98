"""Many small runs that share a supervisor: who dies and who goes on, what they leave, what becomes of their folders.

The judge is the ledger that the ranks write, and /proc; see ``tests.rig.ledger``.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.rig import disk
from tests.rig.keeping import (
    end_as_reported,
    leaving,
    record_of,
    records,
    saying,
    spec_of,
    start,
    statuses,
    supervisor_of,
    wanted,
)
from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import AGENT, LocalNode
from tests.rig.waiting import is_alive, wait_until
from tests.rig.watcher import Watcher, comes
from ugro.kernel.support.errors import UgroError
from ugro.node.runs.logs import read_cut
from ugro.node.runs.runspec import LEAST_LOG_CAP_BYTES

NO_DISK = disk.available()


# --- who dies, and who goes on ----------------------------------------------------------------------------------


def test_with_a_killed_supervisor_all_its_runs_are_dead_and_nothing_of_them_lives_on(
    node: LocalNode, ledger: Ledger
) -> None:
    link = node.link()
    kinds = ["plain", "setsid-double", "empty", "setsid-empty-double"]
    specs = {str(number): spec_of(ledger, number, "hostile", *kinds) for number in range(3)}

    async def story() -> None:
        watcher = Watcher(node, link)
        await watcher.until(lambda: bool(watcher.documents))
        answer = await node.acall(link, "start", runs=wanted(specs))
        wait_until(lambda: len(ledger.lines("ready")) == 3)
        wait_until(lambda: len(ledger.entries()) == 15)
        old.extend(node.supervising())
        os.kill(supervisor_of(answer["results"][0]), signal.SIGKILL)
        await watcher.until(lambda: [watcher.status(f"{job}.1") for job in specs] == ["dead"] * 3)
        watcher.stream.cancel()

    old: list[int] = []
    node.wait(story())
    ledger.expect_nothing_alive(5)
    wait_until(lambda: not any(map(is_alive, old)), what="the reaper to end")
    assert start(node, link, specs)[0]["run"]["status"] == "dead"
    for job in specs:
        record = node.call(link, "stop", job=job, attempt=1)["run"]["exit"]
        assert (record["outcome"], record["reason"]) == ("lost", "its supervisor was killed")
    assert start(node, link, {"9": saying("another supervisor")})[0]["run"]["status"] == "running"


def test_a_rank_that_had_died_before_the_order_to_stop_is_the_reason(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    [result] = start(node, link, {"1": spec_of(ledger, 0, "sleep")})
    os.kill(supervisor_of(result), signal.SIGSTOP)  # too slow to have seen it
    os.kill(result["run"]["state"]["ranks"][0]["pid"], signal.SIGKILL)
    record = node.call(link, "stop", job="1", attempt=1)["run"]["exit"]
    assert (record["outcome"], record["reason"]) == ("failed", "rank 0 ended with signal 9")


def test_runs_go_on_without_their_node_program_and_another_tells_how_they_ended(
    node: LocalNode, ledger: Ledger, tmp_path: Path
) -> None:
    link = node.link()
    go = tmp_path / "go"
    specs = {str(number): spec_of(ledger, number, "wait_for", go, number % 2) for number in range(12)}

    async def cut_in_the_middle() -> None:
        call = asyncio.create_task(node.acall(link, "start", runs=wanted(specs)))
        await comes(lambda: len(ledger.starts()) >= 4)
        node.kill_programs()
        with suppress(UgroError):
            await call

    node.wait(cut_in_the_middle())
    other = node.link()

    async def told() -> dict[str, Any]:
        watcher = Watcher(node, other)
        await watcher.until(lambda: bool(watcher.documents))
        await node.acall(other, "start", runs=wanted(specs))
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
    wait_until(lambda: not node.supervising(), what="all supervisors to end")


def test_a_stop_reaches_one_run_of_a_supervisor_from_any_node_program(node: LocalNode, ledger: Ledger) -> None:
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


def test_a_stopped_supervisor_counts_as_alive_and_hears_a_stop(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    [result] = start(node, link, {"7": spec_of(ledger, 0, "sleep")})
    os.kill(supervisor_of(result), signal.SIGSTOP)
    assert statuses(node, link) == {"7": "running"}
    assert node.call(link, "stop", job="7", attempt=1)["run"]["exit"]["outcome"] == "stopped"


def test_a_supervisor_that_is_asked_to_end_ends_all_its_runs_and_says_so(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    specs = {str(number): spec_of(ledger, number, "polite", 0, grace_s=20) for number in range(3)}
    [result, *_] = start(node, link, specs)
    wait_until(lambda: len(ledger.lines("ready")) == 3)
    os.kill(supervisor_of(result), signal.SIGTERM)
    assert {record["outcome"] for record in records(node, link).values()} == {"interrupted"}
    assert len(ledger.lines("asked")) == 3


def test_a_supervisor_is_no_child_of_the_node_program_and_ends_with_it_when_it_has_no_run(node: LocalNode) -> None:
    link = node.link()
    [program] = node.pids()
    [result] = start(node, link, {"7": saying("x")})
    supervisor = supervisor_of(result)
    assert len(node.supervising()) == 2
    assert os.getsid(supervisor) not in (os.getsid(program), supervisor)
    assert Path(f"/proc/{supervisor}/cwd").readlink() == Path("/")
    records(node, link)
    link.close()
    wait_until(lambda: not node.supervising(), 5, "the supervisor and its reaper to end")
    assert os.listdir(node.run_dir("7", 1).parent.parent / "supervisors") == []


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


@pytest.mark.parametrize("kind", ["double", "setsid-double", "empty-double", "setsid-empty-double"])
def test_a_run_is_not_over_while_anything_it_left_lives(node: LocalNode, ledger: Ledger, kind: str) -> None:
    link = node.link()
    start(node, link, {"1": spec_of(ledger, 1, "sleep"), "2": leaving(ledger, 2, kind)})
    wait_until(lambda: statuses(node, link)["2"] == "exited")
    [left] = [entry for entry in ledger.entries() if entry.kind == kind]
    assert not left.is_alive
    assert record_of(node, "2")["leftovers"] >= 1  # sometimes also the one that was killed only just before
    assert statuses(node, link)["1"] == "running"


@pytest.mark.proof
def test_one_that_left_every_trace_ends_when_no_run_can_have_left_it(node: LocalNode, ledger: Ledger) -> None:
    """Its own session, no environment, no parent, no file of its run: two runs were there when it began."""
    link = node.link()
    specs = {"1": spec_of(ledger, 1, "sleep")}
    start(node, link, specs)
    start(node, link, {"2": leaving(ledger, 2, "setsid-empty-double-bare")})
    wait_until(lambda: statuses(node, link)["2"] == "exited")
    [escaped] = [entry for entry in ledger.entries() if entry.kind == "setsid-empty-double-bare"]
    node.call(link, "stop", job="1", attempt=1)
    wait_until(lambda: not escaped.is_alive, 10, "the process that left every trace to end")
    assert records(node, link)["2"]["outcome"] == "succeeded"
    ledger.expect_nothing_alive(1)


@pytest.mark.proof
@pytest.mark.parametrize("pause_s", [0.002, 0])
def test_a_process_that_is_never_the_same_for_long_ends_too(node: LocalNode, ledger: Ledger, pause_s: float) -> None:
    link = node.link()
    start(node, link, {"1": spec_of(ledger, 1, "sleep"), "2": spec_of(ledger, 2, "hop", pause_s)})
    wait_until(lambda: ledger.lines("ready"))
    record = node.call(link, "stop", 10, job="2", attempt=1, grace_s=0.1)["run"]["exit"]
    assert (record["outcome"], record["unkillable"]) == ("stopped", [])
    assert [entry.run for entry in ledger.entries() if entry.is_alive] == [f"{AGENT}/1.1"]
    assert ledger.held() == ["ledger.held.1"]


@pytest.mark.proof
def test_a_stubborn_run_and_a_flood_do_not_keep_others_waiting(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    stubborn = spec_of(ledger, 1, "hostile", grace_s=30)
    flood = spec_of(ledger, 2, "flood", 400, 100, log_cap_bytes=64 * 1024)
    start(node, link, {"1": stubborn, "2": flood})
    wait_until(lambda: ledger.lines("ready"))

    async def story() -> None:
        stopping = asyncio.create_task(node.acall(link, "stop", job="1", attempt=1, grace_s=30))
        await link.call("echo", {}, timeout_s=5)  # answered after the stop was heard
        answer = await node.acall(link, "start", runs=wanted({"3": saying("quick")}))
        assert supervisor_of(answer["results"][0]) == supervisor_of(started[0])
        await comes((node.run_dir("3", 1) / "exit.json").exists)
        assert not stopping.done()
        await node.acall(link, "stop", job="1", attempt=1, grace_s=0)
        await stopping

    started = start(node, link, {"1": stubborn})
    node.wait(story())
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
        end_as_reported(node, link, {"7": spec_of(ledger, 0, "say", "first\n", 0)})
        node.call(link, "remove", runs=[["7", 1]])  # the next one has its folder
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
        assert refused["error"]["kind"] == "no-space"
    finally:
        node.close()
        small.unmount()


def test_many_are_removed_at_once_and_each_says_why_not(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    specs = {str(number): saying(str(number)) for number in range(40)}
    start(node, link, {**specs, "40": spec_of(ledger, 0, "sleep")})
    wait_until(lambda: [status for status in statuses(node, link).values()].count("exited") == 40)
    asked = [[job, 1] for job in [*specs, "40", "41"]]
    results = node.call(link, "remove", runs=asked)["results"]
    assert results[:40] == [{}] * 40
    assert results[40]["error"]["kind"] == "alive"
    assert results[41] == {}
    assert list(statuses(node, link)) == ["40"]
    assert node.call(link, "remove", runs=asked[:40])["results"] == [{}] * 40
    [refused] = start(node, link, {"3": specs["3"]})
    assert refused["error"]["kind"] == "fenced"


def test_a_run_has_nothing_of_the_one_that_had_its_folder_before(node: LocalNode) -> None:
    link = node.link()
    loud = {"ranks": [{"rank": 0, "argv": ["sh", "-c", "seq 3000; exit 5"]}]}
    node.call(link, "remove", job="0", attempt=1)  # the first also sweeps, and uses nothing again
    [result] = end_as_reported(node, link, {"1": loud})
    inode = node.run_dir("1", 1).stat().st_ino
    node.call(link, "remove", runs=[["1", 1]])
    start(node, link, {"2": {"ranks": [{"rank": 0, "argv": ["sleep", "600"]}]}})
    folder = node.run_dir("2", 1)
    assert folder.stat().st_ino == inode
    assert (folder / "logs" / "rank_0.log").read_bytes() == b""
    assert json.loads((folder / "spec.json").read_text())["spec"]["ranks"][0]["argv"] == ["sleep", "600"]
    assert not (folder / "exit.json").exists()
    assert statuses(node, link) == {"2": "running"}
    os.kill(supervisor_of(result), signal.SIGKILL)
    record = node.call(link, "stop", job="2", attempt=1)["run"]["exit"]
    assert (record["outcome"], record["failure"]) == ("lost", None)
    assert (folder / "logs" / "rank_0.log").read_bytes() == b""


@pytest.mark.proof
@pytest.mark.parametrize("name", ["exit.json", "exit.reserve", "state.json", "spec.json"])
def test_what_a_power_cut_brings_back_of_another_run_is_not_believed(node: LocalNode, name: str) -> None:
    link = node.link()
    [result] = start(node, link, {"1": {"ranks": [{"rank": 0, "argv": ["sleep", "600"]}]}, "2": saying("x")})[:1]
    wait_until((node.run_dir("2", 1) / "exit.json").exists)
    content = (node.run_dir("2", 1) / name.replace("reserve", "json")).read_bytes()
    os.kill(supervisor_of(result), signal.SIGKILL)
    wait_until(lambda: statuses(node, link)["1"] == "dead")
    (node.run_dir("1", 1) / name).write_bytes(content)
    [found] = [run for run in node.runs() if run["job"] == "1"]
    assert found["status"] == "dead"
    assert (found["state"] or {"run": "1.1"})["run"] == "1.1"
    assert node.call(link, "stop", job="1", attempt=1)["run"]["exit"]["outcome"] == "lost"


@pytest.mark.proof
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
    end_as_reported(node, link, {"1": {"ranks": [{"rank": 0, "argv": argv}]}})
    assert records(node, link)["1"]["outcome"] == "succeeded"
    held = kept.read_bytes() if kept.exists() else b""
    assert node.call(link, "remove", runs=[["1", 1]])["results"] == [{}]
    assert not node.run_dir("1", 1).exists()
    start(node, link, {"2": saying("other")})
    records(node, link)
    assert (kept.read_bytes() if kept.exists() else b"") == held
    assert (node.run_dir("2", 1) / "logs" / "rank_0.log").read_bytes() == b"other"
    assert (node.run_dir("2", 1) / "output").stat().st_ino != Path(f"{kept}.d").stat().st_ino
    assert not (node.run_dir("2", 1) / "left").exists()
    assert (node.run_dir("2", 1) / "output").stat().st_mode & 0o777 == 0o700


def test_a_folder_whose_log_was_cut_goes_to_no_other(node: LocalNode, tmp_path: Path) -> None:
    link = node.link()
    node.call(link, "remove", job="0", attempt=1)  # the first sweeps, and uses nothing again
    until_it_is_cut = 'cp "$0" "$1"; seq 60000; while cmp -s "$0" "$1"; do sleep 0.05; done'
    argv = ["sh", "-c", until_it_is_cut, str(node.run_dir("1", 1) / "logs" / "rank_0.log.cut"), str(tmp_path / "whole")]
    end_as_reported(node, link, {"1": {"ranks": [{"rank": 0, "argv": argv}], "log_cap_bytes": LEAST_LOG_CAP_BYTES}})
    assert read_cut(str(node.run_dir("1", 1) / "logs" / "rank_0.log")).first > 0
    assert node.call(link, "remove", runs=[["1", 1]])["results"] == [{}]
    end_as_reported(node, link, {"2": {"ranks": [{"rank": 0, "argv": ["sh", "-c", "seq 5000; exit 3"]}]}})
    assert read_cut(str(node.run_dir("2", 1) / "logs" / "rank_0.log")) == (0, 0, False)
    assert record_of(node, "2")["failure"]["tail"][-1] == "5000"


def test_a_free_folder_that_somebody_looks_at_keeps_nobody_from_starting(node: LocalNode) -> None:
    link = node.link()
    node.call(link, "remove", job="0", attempt=1)  # the first sweeps, and uses nothing again
    end_as_reported(node, link, {"1": saying("x")})
    node.call(link, "remove", runs=[["1", 1]])
    [folder] = (node.run_dir("1", 1).parent.parent / "pool").glob("*/*")
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        start(node, link, {"2": saying("y")})
    assert records(node, link)["2"]["outcome"] == "succeeded"


def test_a_run_that_is_removed_before_its_end_is_told_is_told_as_gone(node: LocalNode) -> None:
    """A look into the files is sometimes quicker than the supervisor's report."""
    link = node.link()

    async def story() -> None:
        watcher = Watcher(node, link)
        for number in range(20):
            await node.acall(link, "start", runs=wanted({str(number): saying("x")}))
            await comes((node.run_dir(str(number), 1) / "exit.json").exists)
            await node.acall(link, "remove", runs=[[str(number), 1]])
        await watcher.until(lambda: bool(watcher.documents) and not watcher.runs)
        await watcher.is_quiet_for(0.2)
        assert watcher.runs == {}
        watcher.stream.cancel()

    node.wait(story())


def test_what_a_killed_node_program_left_is_swept_by_the_next(node: LocalNode) -> None:
    link = node.link()
    node.call(link, "remove", job="no-such", attempt=1)  # the first sweeps, and uses nothing again
    end_as_reported(node, link, {str(number): saying("x") for number in range(5)})
    node.call(link, "remove", runs=[[str(number), 1] for number in range(5)])
    agent = node.run_dir("1", 1).parent.parent
    [pool] = (agent / "pool").iterdir()
    assert len(list(pool.iterdir())) == 5
    node.kill_programs()
    other = node.link()
    start(node, other, {"9": saying("x")})
    records(node, other)
    node.call(other, "remove", runs=[["9", 1]])
    wait_until(lambda: not pool.exists(), what="the old folders to go")

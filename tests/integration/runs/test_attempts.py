"""At most one start, never two attempts at once, nothing left: whoever dies or comes late, at whatever moment.

The judge is the ledger that the ranks write, and /proc; see ``tests.rig.ledger``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import RawProgram
from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import AGENT, LocalNode
from tests.rig.tiers import sample
from tests.rig.waiting import is_alive, signal_all, wait_until
from tests.rig.watcher import comes
from ugro.kernel.links.link import Link
from ugro.kernel.support.errors import RemoteFailure, UgroError
from ugro.node import wire
from ugro.node.clock import boot_id, moment
from ugro.node.machine import node_key
from ugro.node.runs.rundir import POINTS, AgentDir

SUPERVISOR_POINTS = [point for point in POINTS if point.startswith(("supervisor.", "exit."))]
BEFORE_THE_CLAIM = POINTS[: POINTS.index("supervisor.claimed")]
UNFENCED = ("supervisor.begun", "supervisor.admitted", "supervisor.alone")  # another attempt may come in between
ONE, TWO = f"{AGENT}/train.1", f"{AGENT}/train.2"


def status_of(answer: dict[str, Any]) -> str:
    return str(answer["run"]["status"])


# --- at most one start ------------------------------------------------------------------------------------------


def test_the_same_start_again_answers_and_starts_nothing(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    spec = ledger.sleeping()
    first = node.call(link, "start", job="train", attempt=1, spec=spec)
    again = node.call(node.link(), "start", job="train", attempt=1, spec=spec)
    assert first["run"] == again["run"]
    with pytest.raises(RemoteFailure, match="another spec"):
        node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping(1))


@pytest.mark.parametrize("point", sample(BEFORE_THE_CLAIM, "supervisor.alone", BEFORE_THE_CLAIM[-1]))
def test_of_two_starts_at_once_one_starts_the_ranks(node: LocalNode, ledger: Ledger, point: str) -> None:
    """The first stands still at a point while the second comes; then it goes on."""
    first, second = node.link(crash=f"{point}:pause"), node.link()
    spec = ledger.sleeping()

    async def both() -> list[dict[str, Any]]:
        slow = asyncio.create_task(node.acall(first, "start", job="train", attempt=1, spec=spec))
        await node.stopped_at(point, slow)
        quick = asyncio.create_task(node.acall(second, "start", job="train", attempt=1, spec=spec))
        await asyncio.wait([quick], timeout=0.5)
        node.let_go(node.stopped())
        return list(await asyncio.gather(slow, quick))

    assert [status_of(answer) for answer in node.wait(both())] == ["running", "running"]
    wait_until(lambda: len(ledger.starts(ONE)) == 2)
    node.call(second, "stop", job="train", attempt=1)
    assert len(ledger.starts()) == 2
    ledger.expect_nothing_alive()


@pytest.mark.parametrize("point", ["supervisor.begun", "supervisor.alone"])
def test_a_supervisor_that_comes_late_does_not_start_what_was_started_and_lost(
    node: LocalNode, ledger: Ledger, point: str
) -> None:
    first, second = node.link(crash=f"{point}:pause"), node.link()
    spec = ledger.sleeping()

    async def late() -> dict[str, Any]:
        slow = asyncio.create_task(node.acall(first, "start", job="train", attempt=1, spec=spec))
        paused = await node.stopped_at(point, slow)
        await node.acall(second, "start", job="train", attempt=1, spec=spec)
        working = node.supervisor("train", 1)
        assert working not in paused
        os.kill(working, signal.SIGKILL)
        wait_until(lambda: not is_alive(working))
        node.let_go(paused)
        return await slow

    assert status_of(node.wait(late())) == "dead"
    wait_until(lambda: not node.supervising())
    assert len(ledger.starts()) <= 2
    assert status_of(node.call(second, "stop", job="train", attempt=1)) == "exited"
    ledger.expect_nothing_alive()


def test_a_supervisor_with_a_fault_says_so_and_leaves_its_traceback(node: LocalNode, ledger: Ledger) -> None:
    """Here: one in whose folder something else is."""
    link = node.link()
    node.call(link, "stop", job="train", attempt=9)  # makes the agent's folder
    folder = node.run_dir("train", 1).parent.parent
    (folder / "supervisors").write_text("not a folder")
    with pytest.raises(RemoteFailure, match="supervisor cannot be set up"):
        node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping())
    log = folder / "supervisor.log"
    wait_until(lambda: log.exists() and "NotADirectoryError" in log.read_text(), what="the traceback")
    assert ledger.starts() == []


@pytest.mark.proof
def test_a_thousand_starts_at_once_keep_nobody_from_being_heard(node: LocalNode) -> None:
    """Most are refused: what counts is that they are many."""
    link = node.link()
    node.call(link, "start", job="train", attempt=2, spec={"ranks": [{"rank": 0, "argv": ["true"]}]})

    async def crowd() -> int:
        spec = {"ranks": [{"rank": 0, "argv": ["true"]}]}
        jobs = [*["train"] * 960, *(f"job{number}" for number in range(40))]
        programs = node.pids()
        signal_all(signal.SIGSTOP, programs)  # so that all of it is there when the node program looks
        starts = [asyncio.create_task(node.acall(link, "start", job=job, attempt=1, spec=spec)) for job in jobs]
        await asyncio.sleep(0)
        echo = asyncio.create_task(link.call("echo", {}, timeout_s=20))
        await asyncio.sleep(0)
        signal_all(signal.SIGCONT, programs)
        await echo
        waiting = sum(not task.done() for task in starts)
        await asyncio.gather(*starts, return_exceptions=True)
        return waiting

    assert node.wait(crowd()) > 500


# --- attempts and generations -----------------------------------------------------------------------------------


def test_a_newer_attempt_starts_when_the_older_is_dead(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    node.call(link, "start", job="train", attempt=1, spec={"ranks": [ledger.rank(0, "hostile")], "grace_s": 0.3})
    wait_until(lambda: ledger.lines("ready"))
    node.call(link, "start", job="train", attempt=2, spec=ledger.sleeping(1))
    assert ledger.alive_of(ONE) == []
    runs = node.runs()
    assert [(run["attempt"], run["status"]) for run in runs] == [(1, "exited"), (2, "running")]
    assert runs[0]["exit"]["reason"] == "attempt 2 takes its place"


def test_a_start_that_was_decided_before_a_restart_of_the_machine_is_refused(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    with pytest.raises(RemoteFailure, match="restarted after this start") as refused:
        node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping(), boot_id="of another boot")
    assert refused.value.cause == "other-boot"
    assert ledger.starts() == []
    assert not node.run_dir("train", 1).exists()
    here = boot_id()
    assert node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping(), boot_id=here)["run"]["is_claimed"]


def test_a_start_that_comes_after_a_newer_attempt_is_refused(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    node.call(link, "start", job="train", attempt=2, spec=ledger.sleeping())
    with pytest.raises(RemoteFailure, match="attempt 1 may not start here"):
        node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping())
    assert ledger.starts(ONE) == []


@pytest.mark.parametrize("point", sample(UNFENCED, "supervisor.alone"))
def test_an_attempt_that_was_overtaken_while_it_started_never_does(node: LocalNode, ledger: Ledger, point: str) -> None:
    first, second = node.link(crash=f"{point}:pause"), node.link()
    fence = AgentDir(str(node.root), AGENT, node_key("here")).fence("train")

    async def overtaken() -> dict[str, Any]:
        slow = asyncio.create_task(node.acall(first, "start", job="train", attempt=1, spec=ledger.sleeping()))
        paused = await node.stopped_at(point, slow)
        quick = asyncio.create_task(node.acall(second, "start", job="train", attempt=2, spec=ledger.sleeping()))
        await comes(lambda: fence.seen() == 2)
        node.let_go(paused)
        with suppress(UgroError):
            await slow
        return await quick

    assert status_of(node.wait(overtaken())) == "running"
    wait_until(lambda: len(ledger.starts(TWO)) == 2)
    assert ledger.starts(ONE) == []
    assert [(run["attempt"], run["status"]) for run in node.runs()] == [(2, "running")]


@pytest.mark.parametrize("point", UNFENCED)
def test_a_stop_that_comes_while_a_run_starts_is_the_last_word(node: LocalNode, ledger: Ledger, point: str) -> None:
    first, second = node.link(crash=f"{point}:pause"), node.link()

    async def stopped() -> dict[str, Any]:
        slow = asyncio.create_task(node.acall(first, "start", job="train", attempt=1, spec=ledger.sleeping()))
        paused = await node.stopped_at(point, slow)
        answer = await node.acall(second, "stop", job="train", attempt=1)
        node.let_go(paused)
        with pytest.raises(RemoteFailure, match="may not start"):
            await slow
        return answer

    assert status_of(node.wait(stopped())) == "absent"
    wait_until(lambda: not node.supervising())
    assert ledger.starts() == []


def test_a_stop_that_overtakes_its_start_wins(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    assert status_of(node.call(link, "stop", job="train", attempt=1)) == "absent"
    with pytest.raises(RemoteFailure, match="may not start"):
        node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping())
    assert ledger.starts() == []


def test_a_removed_run_does_not_start_again(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    spec = ledger.sleeping()
    node.call(link, "start", job="train", attempt=1, spec=spec)
    with pytest.raises(RemoteFailure, match="still alive"):
        node.call(link, "remove", job="train", attempt=1)
    node.call(link, "stop", job="train", attempt=1)
    for _ in range(2):
        node.call(link, "remove", job="train", attempt=1)
    assert not node.run_dir("train", 1).exists()
    with pytest.raises(RemoteFailure, match="may not start"):
        node.call(link, "start", job="train", attempt=1, spec=spec)
    assert status_of(node.call(link, "start", job="train", attempt=2, spec=spec)) == "running"


def test_an_agent_of_an_older_generation_has_no_say(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    node.generation = 2
    node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping())
    wait_until(lambda: len(ledger.starts(ONE)) == 2)
    node.generation = 1
    link = node.link()
    run: dict[str, Any] = {"job": "train", "attempt": 1}
    asked: dict[str, dict[str, Any]] = {
        "start": {**run, "spec": ledger.sleeping()},
        "follow": {**run, "file": "exit.json"},
        **dict.fromkeys(("stop", "remove", "reserve_port", "free_port", "control"), run),
        "watch": {},
        "renew": {},
    }
    for method, params in asked.items():
        with pytest.raises(RemoteFailure, match="generation 1, and the node has met 2"):
            node.call(link, method, **params)
    assert len(ledger.alive_of(ONE)) == 2


def test_an_agent_that_asks_for_tickets_to_decide_is_obeyed_from_then_on(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    assert status_of(node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping())) == "running"
    node.generation = 2
    node.call(link, "tickets", runs=None, admits=False)
    node.generation = 1
    assert status_of(node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping())) == "running"
    node.generation = 2
    node.call(link, "tickets", runs=None, admits=True)
    node.generation = 1
    with pytest.raises(RemoteFailure, match="generation 1, and the node has met 2"):
        node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping())


def test_a_refusal_says_its_kind_in_a_stable_word(tmp_path: Path) -> None:
    spec = {"ranks": [{"rank": 0, "argv": ["true"]}]}
    asked: list[tuple[str, dict[str, Any], str | None]] = [
        ("start", {"generation": 2, "attempt": 2, "spec": spec}, None),
        ("start", {"generation": 2, "attempt": 2, "spec": {**spec, "cwd": "/"}}, "conflict"),
        ("start", {"generation": 2, "attempt": 1, "spec": spec}, "fenced"),
        ("start", {"generation": 2, "attempt": 1, "spec": {}}, "usage"),
        ("watch", {"generation": 1}, "fenced-agent"),
        ("follow", {"generation": 2, "job": "train", "attempt": 9, "file": "exit.json"}, "not-found"),
        ("renew", {"generation": 2, "as_of": {"boot_id": "x", "clock_s": 1}}, "other-boot"),
        ("control", {"generation": 2, "job": "train", "attempt": 9, "key": "a", "trace_steps": 1}, "not-running"),
        ("control", {"generation": 2, "job": "train", "attempt": 2, "key": "a", "trace_steps": 0}, "usage"),
    ]
    with RawProgram(tmp_path) as program:
        for number, (method, params, kind) in enumerate(asked, start=1):
            if method == "start":
                generation = params.pop("generation")
                params = {"generation": generation, "runs": [{"job": "train", **params}]}
            program.call(number, f"runs.{method}", {"agent": AGENT, **params})
            said, of, payload = program.frame()
            assert of == number
            answer = wire.parse(payload)
            [one] = answer.get("results", [{}])
            found = answer if said == wire.ERROR else one.get("error", {})
            assert found.get("kind") == kind, answer


# --- crashes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", sample(POINTS, "supervisor.moved", "supervisor.claimed", POINTS[-1]))
def test_after_a_kill_at_any_point_all_goes_on(node: LocalNode, ledger: Ledger, point: str) -> None:
    """Killed: the process that reached the point; where that works for a node program, the node program, too."""
    crashing = node.link(crash=f"{point}:pause")
    spec = ledger.sleeping()

    async def live_until_killed() -> None:
        life = asyncio.create_task(whole_life(node, crashing, spec, loses_its_supervisor=point.startswith("clean.")))
        paused = await node.stopped_at(point, life)
        signal_all(signal.SIGKILL, paused if point in SUPERVISOR_POINTS else [*node.pids(), *paused])
        await node.kill_all_that_stop(life)
        with suppress(UgroError):
            await life

    node.wait(live_until_killed())
    sound = node.link()
    known = node.runs()
    with suppress(RemoteFailure):  # removed, or never started: both are answers
        node.call(sound, "start", job="train", attempt=1, spec=spec)
    assert status_of(node.call(sound, "start", job="train", attempt=2, spec=spec)) == "running", known
    wait_until(lambda: len(ledger.starts(TWO)) == 2)
    assert ledger.alive_of(ONE) == []
    for attempt in (1, 2):
        assert status_of(node.call(sound, "stop", job="train", attempt=attempt)) in ("exited", "absent")
        node.call(sound, "remove", job="train", attempt=attempt)
    ledger.expect_nothing_alive()
    wait_until(lambda: not node.supervising(), what="all supervisors to end")
    assert os.listdir(node.run_dir("train", 1).parent) == []


def test_a_result_that_was_written_down_is_not_lost_with_its_supervisor(node: LocalNode, ledger: Ledger) -> None:
    link = node.link(crash="exit.written:kill")
    node.call(link, "start", job="train", attempt=1, spec={"ranks": [ledger.rank(0, "exit_with", 4)]})
    wait_until(lambda: not node.supervisors("train", 1))
    link = node.link()
    assert [run["status"] for run in node.runs()] == ["dead"]
    record = node.call(link, "stop", job="train", attempt=1)["run"]["exit"]
    assert (record["outcome"], record["failure"]["code"]) == ("failed", 4)


# --- leases -----------------------------------------------------------------------------------------------------


def test_a_run_with_a_lease_ends_itself_when_the_agent_is_silent(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping(lease_s=1.0))
    node.call(link, "start", job="other", attempt=1, spec=ledger.sleeping(0) | {"ranks": [ledger.rank(5, "sleep")]})
    wait_until(lambda: len(ledger.starts()) == 3)
    link.close()
    wait_until(lambda: not ledger.alive_of(ONE), 5, "the leased run to end")
    record = wait_until(lambda: _exit_file(node), what="its last word")
    assert b"lease-expired" in record
    assert [entry.is_alive for entry in ledger.starts(f"{AGENT}/other.1")] == [True]


@pytest.mark.proof
def test_renewals_keep_a_run_and_old_ones_do_not(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    answer = node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping(lease_s=3.0))
    first = answer["now"]
    wait_until(lambda: len(ledger.starts(ONE)) == 2)

    async def renew(times: int, as_of: dict[str, Any] | None) -> None:
        for _ in range(times):
            latest = as_of or latest_answer["now"]
            latest_answer.update(await node.acall(link, "renew", as_of=latest))
            await asyncio.sleep(0.4)

    latest_answer: dict[str, Any] = {"now": first}
    node.wait(renew(10, None))
    assert [entry.is_alive for entry in ledger.starts(ONE)] == [True, True]
    node.wait(renew(10, first))
    assert [entry.is_alive for entry in ledger.starts(ONE)] == [False, False]


def test_a_start_that_is_older_than_its_lease_starts_nothing(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    now = moment()
    old = {**now, "clock_s": now["clock_s"] - 10}
    with pytest.raises(RemoteFailure, match="longer than its lease"):
        node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping(lease_s=5), as_of=old)
    other = {**now, "boot_id": "another"}
    with pytest.raises(RemoteFailure, match="longer than its lease"):
        node.call(link, "start", job="other", attempt=1, spec=ledger.sleeping(lease_s=5), as_of=other)
    assert ledger.starts() == []


# --- helpers and the judge --------------------------------------------------------------------------------------


async def whole_life(node: LocalNode, link: Link, spec: dict[str, Any], loses_its_supervisor: bool) -> None:
    await node.acall(link, "start", job="train", attempt=1, spec=spec)
    if loses_its_supervisor:
        os.kill(node.supervisor("train", 1), signal.SIGKILL)
    await node.acall(link, "stop", job="train", attempt=1, grace_s=1)
    await node.acall(link, "remove", job="train", attempt=1)


def _exit_file(node: LocalNode) -> bytes:
    path = node.run_dir("train", 1) / "exit.json"
    return path.read_bytes() if path.exists() else b""


def test_the_judge_sees_what_is_alive(ledger: Ledger, tmp_path: Path) -> None:
    """A judge that finds nobody would agree with everything."""
    rank = ledger.rank(0, "hostile", "setsid-double", "empty-double")
    env = {**os.environ, **rank["env"], "UGRO_RUN": ONE}
    pid = os.posix_spawn(rank["argv"][0], rank["argv"], env)
    wait_until(lambda: ledger.lines("ready"))
    wait_until(lambda: len(ledger.entries()) == 3)
    assert len(ledger.alive()) == 3
    assert all(is_alive(entry.pid) for entry in ledger.entries())
    twice = os.posix_spawn(rank["argv"][0], [*rank["argv"][:4], "exit_with", "0"], env)
    os.waitpid(twice, 0)
    assert len(ledger.clashes()) == 1
    ledger.end_all()
    os.waitpid(pid, 0)
    ledger.expect_nothing_alive()

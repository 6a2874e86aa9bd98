"""One run at a time has a GPU of a node, whichever agent and node name it was started by, and whoever is killed.

The ranks hold a lock as a GPU would be held, and write down a clash; the fixture ``node`` judges that at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import AGENT, LocalNode
from tests.rig.waiting import is_alive, wait_until
from ugro.kernel.links.calls import Stream
from ugro.kernel.links.link import Link
from ugro.kernel.support.errors import RemoteFailure
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus
from ugro.node.hardware import gpu_claims

GPU = "GPU-11111111-aaaa"
OTHER_GPU = "GPU-22222222-bbbb"
BUSY = "gpu-busy"
HELD_BY_ANN = r"GPU 0 is used by job train of another agent \(user ann, since \d\d:\d\d UTC\)"


def training(ledger: Ledger, *words: str, gpus: tuple[str, ...] = (GPU,), user: str = "ann") -> dict[str, Any]:
    devices = [[index, uuid] for index, uuid in enumerate(gpus)]
    return {"ranks": [ledger.rank(0, *(words or ("sleep",)))], "grace_s": 1, "gpus": devices, "user": user}


def start(node: LocalNode, link: Link, spec: dict[str, Any], job: str = "train", attempt: int = 1) -> dict[str, Any]:
    return node.call(link, "start", job=job, attempt=attempt, spec=spec)


def start_as(node: LocalNode, link: Link, agent: str, spec: dict[str, Any]) -> dict[str, Any]:
    """By another agent."""
    wanted = {"job": "other", "attempt": 1, "spec": spec}
    [result] = node.call(link, "start", agent=agent, runs=[wanted])["results"]
    return dict(result)


def refusal(result: dict[str, Any]) -> str:
    assert result["error"]["kind"] == BUSY, result
    return str(result["error"]["message"])


def lock_file(node: LocalNode, uuid: str = GPU) -> Path:
    [found] = node.root.glob(f".local/state/ugro/gpus@*/{uuid}")
    return found


@pytest.fixture(autouse=True)
def _own_gpus(node: LocalNode) -> None:
    """Those of another driver than the ones in tests that run beside this one."""
    node.spec = replace(node.spec, env=(*node.spec.env, ("UGRO_NVML_LIBRARY", str(node.root / "no-library"))))


@pytest.fixture
def second(node: LocalNode) -> Iterator[LocalNode]:
    """The same machine and account under another name."""
    other = LocalNode(node.root)
    other.spec = replace(node.spec, name="here-lan")
    yield other
    other.close()


def test_a_gpu_that_a_run_has_is_refused_to_another_agent_with_the_reason(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, training(ledger))
    text = refusal(start_as(node, link, "agent-2", training(ledger, user="bob")))
    assert re.fullmatch(HELD_BY_ANN, text)
    node.call(link, "stop", job="train", attempt=1)
    assert start_as(node, link, "agent-2", training(ledger, user="bob"))["run"]["status"] == "running"
    assert lock_file(node).parent.stat().st_mode & 0o777 == 0o700


def test_a_second_name_for_the_machine_gets_no_gpu_twice(node: LocalNode, second: LocalNode, ledger: Ledger) -> None:
    link, lan = node.link(), second.link()
    start(node, link, training(ledger))
    with pytest.raises(RemoteFailure, match="GPU 0 is used by job train on here ") as caught:
        start(second, lan, training(ledger), job="next")
    assert caught.value.cause == BUSY
    node.call(link, "stop", job="train", attempt=1)
    assert start(second, lan, training(ledger), job="next")["run"]["status"] == "running"


def test_a_refused_start_leaves_nothing_and_may_come_again(node: LocalNode, ledger: Ledger) -> None:
    """Also the GPUs that it had got before the one that was taken."""
    link = node.link()
    start(node, link, training(ledger))
    with pytest.raises(RemoteFailure, match="is used by job train"):
        start(node, link, training(ledger, gpus=(OTHER_GPU, GPU)), job="wide")
    assert not node.run_dir("wide", 1).exists()
    alone = training(ledger, gpus=(OTHER_GPU,))
    alone["ranks"] = [ledger.rank(1, "sleep")]
    assert start(node, link, alone, job="narrow")["run"]["status"] == "running"
    for job in ("train", "narrow"):
        node.call(link, "stop", job=job, attempt=1)
    assert start(node, link, training(ledger, gpus=(OTHER_GPU, GPU)), job="wide")["run"]["status"] == "running"


def test_after_a_killed_supervisor_a_gpu_is_free_when_its_rank_is_dead(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, training(ledger, "hostile", "plain"))
    wait_until(lambda: ledger.lines("ready"), 20, "a rank that ignores SIGTERM")
    node.kill_supervisor("train", 1)  # with its reaper: nobody ends what is left
    text = refusal(start_as(node, link, "agent-2", training(ledger)))
    assert text.startswith("GPU 0 is used by processes that are left of job train of another agent")
    for pid in ledger.alive():
        os.kill(pid, signal.SIGKILL)
    ledger.expect_nothing_alive()
    assert start_as(node, link, "agent-2", training(ledger))["run"]["status"] == "running"


@pytest.mark.proof
def test_the_reaper_of_a_killed_supervisor_frees_its_gpu(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, training(ledger, "hostile", "plain"))
    wait_until(lambda: ledger.lines("ready"), 20, "a rank that ignores SIGTERM")
    os.kill(node.supervisor("train", 1), signal.SIGKILL)

    def is_started() -> bool:
        return "run" in start_as(node, link, "agent-2", training(ledger))

    wait_until(is_started, 20, "the GPU to be free")


@pytest.fixture
def claim(node: LocalNode, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name by which every account sees who has the GPU."""
    monkeypatch.setenv("UGRO_NVML_LIBRARY", str(node.root / "no-library"))
    return gpu_claims.gpu_name(GPU)


@pytest.mark.parametrize("has_successor", [False, True])
def test_other_accounts_see_the_gpu_as_taken_until_what_a_killed_supervisor_left_is_ended(
    node: LocalNode, ledger: Ledger, claim: str, has_successor: bool
) -> None:
    start(node, node.link(), training(ledger, "hostile", "plain"))
    wait_until(lambda: ledger.lines("ready"), 20, "a rank that ignores SIGTERM")
    reaper = node.reaper("train", 1)
    if has_successor:
        os.kill(reaper, signal.SIGKILL)
        reaper = wait_until(lambda: (new := node.reaper("train", 1)) != reaper and new, 20, "another reaper")
    os.kill(reaper, signal.SIGSTOP)
    supervisor = node.supervisor("train", 1)
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not node.supervisors("train", 1), 20, "the end of the supervisor")
    assert ledger.alive()
    assert gpu_claims.listener(claim) is not None, "a rank is left"
    os.kill(reaper, signal.SIGCONT)
    wait_until(lambda: gpu_claims.listener(claim) is None, 20, "the GPU to be free")
    ledger.expect_nothing_alive()


def test_a_run_that_ends_frees_its_gpu_for_other_accounts_whatever_its_reaper_does(
    node: LocalNode, ledger: Ledger, claim: str
) -> None:
    link = node.link()
    start(node, link, training(ledger))
    os.kill(reaper := node.reaper("train", 1), signal.SIGSTOP)
    try:
        assert gpu_claims.listener(claim) is not None
        node.call(link, "stop", job="train", attempt=1)
        assert gpu_claims.listener(claim) is None
    finally:
        os.kill(reaper, signal.SIGCONT)


@pytest.mark.proof
def test_a_killed_node_program_leaves_the_gpu_with_its_run(node: LocalNode, ledger: Ledger) -> None:
    start(node, node.link(), training(ledger))
    node.kill_programs()
    assert re.fullmatch(HELD_BY_ANN, refusal(start_as(node, node.link(), "agent-2", training(ledger))))


def test_what_was_recorded_before_a_restart_of_the_machine_holds_no_gpu(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, training(ledger, "hostile", "plain"))
    wait_until(lambda: ledger.lines("ready"), 20, "the rank")
    node.kill_supervisor("train", 1)
    file = lock_file(node)
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "boot_id": "another"}))
    third = training(ledger)
    third["ranks"] = [ledger.rank(1, "sleep")]  # what is left here is of this boot, and would clash
    assert start_as(node, link, "agent-2", third)["run"]["status"] == "running"


def test_a_record_whose_run_is_gone_holds_no_gpu(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, training(ledger))
    record = lock_file(node).read_text()
    node.call(link, "stop", job="train", attempt=1)
    node.call(link, "remove", job="train", attempt=1)
    lock_file(node).write_text(record)
    assert start_as(node, link, "agent-2", training(ledger))["run"]["status"] == "running"


@pytest.mark.proof
@pytest.mark.parametrize("point", ["supervisor.fenced", "supervisor.locked", "supervisor.claimed"])
def test_a_supervisor_that_dies_on_its_way_keeps_no_gpu(node: LocalNode, ledger: Ledger, point: str) -> None:
    crashing = node.link(crash=f"{point}:pause")

    async def killed() -> None:
        slow = asyncio.create_task(node.acall(crashing, "start", job="train", attempt=1, spec=training(ledger)))
        await node.stopped_at(point, slow)
        await node.kill_all_that_stop(slow)
        slow.exception()

    node.wait(killed())
    assert start_as(node, node.link(), "agent-2", training(ledger))["run"]["status"] == "running"


@pytest.mark.proof
def test_the_same_start_comes_again_after_its_supervisor_died(node: LocalNode, ledger: Ledger) -> None:
    """Its own record is no reason to refuse it."""
    crashing = node.link(crash="supervisor.locked:pause")

    async def killed() -> None:
        slow = asyncio.create_task(node.acall(crashing, "start", job="train", attempt=1, spec=training(ledger)))
        await node.stopped_at("supervisor.locked", slow)
        await node.kill_all_that_stop(slow)
        slow.exception()

    node.wait(killed())
    assert start(node, node.link(), training(ledger))["run"]["status"] == "running"


def test_a_folder_that_others_may_write_to_is_not_trusted(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, training(ledger))
    node.call(link, "stop", job="train", attempt=1)
    lock_file(node).parent.chmod(0o777)
    with pytest.raises(RemoteFailure, match="others can write to it: chmod 700"):
        start(node, link, training(ledger), job="next")


def test_a_run_without_gpus_locks_nothing(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    node.call(link, "start", job="plain", attempt=1, spec=ledger.sleeping(1))
    assert not (node.root / ".local").exists()
    nameless = training(ledger, gpus=("",))
    nameless["ranks"] = [ledger.rank(1, "sleep")]
    start(node, link, nameless)
    assert not (node.root / ".local").exists(), "a GPU without a UUID has no lock"
    twice = training(ledger, gpus=(GPU, GPU))
    twice["ranks"] = [ledger.rank(2, "sleep")]
    assert start(node, link, twice, job="twice")["run"]["status"] == "running", "nobody keeps itself waiting"


def test_a_start_is_refused_when_the_indexes_of_the_gpus_have_moved(
    node: LocalNode, ledger: Ledger, tmp_path: Path
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("not installed: a C compiler")
    first, second = SimulatedGpu(uuid=GPU), SimulatedGpu(uuid=OTHER_GPU)
    write_gpus(tmp_path / "gpus", [first, second])
    variables = {"UGRO_NVML_LIBRARY": str(build_nvml_stub(tmp_path)), "UGRO_PRETEND_GPUS": str(tmp_path / "gpus")}
    node.spec = replace(node.spec, env=(*node.spec.env, *variables.items()))
    link = node.link()
    running = start(node, link, training(ledger))["run"]
    write_gpus(tmp_path / "gpus", [second])  # the first fell off the bus
    assert start(node, link, training(ledger))["run"] == running, "what was started is answered as before"
    node.call(link, "stop", job="train", attempt=1)
    for gpus in ((GPU,), (GPU, OTHER_GPU)):
        with pytest.raises(RemoteFailure, match=f"GPU 0 is not {GPU} any more") as caught:
            start(node, link, training(ledger, gpus=gpus), job="next")
        assert caught.value.cause == "gpu-changed"
    assert start(node, link, training(ledger, gpus=(OTHER_GPU,)), job="next")["run"]["status"] == "running"


@pytest.mark.proof
def test_a_newer_attempt_waits_for_the_older_and_takes_its_gpu(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, training(ledger, "hostile", "plain"))
    wait_until(lambda: ledger.lines("ready"), 20, "the first attempt")
    assert start(node, link, training(ledger), attempt=2)["run"]["status"] == "running"
    assert [pid for pid in ledger.alive_of(f"{AGENT}/train.1") if is_alive(pid.pid)] == []


# --- measurements ---------------------------------------------------------------------------------------------------


def measure(node: LocalNode, link: Link, *, is_forced: bool = False) -> tuple[Stream, dict[str, Any]]:
    """Something that is measured with the GPU, and the first that it says: it waits for a connection then."""
    lock = {"gpus": [[0, GPU]], "agent": AGENT, "node": node.spec.name, "is_forced": is_forced}
    params = {"part": "listen", "address": "127.0.0.1", "secret": "s", "limit_s": 60, "seconds": 1, "lock": lock}
    stream = link.stream("bench", params)

    async def first() -> dict[str, Any]:
        said = b""
        async with asyncio.timeout(20):
            async for _, payload in stream:
                said += payload
                if b"\n" in said:
                    break
        found: dict[str, Any] = json.loads(said.partition(b"\n")[0])
        return found

    return stream, node.wait(first())


async def ended(stream: Stream) -> None:
    stream.ask_to_stop()
    async with asyncio.timeout(20):
        with suppress(RemoteFailure):
            await stream.result()


@pytest.mark.proof
def test_a_gpu_that_is_measured_is_refused_to_a_run_until_that_has_ended(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    stream, said = measure(node, link)
    assert "port" in said
    text = refusal(start_as(node, link, "agent-2", training(ledger)))
    assert text.startswith("GPU 0 is used by a measurement of another agent")
    node.wait(ended(stream))
    assert start(node, link, training(ledger))["run"]["status"] == "running"


@pytest.mark.proof
def test_a_gpu_that_a_run_has_is_not_measured_unless_forced(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    start(node, link, training(ledger))
    _, said = measure(node, link)
    assert said["skipped"]["why"].startswith("GPU 0 is used by job train on here")
    forced, said = measure(node, link, is_forced=True)
    assert "port" in said
    node.wait(ended(forced))


def sharing(ledger: Ledger, rank: int, group: str = "sweep-1", most: int = 2, *words: str) -> dict[str, Any]:
    spec = training(ledger)
    return {**spec, "ranks": [ledger.rank(rank, *(words or ("sleep",)))], "share": [group, most]}


def test_runs_of_one_group_share_a_gpu_and_nobody_else_gets_it(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    for number in (1, 2):
        assert start(node, link, sharing(ledger, number), job=f"t{number}")["run"]["status"] == "running"
    for job, spec, says in [
        ("t3", sharing(ledger, 3), "GPU 0 is used by 2 others of its group"),
        ("stranger", sharing(ledger, 4, "sweep-2"), "GPU 0 is shared by job t1 on here"),
        ("whole", training(ledger), "GPU 0 is shared by job t1 on here"),
    ]:
        with pytest.raises(RemoteFailure, match=re.escape(says)) as caught:
            start(node, link, spec, job=job)
        assert caught.value.cause == BUSY
    text = refusal(start_as(node, link, "agent-2", sharing(ledger, 5)))
    assert text.startswith("GPU 0 is shared by job t1 of another agent"), "its group of the same name is another"
    node.call(link, "stop", job="t1", attempt=1)
    with pytest.raises(RemoteFailure, match="GPU 0 is shared by job t2"):
        start(node, link, training(ledger), job="whole")
    assert start(node, link, sharing(ledger, 3), job="t3")["run"]["status"] == "running"
    for job in ("t2", "t3"):
        node.call(link, "stop", job=job, attempt=1)
    assert start(node, link, training(ledger), job="whole")["run"]["status"] == "running"
    with pytest.raises(RemoteFailure, match="GPU 0 is used by job whole"):
        start(node, link, sharing(ledger, 6), job="t6")


@pytest.mark.proof
def test_a_shared_gpu_is_not_free_before_the_last_rank_of_a_killed_supervisor_is_dead(
    node: LocalNode, ledger: Ledger
) -> None:
    link = node.link()
    start(node, link, sharing(ledger, 1, "sweep-1", 2, "hostile", "plain"), job="t1")
    wait_until(lambda: ledger.lines("ready"), 20, "a rank that ignores SIGTERM")
    node.kill_supervisor("t1", 1)
    with pytest.raises(RemoteFailure, match="GPU 0 is shared by processes that are left of job t1"):
        start(node, link, training(ledger), job="whole")
    assert start(node, link, sharing(ledger, 2), job="t2")["run"]["status"] == "running", "the other seat"
    with pytest.raises(RemoteFailure, match="2 others of its group"):
        start(node, link, sharing(ledger, 3), job="t3")
    for pid in ledger.alive():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not ledger.alive(), 20, "the ranks to be dead")
    node.call(link, "stop", job="t2", attempt=1)
    assert start(node, link, training(ledger), job="whole")["run"]["status"] == "running"

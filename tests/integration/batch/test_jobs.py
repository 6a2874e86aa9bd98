"""Maps on jobs of a cluster: on unequal nodes, while processes, links and agents die, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.rig.sshd import SshdFarm, SshdNode
from tests.rig.waiting import wait_until
from ugro.client.client import Client
from ugro.features.batches.model import FunctionUnusable, ItemFailed, PoolBroken
from ugro.kernel.jobs.model import JobState
from ugro.kernel.support.errors import NotFound, Unsatisfiable, UsageError

pytest.importorskip("cloudpickle")

# A driver as a user writes it, with a module beside it.
DRIVER = """
import ugro
from helping import where
if __name__ == "__main__":
    with ugro.Client() as client, client.pool(nodes=2, workers=2, {options}) as pool:
        print("started", flush=True)
        for result in pool.map(where, [{seconds}] * {items}):
            print(result, flush=True)
"""
HELPING = """
import os, time
def where(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return os.environ["UGRO_NODE"]
"""


@pytest.fixture
def farm(farm_of: Farms, ugro: Ugro) -> SshdFarm:
    farm = farm_of(2)
    ugro.cluster = farm.cluster_yaml()
    return farm


@pytest.fixture
def client(farm: SshdFarm, ugro: Ugro, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """In an empty folder: it is what is sent as code."""
    monkeypatch.chdir(ugro.home / "cwd")
    with Client(home=ugro.home, cluster=ugro.cluster) as client:
        yield client


def noting(book: Path, seconds: float) -> Callable[[int], int]:
    """A function that takes its time, and writes down each item that it begins."""

    def work(number: int) -> int:
        with open(book, "a") as file:
            file.write(f"{number}\n")
        time.sleep(seconds)
        return -number

    return work


def begun(book: Path) -> Counter[str]:
    return Counter(book.read_text().split() if book.exists() else [])


def hosts(node: SshdNode) -> list[int]:
    """Of pools; their slots are below them."""
    return [pid for pid in node.processes() if b"from ugro.features.batches.host" in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def write_driver(ugro: Ugro, *, options: str = "", seconds: float = 0.2, items: int = 1000) -> list[str]:
    folder = ugro.home / "cwd"
    (folder / "helping.py").write_text(HELPING)
    (folder / "driver.py").write_text(DRIVER.format(options=options, seconds=seconds, items=items))
    return [sys.executable, "driver.py"]


def begin_driver(ugro: Ugro, **given: Any) -> subprocess.Popen[bytes]:
    """Under way: its first result is there."""
    running = subprocess.Popen(
        write_driver(ugro, **given),
        cwd=ugro.home / "cwd",
        env=ugro.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"started\n"
    assert running.stdout.readline() in (b"n001\n", b"n002\n")
    return running


def run_driver(ugro: Ugro, **given: Any) -> Counter[str]:
    """How many items each node did."""
    argv = write_driver(ugro, **given)
    env = ugro.environment()
    done = subprocess.run(argv, cwd=ugro.home / "cwd", env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("started\n")
    return Counter(done.stdout.split()[1:])


# --- what it does --------------------------------------------------------------------------------------------------


def test_a_map_on_two_nodes_with_a_module_of_the_user_and_a_shared_input(client: Client, farm: SshdFarm) -> None:
    (Path.cwd() / "of_mine.py").write_text("def scaled(number, table): return table[number % len(table)]\n")

    def work(number: int, table: list[int]) -> tuple[int, str]:
        from of_mine import scaled  # type: ignore[import-not-found]

        return scaled(number, table), os.environ["UGRO_NODE"]

    table, threads = list(range(100_000)), threading.active_count()
    with client.pool(nodes=2, workers=2) as pool:
        assert pool.start() == 2
        found = list(pool.map(work, range(2000), shared={"table": table}))
        assert [number for number, _ in found] == list(range(2000))
        assert {node for _, node in found} == {"n001", "n002"}
        with pytest.raises(ItemFailed, match="item 1: ZeroDivisionError"):
            list(pool.starmap(divmod, [(1, 1), (1, 0)]))
        jobs = client.jobs.newest()
        assert [(job.state, job.spec.resources.cpus) for job in jobs] == [(JobState.RUNNING, 1)] * 2
    assert [client.jobs.get(job.id).state for job in jobs] == [JobState.SUCCEEDED] * 2
    assert not [pid for node in farm.nodes for pid in hosts(node)]
    assert threading.active_count() == threads


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("cc") is None, reason="not installed: a C compiler")
def test_each_slot_has_a_device_of_its_own_also_after_one_was_lost(ugro: Ugro) -> None:
    assert ugro("lab", "up", "--nodes", "1", "--gpus", "2").returncode == 0

    def device(number: int) -> str:
        if number == 3:
            os._exit(1)
        time.sleep(0.05)
        return os.environ["CUDA_VISIBLE_DEVICES"]

    try:
        with Client(home=ugro.home) as client, client.pool(nodes=1, gpus_per_node=2, sync=False) as pool:
            found: list[Any] = list(pool.map(device, range(40), errors="return"))
            assert [number for number, one in enumerate(found) if isinstance(one, ItemFailed)] == [3]
            again = Counter(pool.map(device, range(10, 50)))
        assert set(again) == {"0", "1"}
    finally:
        assert ugro("lab", "down").returncode == 0


@pytest.mark.proof
def test_unequal_nodes_share_a_map_by_their_speed(ugro: Ugro) -> None:
    assert ugro("lab", "up", "--speeds", "1,0.25").returncode == 0
    try:
        shares = run_driver(ugro, seconds=0.02, items=400)
        fast, slow = sorted(shares.values(), reverse=True)
        assert fast + slow == 400
        assert fast > 1.5 * slow
    finally:
        assert ugro("lab", "down").returncode == 0


@pytest.mark.proof
def test_ugro_map_on_jobs_and_what_it_says_when_they_end_early(client: Client, ugro: Ugro) -> None:
    folder = Path.cwd()
    (folder / "score.py").write_text("import time\ndef score(seconds): time.sleep(seconds); return seconds\n")
    (folder / "items.jsonl").write_text("0.05\n" * 300)
    words = ["map", "score.py:score", "--input", "items.jsonl", "--output", "scores.jsonl", "--engine", "jobs"]
    broken = ugro(*words, "--workers", "2", "--job-option", "time-limit=3s", "--job-option", "name=scoring")
    assert broken.returncode == 1, broken.stderr
    assert "time limit" in broken.stderr
    assert "continue with the same command and --resume" in broken.stderr
    assert {job.spec.name for job in client.jobs.newest()} == {"scoring-1", "scoring-2"}
    done = ugro(*words, "--nodes", "2", "--resume")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(300))
    wrong = ugro("map", *words[1:6], "--output", "other.jsonl", "--nodes", "2")
    assert (wrong.returncode, "--nodes is for --engine jobs" in wrong.stderr) == (2, True)


# --- what dies -----------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_an_item_that_kills_its_process_fails_alone(client: Client) -> None:
    def work(number: int) -> int:
        if number == 33:
            os.kill(os.getpid(), signal.SIGSEGV)
        return number

    with client.pool(nodes=2, workers=2) as pool:
        found: list[Any] = list(pool.map(work, range(100), errors="return"))
    assert [one for one in found if not isinstance(one, ItemFailed)] == [n for n in range(100) if n != 33]
    assert isinstance(found[33], ItemFailed)
    assert "SIGSEGV" in str(found[33])


@pytest.mark.proof
def test_of_a_killed_host_others_do_the_work_and_its_job_is_started_again(
    client: Client, farm: SshdFarm, tmp_path: Path
) -> None:
    book = tmp_path / "book"
    with client.pool(nodes=2, workers=2) as pool:
        assert pool.start() == 2
        results = iter(pool.map(noting(book, 0.05), range(400)))
        found = [next(results) for _ in range(20)]
        [victim] = hosts(farm["n001"])
        os.kill(victim, signal.SIGKILL)
        found += results
        assert found == [-number for number in range(400)]
        assert sum(begun(book).values()) <= 400 + 2 * 3  # what the lost slot had
        # Its job was tried again, and takes part again.
        wait_until(lambda: attempts(client) == {"n001": 2, "n002": 1}, 60, "the second attempt")

        def node(number: int) -> str:
            time.sleep(0.01)
            return os.environ["UGRO_NODE"]

        wait_until(lambda: len(set(pool.map(node, range(100)))) == 2, 30, "both nodes to work again")


def attempts(client: Client) -> dict[str, int]:
    return {job.placement.nodes[0]: job.attempt for job in client.jobs.newest() if job.placement}


@pytest.mark.proof
@pytest.mark.parametrize("what", ["link", "agent"])
def test_a_cut_link_or_a_killed_agent_costs_no_item_and_runs_none_twice(
    client: Client, farm: SshdFarm, tmp_path: Path, what: str
) -> None:
    book = tmp_path / "book"
    with client.pool(nodes=2, workers=2) as pool:
        assert pool.start() == 2
        results = iter(pool.map(noting(book, 1.0), range(12)))
        found = [next(results)]
        if what == "link":
            for node in farm.nodes:
                node.kill_sessions()
        else:
            os.kill(client.agent().pid, signal.SIGKILL)
        found += results
    assert found == [-number for number in range(12)]
    assert begun(book) == {str(number): 1 for number in range(12)}


@pytest.mark.proof
def test_ctrl_c_ends_the_jobs_and_says_one_thing(ugro: Ugro, farm: SshdFarm) -> None:
    running = begin_driver(ugro)
    os.kill(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert running.returncode != 0
    assert b"KeyboardInterrupt" in errors
    assert b"During handling" not in errors
    assert not [pid for node in farm.nodes for pid in hosts(node)]
    with Client(home=ugro.home, any_cluster=True) as client:
        assert all(job.is_final for job in client.jobs.newest())


@pytest.mark.proof
def test_jobs_whose_driver_was_killed_end_by_themselves(ugro: Ugro, farm: SshdFarm) -> None:
    running = begin_driver(ugro, options="env={'UGRO_POOL_PATIENCE_S': '1'}")
    running.kill()
    running.communicate(timeout=30)
    wait_until(lambda: not [pid for node in farm.nodes for pid in hosts(node)], 30, "the hosts to end")
    with Client(home=ugro.home, any_cluster=True) as client:
        jobs = [client.jobs.wait(job.id, timeout_s=30) for job in client.jobs.newest()]
    assert [job.state for job in jobs] == [JobState.SUCCEEDED] * 2


@pytest.mark.proof
def test_a_node_that_stays_away_loses_its_batches_to_the_other(
    client: Client, farm: SshdFarm, tmp_path: Path
) -> None:
    book = tmp_path / "book"
    with client.pool(nodes=2, workers=2) as pool:
        assert pool.start() == 2
        results = iter(pool.map(noting(book, 0.5), range(60)))
        found = [next(results) for _ in range(4)]
        farm["n001"].freeze()
        try:
            found += results
        finally:
            farm["n001"].thaw()
    assert found == [-number for number in range(60)]


# --- what is wrong -------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_what_cannot_be_had_is_said_before_a_job_is_submitted(client: Client) -> None:
    with pytest.raises(Unsatisfiable, match="2 of 2 nodes can be used, and 3 are needed"):
        client.pool(nodes=3)
    with pytest.raises(NotFound, match="no node 'n009' in this cluster"):
        client.pool(nodes=["n009"])
    with pytest.raises(UsageError, match="unknown engine 'dask'"):
        client.pool(engine="dask")
    with pytest.raises(UsageError, match="the engine local has no option 'memory'"):
        client.pool(engine="local", memory="1GB")
    with pytest.raises(UsageError, match="a pool chooses 'command' itself"):
        client.pool(engine="jobs", command=["true"])
    assert client.jobs.newest() == []


@pytest.mark.proof
def test_jobs_that_end_early_break_the_pool_with_their_reason(client: Client) -> None:
    with (
        client.pool(nodes=1, workers=1, time_limit="3s") as pool,
        pytest.raises(PoolBroken, match="time limit"),
    ):
        list(pool.map(time.sleep, [0.2] * 100))


@pytest.mark.proof
def test_a_function_whose_module_is_not_there_is_one_clear_error(client: Client, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text("def work(number): return number\n")
    sys.path.insert(0, str(tmp_path))
    try:
        from elsewhere import work  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(tmp_path))
    with (
        client.pool(nodes=1, workers=1) as pool,
        pytest.raises(FunctionUnusable, match=r"cannot be loaded on n00.: ModuleNotFoundError"),
    ):
        list(pool.map(work, range(3)))

"""Three nodes whose ``remote_root`` is one folder, as home folders on a file server are: each keeps its own runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.waiting import wait_until

NODES = ("n001", "n002", "n003")
# Every rank writes a line, then waits for its file; so a test says when a rank ends.
HOLD = (
    "import os, pathlib, time\n"
    "here = pathlib.Path(os.environ['LEDGER'])\n"
    "with open(here / 'lines', 'a') as file:\n"
    "    file.write(' '.join(os.environ[key] for key in ('UGRO_JOB', 'UGRO_ATTEMPT', 'RANK', 'UGRO_NODE')) + '\\n')\n"
    "while not (here / 'go').exists():\n"
    "    time.sleep(0.02)\n"
    "print('rank', os.environ['RANK'], 'done', flush=True)\n"
)


class Shared:
    def __init__(self, ugro: Ugro, root: Path, ledger: Path) -> None:
        self.ugro = ugro
        self.root = root
        self.ledger = ledger

    def launch(self, *words: str) -> int:
        env = f"--env=LEDGER={self.ledger}"
        done = self.ugro("launch", "--json", "--detach", "--nodes", "3", env, *words, "hold.py")
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["job"]["id"])

    def job(self, job: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ugro("status", str(job), "--json").stdout)["job"]
        return found

    def started(self, job: int, attempt: int = 1) -> list[str]:
        path = self.ledger / "lines"
        lines = path.read_text().splitlines() if path.exists() else []
        return sorted(line for line in lines if line.startswith(f"{job} {attempt} "))

    def until_started(self, job: int, attempt: int = 1) -> None:
        wait_until(lambda: len(self.started(job, attempt)) == 3, 60, f"three ranks of job {job}")

    def go(self) -> None:
        (self.ledger / "go").touch()

    def end(self, job: int) -> str:
        self.ugro("wait", str(job), timeout=120)
        return str(self.job(job)["state"])


@pytest.fixture(scope="module")
def farm() -> Iterator[tuple[Ugro, Path]]:
    with ExitStack() as stack:
        farm = Farms(stack)(3)
        root = farm.directory / "home"
        file = farm.cluster_yaml(nodes={name: {"remote_root": str(root)} for name in NODES})
        ugro = stack.enter_context(commands(file))
        (ugro.home / "cwd" / "hold.py").write_text(HOLD)
        yield ugro, root


@pytest.fixture
def shared(farm: tuple[Ugro, Path], tmp_path: Path) -> Iterator[Shared]:
    ugro, root = farm
    yield Shared(ugro, root, tmp_path)
    ugro("cancel", "--all")


def expected(job: int, attempt: int, lines: list[str]) -> None:
    assert [line.split()[:3] for line in lines] == [[str(job), str(attempt), str(rank)] for rank in range(3)]
    assert sorted(line.split()[3] for line in lines) == sorted(NODES), "each node has a rank of its own"


def test_a_job_on_all_three_nodes_runs_and_its_logs_are_whole(shared: Shared) -> None:
    job = shared.launch()
    shared.until_started(job)
    runs = [path.parent.parent.name.split("@")[1] for path in shared.root.glob(f".ugro/agents/*/runs/{job}.1")]
    assert sorted(runs) == sorted(NODES), "a run directory belongs to job, attempt and node"
    shared.go()
    assert shared.end(job) == "succeeded"
    expected(job, 1, shared.started(job))
    logs = shared.ugro("logs", str(job)).stdout.splitlines()
    assert sorted(line.rpartition("| ")[2] for line in logs) == [f"rank {rank} done" for rank in range(3)]


@pytest.mark.proof
def test_an_agent_that_was_killed_finds_all_three_runs_again(shared: Shared) -> None:
    job = shared.launch()
    shared.until_started(job)
    agent = json.loads(shared.ugro("agent", "status", "--json").stdout)["agent"]
    os.kill(agent["pid"], signal.SIGKILL)
    assert shared.job(job)["attempt"] == 1
    shared.go()
    assert shared.end(job) == "succeeded"
    expected(job, 1, shared.started(job))
    assert shared.started(job, 2) == []


@pytest.mark.proof
def test_a_retry_starts_on_all_three_nodes_again(shared: Shared) -> None:
    job = shared.launch("--retries", "1")
    shared.until_started(job)
    environments = (path for path in Path("/proc").glob("[0-9]*/environ"))
    rank = b"RANK=1\0"
    mark = f"LEDGER={shared.ledger}\0".encode()

    def is_rank_1(path: Path) -> bool:
        try:
            text = path.read_bytes()
        except OSError:
            return False
        return mark in text and rank in text

    victims = [int(path.parent.name) for path in environments if is_rank_1(path)]
    assert victims
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    shared.until_started(job, 2)
    shared.go()
    assert shared.end(job) == "succeeded"
    expected(job, 2, shared.started(job, 2))


def test_cancel_ends_all_three_and_nothing_is_left_behind(shared: Shared) -> None:
    job = shared.launch()
    shared.until_started(job)
    assert shared.ugro("cancel", str(job)).returncode == 0
    assert shared.end(job) == "cancelled"
    wait_until(lambda: not list(shared.root.glob(f".ugro/agents/*/runs/{job}.*")), 30, "run directories to go")


def test_code_is_stored_once_and_gc_of_one_node_does_no_harm(shared: Shared) -> None:
    first = shared.launch()
    shared.until_started(first)
    assert shared.ugro("node", "gc", NODES[0]).returncode == 0
    shared.go()
    assert shared.end(first) == "succeeded"
    second = shared.launch()
    assert shared.end(second) == "succeeded"
    assert len(list(shared.root.glob(".ugro/contents"))) == 1


def test_doctor_names_the_nodes_that_share_a_folder(shared: Shared) -> None:
    done = shared.ugro("doctor", "--json", timeout=120)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    findings = [one for document in found for one in document.get("findings", [document])]
    [finding] = [one for one in findings if one.get("check") == "shared folder"]
    assert all(name in finding["text"] for name in NODES)
    assert "lead to the same machine" in finding["text"], "here they do"

"""One machine under two node names, or in the clusters of two agents: it is one node, and a GPU of it has one job.

The jobs hold a lock as a GPU would be held, and write down a clash.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig import agent as rig
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import is_alive, parent_of, processes_with, signal_all, wait_until
from ugro import Client
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus
from ugro.node.machine import machine_id

# argv: a name. It runs until its file is there, and has a child that ignores SIGTERM and outlives it, as workers do.
HOLD = """
exec 9>>"$LEDGER/gpu"
flock -n 9 || echo "clash $1" >>"$LEDGER/lines"
echo "begin $1" >>"$LEDGER/lines"
(trap "" TERM HUP; until [ -e "$LEDGER/$1.go" ]; do sleep 0.05; done) &
wait
echo "end $1" >>"$LEDGER/lines"
"""
USED = r"GPU 0 of n001 is used by job \d+ of another agent \(user \w+, since \d\d:\d\d UTC\)"


class Book:
    """What the jobs write of themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self) -> list[str]:
        path = self.folder / "lines"
        return path.read_text().splitlines() if path.exists() else []

    def wait(self, line: str) -> None:
        wait_until(lambda: line in self.lines(), 60, f"{line!r} in {self.lines()}")

    def go(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()


class User:
    """The command line of one of the people who use the machine."""

    def __init__(self, ugro: Ugro, book: Book) -> None:
        self.ugro = ugro
        self.book = book

    def submit(self, name: str) -> int:
        words = ("--gpus-per-node", "1", "--no-sync", f"--env=LEDGER={self.book.folder}", "--name", name)
        done = self.ugro("run", "--json", *words, "--stop-grace", "1s", "--", "sh", "-c", HOLD, "sh", name)
        assert done.returncode == 0, done.stderr
        return int(self._document(done.stdout)["job"]["id"])

    def job(self, job: int) -> dict[str, Any]:
        return dict(self._document(self.ugro("status", str(job), "--json").stdout)["job"])

    def why(self, job: int) -> str:
        return self.ugro("why", str(job)).stdout

    def nodes(self) -> dict[str, dict[str, Any]]:
        found = self._document(self.ugro("health", "--json").stdout)["nodes"]
        return {one["name"]: one for one in found}

    def until(self, job: int, state: str) -> dict[str, Any]:
        wait_until(lambda: self.job(job)["state"] == state, 60, f"job {job} to be {state}: {self.job(job)}")
        return self.job(job)

    def _document(self, text: str) -> dict[str, Any]:
        return dict(json.loads(text))


@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    with ExitStack() as stack:
        yield Farms(stack)(1)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables by which the machine has one GPU."""
    if shutil.which("cc") is None:
        pytest.skip("not installed: a C compiler")
    folder = tmp_path_factory.mktemp("gpu")
    write_gpus(folder / "gpus", [SimulatedGpu()])
    return {"UGRO_NVML_LIBRARY": str(build_nvml_stub(folder)), "UGRO_PRETEND_GPUS": str(folder / "gpus")}


@pytest.fixture
def people(farm: SshdFarm, gpu: dict[str, str], tmp_path: Path) -> Iterator[tuple[User, User, Book]]:
    """Two people with an agent each, and the machine in both clusters."""
    file = farm.cluster_yaml(nodes={"n001": {"env": gpu}})
    with _agents(file, file, Book(tmp_path)) as people:
        yield people


@pytest.fixture
def accounts() -> Iterator[tuple[User, User, Book]]:
    """The same, and each has an account of their own on the machine, with a home that the other cannot look into."""
    if os.geteuid() != 0 or shutil.which("cc") is None:
        pytest.skip("two accounts need root, and simulated GPUs a C compiler")
    # Not pytest's folder, into which other users cannot look.
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        folder.chmod(0o755)
        write_gpus(folder / "gpus", [SimulatedGpu()])
        gpu = {"UGRO_NVML_LIBRARY": str(build_nvml_stub(folder)), "UGRO_PRETEND_GPUS": str(folder / "gpus")}
        (folder / "book").mkdir()
        (folder / "book").chmod(0o777)
        anns, bobs = (_cluster_of(folder / f"home{uid}", uid, gpu) for uid in (41_001, 41_002))
        with _agents(anns, bobs, Book(folder / "book")) as people:
            yield people


def _cluster_of(home: Path, uid: int, gpu: dict[str, str]) -> Path:
    home.mkdir(mode=0o700)
    os.chown(home, uid, uid)
    as_user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "env", f"HOME={home}"]
    # umask: both write into one book.
    entry = {"transport": [*as_user, "sh", "-c", 'umask 0; exec "$@"', "sh"], "python": "/usr/bin/python3", "env": gpu}
    file = home.with_suffix(".yaml")
    file.write_text(json.dumps({"nodes": {"n001": {**entry, "remote_root": str(home / "grid_workspace")}}}))
    return file


@contextmanager
def _agents(anns: Path, bobs: Path, book: Book) -> Iterator[tuple[User, User, Book]]:
    with commands(anns) as ann, commands(bobs) as bob:
        yield User(ann, book), User(bob, book), book
        for ugro in (ann, bob):
            ugro("cancel", "--all")
            for job in json.loads(ugro("status", "--json").stdout)["jobs"]:
                ugro("wait", str(job["id"]))
    assert [line for line in book.lines() if line.startswith("clash")] == []


def test_two_names_for_a_machine_are_one_node_with_one_job_at_a_time(
    farm: SshdFarm, gpu: dict[str, str], tmp_path: Path
) -> None:
    entry = {"remote_root": str(farm["n001"].home / "grid_workspace"), "env": gpu}
    nodes = {"n001": entry, "n001-lan": {"host": "n001", **entry}}
    file = tmp_path / "two.yaml"
    file.write_text(json.dumps({"ssh": {"config_file": str(farm.ssh_config)}, "nodes": nodes}))
    book = Book(tmp_path)
    with commands(file) as ugro:
        ann = User(ugro, book)
        wait_until(lambda: ann.nodes()["n001-lan"]["same_as"] == "n001", 30, "the second name to be known")
        first, second = ann.submit("first"), ann.submit("second")
        book.wait("begin first")
        reason = ann.why(second)
        assert "waits for job" in reason, reason
        assert "n001-lan is the same machine as n001" in reason, reason
        _expect_one_finding(ugro)
        book.go("first")
        book.wait("begin second")
        assert [ann.job(job)["nodes"][0]["name"] for job in (first, second)] == ["n001", "n001"]
        book.go("second")
        assert ann.until(second, "succeeded")["attempt"] == 1
    assert book.lines() == ["begin first", "end first", "begin second", "end second"]


def _expect_one_finding(ugro: Ugro) -> None:
    health = ugro("health")
    assert health.returncode == 0, health.stdout
    assert "1 healthy · 1 not used" in health.stderr
    assert "n001-lan: the same machine as n001: not used; remove the name: ugro node rm n001-lan" in health.stderr
    findings = json.loads(ugro("doctor", "--json", timeout=120).stdout)["findings"]
    [finding] = [one for one in findings if one["check"] == "same machine"]
    assert (finding["subject"], finding["text"]) == ("n001-lan", "the same machine as n001: not used")
    assert not any("→" in one["subject"] for one in findings), "it is not connected to itself"
    assert "the same machine as n001: not used" in ugro("node", "ls").stdout


def test_the_job_of_another_agent_waits_with_the_reason_and_starts_when_the_gpu_is_free(
    people: tuple[User, User, Book],
) -> None:
    _expect_one_after_the_other(*people)


@pytest.mark.proof
def test_an_agent_with_another_account_waits_for_the_gpu_too(accounts: tuple[User, User, Book]) -> None:
    ann, bob, book = accounts

    def check_process() -> None:
        [job] = [one["id"] for one in json.loads(ann.ugro("status", "--json").stdout)["jobs"]]
        rank = min(processes_with(f"LEDGER={book.folder}".encode()))
        write_gpus(book.folder.parent / "gpus", [SimulatedGpu(processes=((rank, 5),))])
        wait_until(lambda: bob.nodes()["n001"]["facts"]["gpus"][0]["processes"], 30, "the process to be reported")
        [found] = bob.nodes()["n001"]["facts"]["gpus"][0]["processes"]
        assert (found["pid"], found["is_ours"], found["job"]) == (rank, True, str(job))
        write_gpus(book.folder.parent / "gpus", [SimulatedGpu()])

    _expect_one_after_the_other(ann, bob, book, check_process)


def _expect_one_after_the_other(
    ann: User, bob: User, book: Book, while_held: Callable[[], None] = lambda: None
) -> None:
    ann.submit("anns")
    book.wait("begin anns")
    wait_until(lambda: bob.nodes()["n001"]["facts"]["gpus"][0]["holder"], 30, "bob's agent to see the holder")
    while_held()
    waiting = bob.submit("bobs")
    reason = wait_until(lambda: re.search(USED, bob.why(waiting)), 30, bob.why(waiting))
    assert reason is not None
    dry_run = bob.ugro("run", "--gpus-per-node", "1", "--no-sync", "--dry-run", "--", "true").stdout
    assert re.search(USED, dry_run), dry_run
    assert "GPU 0 is used by job" in bob.ugro("health").stdout
    assert ann.nodes()["n001"]["facts"]["gpus"][0]["holder"] is None, "her own job is no stranger"
    assert bob.job(waiting)["attempt"] == 0, "it does not even try"
    book.go("anns")
    book.wait("begin bobs")
    book.go("bobs")
    bob.until(waiting, "succeeded")


@pytest.mark.proof
def test_a_start_that_comes_too_late_costs_no_retry(
    farm: SshdFarm, gpu: dict[str, str], people: tuple[User, User, Book]
) -> None:
    """Its agent believes that the GPU is free: whoever has it has not written its name down yet."""
    ann, _, book = people
    uuid = Path(gpu["UGRO_PRETEND_GPUS"]).read_text().partition("|")[0]
    folder = farm["n001"].home / ".local/state/ugro" / f"gpus@{machine_id()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / uuid).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        late = ann.submit("anns")
        wait_until(lambda: ann.job(late)["attempt"] >= 2, 60, f"a second attempt: {ann.job(late)}")
        assert "GPU 0 is used by another run that is starting" in ann.ugro("events", str(late)).stdout
        assert book.lines() == []
    book.wait("begin anns")
    book.go("anns")
    ann.until(late, "succeeded")
    with Client(home=ann.ugro.home, cluster=ann.ugro.cluster) as client:
        tries = client.jobs.get(late).tries
        assert (tries.charged, tries.free, tries.avoid) == (0, 0, ())


@pytest.mark.proof
def test_the_gpu_stays_with_the_job_of_an_agent_that_was_killed(people: tuple[User, User, Book]) -> None:
    ann, bob, book = people
    ann.submit("anns")
    book.wait("begin anns")
    rig.end_agent(ann.ugro.home)
    waiting = bob.submit("bobs")
    wait_until(lambda: re.search(USED, bob.why(waiting)), 30, bob.why(waiting))
    book.go("anns")
    book.wait("begin bobs")
    assert book.lines() == ["begin anns", "end anns", "begin bobs"]
    book.go("bobs")
    bob.until(waiting, "succeeded")


@pytest.mark.proof
def test_after_a_killed_supervisor_the_next_job_starts_when_the_rank_is_dead(
    people: tuple[User, User, Book],
) -> None:
    ann, bob, book = people
    ann.submit("anns")
    book.wait("begin anns")
    rig.end_agent(ann.ugro.home)  # it would end what its job left
    ranks = set(processes_with(f"LEDGER={book.folder}".encode()))
    [supervisor] = {parent_of(pid) for pid in ranks if is_alive(pid)} - ranks
    doomed = [parent_of(supervisor), supervisor]  # also its reaper, which would end the rank
    signal_all(signal.SIGSTOP, doomed)  # at one instant: each would see the other go
    signal_all(signal.SIGKILL, doomed)
    waiting = bob.submit("bobs")
    left = r"GPU 0 of n001 is used by processes that are left of job \d+ of another agent"
    wait_until(lambda: re.search(left, bob.why(waiting)), 30, bob.why(waiting))
    assert "begin bobs" not in book.lines()
    signal_all(signal.SIGKILL, ranks)
    book.wait("begin bobs")
    book.go("bobs")
    bob.until(waiting, "succeeded")

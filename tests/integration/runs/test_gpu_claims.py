"""Accounts of one machine see each other's claims on its GPUs, and nothing that others say makes a GPU two runs'."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.rig.gpu_taker import Taker, takers
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus
from ugro.node.hardware import gpu_claims
from ugro.node.hardware.gpu_claims import Claims, ClaimTable, SharedClaims, Taken
from ugro.node.hardware.gpu_locks import Sharing
from ugro.node.hardware.gpus import run_of

GPU = "GPU-11111111-2222-3333-4444-555555555555"
OTHER_GPU = "GPU-99999999-2222-3333-4444-555555555555"
AGENT = "f" * 32
RECORD = {"agent": AGENT, "node": "ann@gpu1", "job": "7", "attempt": 2, "since": 1_700_000_000.5}
SHARE = Sharing("sweep-1", 2)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="processes of other accounts need root")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="not installed: a C compiler")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """None but this test has its GPUs."""
    path = str(tmp_path / "no-library")
    monkeypatch.setenv("UGRO_NVML_LIBRARY", path)
    return path


@pytest.fixture
def uids() -> tuple[int, int]:
    """Two accounts; where that needs root, one account with two homes, which share no lock files either."""
    number = 50_000 + os.getpid() % 5_000 * 2
    return (number, number + 1) if os.geteuid() == 0 else (os.geteuid(), os.geteuid())


@pytest.fixture
def people(driver: str, uids: tuple[int, int]) -> Iterator[tuple[Taker, Taker]]:
    with takers(driver, *uids) as (ann, bob):
        yield ann, bob


def world() -> str:
    """As the names of this test's driver begin."""
    return gpu_claims.gpu_name("").split("/")[1]


def looked() -> ClaimTable:
    claims = ClaimTable()
    claims.look()
    return claims


@contextmanager
def bound(*names: bytes, kind: socket.SocketKind = socket.SOCK_STREAM, listens: bool = True) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            one = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            one.bind(b"\0" + name)
            if listens:
                one.listen()
        yield


# --- accounts -------------------------------------------------------------------------------------------------------


def test_a_gpu_that_one_account_has_is_refused_to_another_with_the_reason(people: tuple[Taker, Taker]) -> None:
    ann, bob = people
    assert ann.take(GPU, "12") is None
    text = bob.take(GPU)
    assert text is not None
    assert re.fullmatch(r"GPU 0 is used by job 12 of another agent \(user \w+, since \d\d:\d\d UTC\)", text)
    assert bob.take(OTHER_GPU) is None, "it claims one and not the other"
    ann.ask("release")
    assert bob.take(GPU) is None


@needs_root
def test_who_has_a_gpu_is_what_the_kernel_says(people: tuple[Taker, Taker]) -> None:
    ann, bob = people
    ann.take(GPU, "12")
    holder = bob.ask("holder", GPU)
    assert holder.pop("since") > 1_600_000_000
    expected = {"agent": ann.agent, "node": "gpu1", "job": "12", "attempt": 1, "user": str(ann.uid)}
    assert holder == {**expected, "is_leftover": False}
    assert bob.ask("holder", OTHER_GPU) is None
    assert ann.ask("holder", GPU)["user"] == "u", "in one's own account the lock file knows more"


def test_the_own_agent_in_another_account_is_called_by_its_node(people: tuple[Taker, Taker]) -> None:
    ann, bob = people
    bob.agent = ann.agent
    ann.take(GPU, "12")
    assert (bob.take(GPU) or "").startswith("GPU 0 is used by job 12 on gpu1 (user ")


def test_a_holder_that_is_killed_leaves_its_gpu_free(people: tuple[Taker, Taker]) -> None:
    ann, bob = people
    ann.take(GPU)
    assert bob.take(GPU) is not None
    os.kill(ann.pid, signal.SIGKILL)
    ann.process.wait()
    assert bob.ask("holder", GPU) is None
    assert bob.take(GPU) is None


def test_a_claim_is_kept_until_it_is_taken_out_or_all_that_have_it_are_gone(driver: str) -> None:
    shared, name = SharedClaims(), gpu_claims.gpu_name(GPU)
    shared.empty()  # there is nothing yet

    def claim(end: bool) -> None:
        """In a process that then ends."""
        if (pid := os.fork()) == 0:
            said = Claims(shared)
            said.publish(RECORD)
            said.keep(gpu_claims.held(GPU))
            said.hand_over()
            if end:
                said.release()
            os._exit(0)
        os.waitpid(pid, 0)

    claim(end=False)
    assert gpu_claims.listener(name) is not None
    assert (looked().holder(GPU) or {}).get("job") == "7", "it is still said whose it is"
    assert shared.has_any()
    shared.empty()
    assert gpu_claims.listener(name) is None
    claim(end=True)
    assert (shared.has_any(), gpu_claims.listener(name)) == (False, None)
    claim(end=False)
    shared._into.close()
    assert gpu_claims.listener(name) is not None
    shared._queue.close()
    assert gpu_claims.listener(name) is None


def test_accounts_do_not_share_a_gpu(people: tuple[Taker, Taker], driver: str, uids: tuple[int, int]) -> None:
    ann, bob = people
    assert ann.take(GPU, "12", SHARE) is None
    for share in (None, SHARE):
        assert (bob.take(GPU, "13", share) or "").startswith("GPU 0 is shared by job 12 of another agent (user ")
    assert bob.ask("holder", GPU)["job"] == "12"
    ann.ask("release")
    assert bob.take(GPU, "13", SHARE) is None
    assert (ann.take(GPU) or "").startswith("GPU 0 is shared by job 13")
    bob.ask("release")
    assert ann.take(GPU) is None
    assert (bob.take(GPU, "13", SHARE) or "").startswith("GPU 0 is used by job 7 of another agent")


def test_runs_of_one_account_share_a_gpu_as_before(people: tuple[Taker, Taker], driver: str) -> None:
    ann, bob = people
    second, third = (Taker(ann.home, ann.uid, driver) for _ in range(2))
    second.agent = third.agent = ann.agent
    try:
        assert [one.take(GPU, "12", SHARE) for one in (ann, second)] == [None, None]
        assert third.take(GPU, "14", SHARE) == "GPU 0 is used by 2 others of its group"
        ann.ask("release")
        assert (bob.take(GPU) or "").startswith("GPU 0 is shared by job 12"), "the other seat"
        assert third.take(GPU, "14", SHARE) is None, "the first seat is free again"
    finally:
        second.end()
        third.end()


@pytest.mark.proof
@pytest.mark.parametrize("share", [None, SHARE])
def test_of_many_who_come_at_once_one_account_gets_the_gpu(
    driver: str, uids: tuple[int, int], share: Sharing | None
) -> None:
    with takers(driver, *uids * 2) as everybody:
        for one in everybody:
            one.ask("holder", GPU)  # it is there
        for _ in range(5):
            for number, one in enumerate(everybody):
                one.begin_to_take(GPU, "7", share if number % 2 else None)
            got = [one.hear() for one in everybody].count(None)
            assert got == 1, "each has a home of its own, so none shares"
            for one in everybody:
                one.ask("release")


# --- what others say --------------------------------------------------------------------------------------------------


def test_names_that_make_no_claim_are_ignored(driver: str) -> None:
    own = world().encode()
    garbage = (
        b"ugro-gpu/%s/" % own,
        b"ugro-run/%s/" % own,
        b"ugro-run/%s/%s/7/1/99999999999999999/1/gpu1" % (own, b"a" * 32),
        b"ugro-run/%s/\xff\xfe\0\0/7" % own,
        b"ugro-run/%s/" % own + b"/" * 80,
        b"ugro-gpu/%s/%s/16" % (own, GPU.encode()),  # there is no such seat
        b"\n" * 107,
    )
    with bound(*garbage), bound(b"ugro-gpu/%s/%s" % (own, GPU.encode()), kind=socket.SOCK_DGRAM, listens=False):
        claims = looked()
        assert claims.holder(GPU) is None
        assert claims.run_above(os.getpid()) is None
        claim = gpu_claims.held(GPU)
        assert claim is not None
        os.close(claim)


def test_a_line_that_somebody_forged_is_no_claim(driver: str) -> None:
    short = "G"  # so that all of it fits into a name
    forged = f"x\n0: 2 0 00010000 0001 01 4711 @{gpu_claims.gpu_name(short)}\n"
    assert len(forged) <= 107
    with bound(forged.encode()):
        assert any(name.endswith(b"/G") for _, name in gpu_claims.listed()), "it looks like one"
        assert looked().holder(short) is None


def test_what_somebody_says_without_a_claim_takes_no_gpu(people: tuple[Taker, Taker], driver: str) -> None:
    said = Claims()
    said.publish(RECORD)
    try:
        assert looked().holder(GPU) is None
        assert people[0].take(GPU) is None
    finally:
        said.release()


@pytest.mark.parametrize(("listens", "words"), [(True, "user "), (False, "another account")])
def test_a_claim_that_nothing_is_said_about_holds_a_gpu_all_the_same(
    people: tuple[Taker, Taker], listens: bool, words: str
) -> None:
    with bound(gpu_claims.gpu_name(GPU).encode(), listens=listens):
        assert (people[0].take(GPU) or "").startswith(f"GPU 0 is used by a process of {words}")
    assert people[0].take(GPU) is None


def test_gpus_of_different_simulated_drivers_are_not_the_same(
    people: tuple[Taker, Taker], tmp_path: Path, uids: tuple[int, int]
) -> None:
    people[0].take(GPU)
    with takers(str(tmp_path / "another"), uids[1]) as [apart]:
        assert apart.ask("holder", GPU) is None
        assert apart.take(GPU) is None


def test_all_but_the_account_comes_back_and_a_long_name_of_a_node_is_cut(driver: str) -> None:
    said, claim = Claims(), gpu_claims.held(GPU)
    said.keep(claim)
    try:
        said.publish(RECORD)
        found = looked().holder(GPU) or {}
        assert found.items() >= {**RECORD, "node": "gpu1", "since": 1_700_000_000.0}.items()
        said.release()
        said.keep(gpu_claims.held(GPU))
        said.publish({**RECORD, "node": "ann@" + "gpu1." * 30})
        cut = looked().holder(GPU) or {}
        assert cut["node"].startswith("gpu1.")
        assert {**cut, "node": "gpu1"} == found
    finally:
        said.release()


def test_a_claim_answers_however_many_have_asked(driver: str) -> None:
    said = Claims()
    said.keep(gpu_claims.held(GPU))
    name = gpu_claims.gpu_name(GPU)
    try:
        asked = next((number for number in range(10_000) if gpu_claims.listener(name) is None), None)
        assert asked, "there is room for some"
        with pytest.raises(Taken):
            gpu_claims.held(GPU)
        said.hear()
        assert gpu_claims.listener(name) == (os.getpid(), os.geteuid())
    finally:
        said.release()


def test_who_looks_often_asks_once(driver: str) -> None:
    said, claims = Claims(), ClaimTable()
    said.keep(gpu_claims.held(GPU))
    name = gpu_claims.gpu_name(GPU)
    try:
        for _ in range(3):
            claims.look()
        waiting = [line for line in Path("/proc/net/unix").read_text(errors="replace").splitlines() if name in line]
        assert len(waiting) == 2, "the one that listens, and a connection"
        said.release()
        claims.look()
        assert claims.holder(GPU) is None
    finally:
        said.release()


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of the GPUs of a machine with a simulated driver, that every account can read."""
    with ExitStack() as stack:
        folder = Path(f"/tmp/ugro-test-{os.getpid()}-{tmp_path.name}")
        folder.mkdir(mode=0o755)
        stack.callback(shutil.rmtree, folder)
        monkeypatch.setenv("UGRO_NVML_LIBRARY", str(build_nvml_stub(folder)))
        monkeypatch.setenv("UGRO_PRETEND_GPUS", str(folder / "gpus"))
        (folder / "libnvidia-ml.so.1").chmod(0o755)
        yield folder / "gpus"


@needs_root
@needs_compiler
def test_a_process_of_a_job_in_another_account_is_no_stranger(gpus: Path, uids: tuple[int, int]) -> None:
    with takers(os.environ["UGRO_NVML_LIBRARY"], *uids) as (ann, bob):
        job = ann.ask("child")
        stranger = subprocess.Popen(["sleep", "600"], user=uids[0], env={})
        try:
            write_gpus(gpus, [SimulatedGpu(uuid=GPU, processes=((job, 5),))])
            assert [(one["is_ours"], one["job"]) for one in bob.ask("processes")] == [(False, None)]
            assert bob.ask("users") == f"sleep (pid {job}) uses GPU 0"
            ann.take(GPU, "12")
            assert [(one["is_ours"], one["job"]) for one in bob.ask("processes")] == [(True, "12")]
            assert bob.ask("users") is None
            write_gpus(gpus, [SimulatedGpu(uuid=GPU, processes=((job, 5), (stranger.pid, 5)))])
            assert bob.ask("users") == f"sleep (pid {stranger.pid}) uses GPU 0", "of the same account, and of no job"
        finally:
            stranger.kill()
            stranger.wait()
            os.kill(job, signal.SIGKILL)


def test_a_claim_names_the_node_and_not_its_long_account(driver: str) -> None:
    claims, node = Claims(), "gpu-03.hpc.physics.uni.edu"
    claims.publish({**RECORD, "node": f"a-long.first-and-last-name@{node}", "job": "123456", "since": 1_700_000_000})
    claims.keep(gpu_claims.held(GPU))
    try:
        holder = looked().holder(GPU)
    finally:
        claims.release()
    assert holder is not None
    assert (holder["agent"], holder["node"], holder["job"]) == (AGENT, node, "123456")


def test_a_process_that_may_not_be_looked_at_belongs_to_who_has_claimed_its_gpu(driver: str) -> None:
    claims, nobody = Claims(), 2**22 + 1  # no process has such a number, so nothing can be read of it
    claims.publish(RECORD)
    claims.keep(gpu_claims.held(GPU))
    try:
        table = looked()
        assert (run_of(nobody, GPU, table) or {}).get("job") == "7"
        assert run_of(nobody, OTHER_GPU, table) is None
        assert run_of(os.getppid(), GPU, table) is None, "it can be seen that it is somebody else's"
    finally:
        claims.release()


# In a PID namespace of its own, where it is known who gets the next pid. One of ann's begins to listen, hands that over
# and ends; then one of bob's gets its pid.
REUSED = """
import hashlib, os, time  # another account might not be able to load modules
from ugro.node.hardware import gpu_claims

def forked(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid

def listen():
    os.setuid(41001)
    claims = gpu_claims.Claims()
    claims.publish({"agent": "a", "node": "n", "job": "7", "attempt": 1, "since": 1})
    claims.keep(gpu_claims.held("GPU-1"))
    forked(lambda: time.sleep(600))
    os.write(ready[1], b"+")
    os.read(end[0], 1)

def look(pid):
    claims = gpu_claims.ClaimTable()
    claims.look()
    return (claims.holder("GPU-1") or {}).get("job"), claims.run_above(pid) is not None

ready, end = os.pipe(), os.pipe()
first = forked(listen)
os.read(ready[0], 1)
print(*look(first))
os.write(end[1], b"+")
os.waitpid(first, 0)
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(first - 1))
second = forked(lambda: (os.setuid(41002), os.write(ready[1], b"+"), time.sleep(600)))
os.read(ready[0], 1)
print(second == first, *look(second))
"""


@needs_root
@pytest.mark.skipif(not os.path.exists("/proc/sys/kernel/ns_last_pid"), reason="this kernel lets nobody choose a pid")
def test_a_claim_covers_no_process_that_has_the_pid_of_who_made_it(driver: str) -> None:
    argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", REUSED]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("7 True\nTrue 7 False\n", "")

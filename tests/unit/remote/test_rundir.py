"""The run directory's files and guards, with real processes where a guard is about processes."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rig.waiting import wait_until
from ugro.features.environments.node import making
from ugro.features.environments.node import tidy as deleting
from ugro.node import durable
from ugro.node import machine as survival
from ugro.node.clock import age_s, boot_id, clock_s, moment
from ugro.node.durable import Numbers
from ugro.node.machine import user_name
from ugro.node.program import Refused
from ugro.node.runs import daemonize, ports, rundir, stop
from ugro.node.runs import daemonize as proc_title
from ugro.node.runs import logs as capped_log
from ugro.node.runs.fence import Fence
from ugro.node.runs.rundir import EXIT_BYTES, POINTS, AgentDir, RunDir, new_envelope
from ugro.node.runs.runspec import RunSpec

SPEC = {"ranks": [{"rank": 0, "argv": ["true"]}]}
SOURCES = Path(rundir.__file__).parents[1]


def refused(work: Callable[[], Any]) -> str:
    with pytest.raises(Refused) as refusal:
        work()
    return refusal.value.kind


# --- small files ------------------------------------------------------------------------------------------------


def test_numbers_are_read_as_they_were_written_and_zero_before(tmp_path: Path) -> None:
    numbers = Numbers(str(tmp_path / "n"), 2)
    assert numbers.read() == [0, 0]
    (tmp_path / "n").touch()
    assert numbers.read() == [0, 0]
    numbers.write(3, 2**127)
    assert numbers.read() == [3, 2**127]


def test_damaged_numbers_are_an_error_and_not_zero(tmp_path: Path) -> None:
    numbers = Numbers(str(tmp_path / "n"), 1)
    numbers.write(7)
    content = (tmp_path / "n").read_bytes()
    (tmp_path / "n").write_bytes(content.replace(b"7", b"1", 1))
    with pytest.raises(OSError, match="damaged"):
        numbers.read()


def test_numbers_keep_their_place_on_the_disk_when_they_change(tmp_path: Path) -> None:
    numbers = Numbers(str(tmp_path / "n"), 1)
    numbers.write(1)
    before = (tmp_path / "n").stat()
    numbers.write(10**30)
    after = (tmp_path / "n").stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)


def test_a_file_that_could_not_be_written_leaves_the_old_one_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    durable.write_json(str(path), {"a": 1})
    with pytest.raises(OSError, match="too large"):
        _with_file_size_limit(lambda: durable.write_json(str(path), {"a": "b" * 100_000}))
    assert durable.read_json(str(path)) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("content", ["", "{", "[1]", "\0" * 100])
def test_what_is_no_json_object_counts_as_not_written(tmp_path: Path, content: str) -> None:
    (tmp_path / "x").write_text(content)
    assert durable.read_json(str(tmp_path / "x")) is None


# --- agents and fences ------------------------------------------------------------------------------------------


def test_an_older_generation_of_an_agent_is_refused_for_good(tmp_path: Path) -> None:
    AgentDir(str(tmp_path), "a1", "n1@m1").admit(3)
    AgentDir(str(tmp_path), "a1", "n1@m1").admit(3)
    assert refused(lambda: AgentDir(str(tmp_path), "a1", "n1@m1").admit(2)) == "fenced-agent"
    AgentDir(str(tmp_path), "another", "n1@m1").admit(1)


def test_only_the_owner_may_look_into_an_agents_folder(agent: AgentDir, run: RunDir) -> None:
    for path in (agent.path, agent.runs_path, run.path, run.file("output")):
        assert os.stat(path).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "a" * 101, "ü"])
def test_names_that_are_no_names_are_refused(agent: AgentDir, name: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        AgentDir(agent.root, name, "n1@m1")
    with pytest.raises(ValueError, match="no name"):
        agent.run(name, 1)


def test_an_older_attempt_is_refused_and_the_same_is_not(agent: AgentDir) -> None:
    enter(agent.fence("train"), 2)
    enter(agent.fence("train"), 2)
    assert refused(lambda: enter(agent.fence("train"), 1)) == "fenced"
    enter(agent.fence("other"), 1)


def test_a_closed_attempt_never_starts_again_and_the_next_does(agent: AgentDir) -> None:
    fence = agent.fence("train")
    enter(fence, 2)
    close(fence, 2)
    assert refused(lambda: enter(fence, 2)) == "fenced"
    enter(fence, 3)
    close(fence, 1)
    enter(fence, 3)


def test_who_holds_a_fence_too_long_is_not_waited_for(agent: AgentDir) -> None:
    with agent.fence("train").held():
        assert refused(lambda: agent.fence("train").held(0.05).__enter__()) == "busy"


# --- a run ------------------------------------------------------------------------------------------------------


def test_another_spec_for_the_same_run_is_refused(run: RunDir) -> None:
    run.make(new_envelope(dict(reversed(SPEC.items())), None, False))
    assert refused(lambda: run.make(new_envelope({**SPEC, "cwd": "/"}, None, False))) == "conflict"


def test_of_many_processes_one_gets_the_claim(run: RunDir) -> None:
    pids = [_fork(lambda: os._exit(0 if run.claim() else 1)) for _ in range(16)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert sorted(codes) == [0] + [1] * 15


def test_the_lock_is_held_by_the_living_also_when_stopped_and_freed_by_death(run: RunDir) -> None:
    assert not run.is_alive()

    def hold() -> None:
        run.take_lock(1)
        signal.pause()

    pid = _fork(hold)
    try:
        wait_until(run.is_alive)
        os.kill(pid, signal.SIGSTOP)
        assert run.is_alive()
        assert run.take_lock(timeout_s=0) is None
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not run.is_alive()


def test_many_who_look_do_not_keep_each_other_from_seeing(run: RunDir) -> None:
    fd = os.open(run.file("lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert not run.is_alive()
    os.close(fd)


def test_the_status_follows_from_the_files_alone(run: RunDir) -> None:
    def status() -> str:
        return str(run.status()["status"])

    assert status() == "dead"
    lock = run.take_lock(1)
    assert lock is not None
    assert status() == "starting"
    run.write_state({"pid": 1})
    assert status() == "running"
    os.close(lock)
    assert status() == "dead"
    run.write_exit({"outcome": "succeeded"})
    assert status() == "exited"
    assert [found.name for found in run.agent.runs()] == ["train.1"]


def test_the_space_for_the_last_word_is_taken_beforehand(run: RunDir) -> None:
    run.reserve_exit()
    reserve = os.stat(run.file("exit.reserve"))
    assert reserve.st_blocks * 512 >= EXIT_BYTES
    assert run.unadopted_exit() is None
    run.write_exit({"outcome": "failed", "failure": {"tail": ["x"]}})
    assert os.stat(run.file("exit.json")).st_ino == reserve.st_ino
    assert not os.path.exists(run.file("exit.reserve"))


def test_a_claimed_attempt_is_closed_for_good_once_its_claim_is_let_go(agent: AgentDir, run: RunDir) -> None:
    enter(run.fence, 1)
    assert run.claim()
    close(run.fence, 1)
    run.make_claim_last()
    assert run.claimed_in() == boot_id()
    run.reserve_exit()
    run.write_exit({"outcome": "succeeded"})
    assert stop.remove_quickly(run)
    assert os.listdir(agent.runs_path) == []
    assert refused(lambda: enter(run.fence, 1)) == "fenced"


def test_what_is_not_small_or_not_closed_is_not_removed_quickly(agent: AgentDir, run: RunDir) -> None:
    assert refused(lambda: stop.remove_quickly(run)) == "not-exited"
    run.claim()
    run.write_exit({"outcome": "succeeded"})
    assert not stop.remove_quickly(run)
    close(run.fence, 1)
    for number in range(100):
        (Path(run.file("output")) / str(number)).touch()
    assert not stop.remove_quickly(run)
    assert run.exists()
    shutil.rmtree(run.file("output"))
    Path(run.file("output.large")).touch()
    os.truncate(run.file("output.large"), 1 << 30)
    assert not stop.remove_quickly(run)
    os.unlink(run.file("output.large"))
    lock = run.take_lock(0)
    assert refused(lambda: stop.remove_quickly(run)) == "alive"
    os.close(lock or 0)
    assert stop.remove_quickly(run)
    assert not stop.remove_quickly(run)


def test_a_machine_that_was_restarted_is_known_by_the_claim(run: RunDir) -> None:
    run.claim()
    Path(run.file("claim")).write_text("another boot")
    # In a process of its own, as on a node: it waits for its children to end, and other tests may have left us some.
    os.waitpid(_fork(lambda: stop.clean(run)), 0)
    record = run.exit()
    assert record is not None
    assert (record["outcome"], record["reason"]) == ("lost", "the machine was restarted")
    assert run.status()["claimed_in"] == "another boot"


def test_a_forked_process_can_show_a_command_and_an_environment_of_its_own(tmp_path: Path) -> None:
    shown = proc_title.ProcessTitle([b"one", b"two"], {b"MARK": b"here", b"LONG": b"x" * 20000})

    def show() -> None:
        shown.show()
        signal.pause()

    pid = _fork(show)
    try:
        wait_until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes() == b"one\0two\0")
        assert Path(f"/proc/{pid}/environ").read_bytes() == b"MARK=here\0LONG=" + b"x" * 20000 + b"\0"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert os.fsencode(sys.executable.rpartition("/")[2]) in Path("/proc/self/cmdline").read_bytes()


def test_a_last_word_that_is_too_long_loses_the_oldest_lines(run: RunDir) -> None:
    lines = [f"{number} " + "\0" * 1000 for number in range(50)]
    run.write_exit({"outcome": "failed", "failure": {"tail": lines}})
    assert os.stat(run.file("exit.json")).st_size <= EXIT_BYTES
    record = run.exit()
    assert record is not None
    assert record["failure"]["tail"][-1] == lines[-1]


def test_what_is_set_aside_is_out_of_sight(run: RunDir) -> None:
    aside = run.set_aside()
    assert run.agent.runs() == []
    assert run.agent.set_aside_before() == [aside]


# --- moments and leases -----------------------------------------------------------------------------------------


def test_a_moment_before_a_restart_is_endlessly_old() -> None:
    assert age_s(None) == 0
    assert age_s(moment()) < 1
    assert age_s({"boot_id": "another", "clock_s": clock_s()}) == float("inf")


def test_a_renewal_that_comes_late_renews_no_more_than_its_moment(agent: AgentDir) -> None:
    assert agent.heard_s() == 0
    now = moment()
    agent.renew(now)
    agent.renew({**now, "clock_s": now["clock_s"] - 5})
    assert agent.heard_s() == pytest.approx(now["clock_s"], abs=0.01)
    agent.renew({**now, "clock_s": now["clock_s"] + 1000})
    assert agent.heard_s() <= clock_s()
    assert refused(lambda: agent.renew({"boot_id": "another", "clock_s": 1})) == "other-boot"


def test_a_damaged_lease_is_what_was_read_last_and_a_renewal_mends_it(agent: AgentDir) -> None:
    now = moment()
    agent.renew({**now, "clock_s": now["clock_s"] - 5})
    before = agent.heard_s()
    Path(agent.path, "lease").write_text("x" * 100)
    assert agent.heard_s() == before
    agent.renew(now)
    assert agent.heard_s() == pytest.approx(now["clock_s"], abs=0.01)


# --- specs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ranks": []}, "ranks must be"),
        ({"ranks": [{"rank": 0, "argv": []}]}, "argv"),
        ({"ranks": [{"rank": 0, "argv": "ls"}]}, "argv"),
        ({"ranks": [{"rank": 0, "argv": ["a\0b"]}]}, "NUL"),
        ({"ranks": [{"rank": -1, "argv": ["a"]}]}, "rank must be"),
        ({"ranks": [*SPEC["ranks"], *SPEC["ranks"]]}, "a number of its own"),
        ({"env": {"A=B": "c"}}, "variable"),
        ({"cwd": "relative"}, "absolute"),
        ({"grace_s": -1}, "grace_s"),
        ({"grace_s": float("nan")}, "grace_s"),
        ({"lease_s": 0}, "lease_s"),
        ({"log_cap_bytes": 1}, "log_cap_bytes"),
        ({"log_cap": 1}, "no log_cap"),
        ({"stop_signal": "SIGINT"}, "without SIG"),
        ({"stop_signal": "CONT"}, "ends a program"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_in_words(change: dict[str, Any], complaint: str) -> None:
    RunSpec(SPEC)
    with pytest.raises(ValueError, match=complaint):
        RunSpec({**SPEC, **change})


# --- logs -------------------------------------------------------------------------------------------------------


def test_the_head_of_a_long_log_is_given_back_and_offsets_stay(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = capped_log.CappedLog(str(path), 1 << 20)
    for number in range(64):
        os.write(log.fileno(), b"%07d\n" % number * 8192)
        log.trim()
        assert path.stat().st_blocks * 512 <= (1 << 20) + 2 * 65536
    cut = capped_log.read_cut(str(path))
    assert path.stat().st_size == 64 * 65536
    assert cut.base == 0
    assert (1 << 20) * 3 // 4 <= path.stat().st_size - cut.first <= 1 << 20
    assert path.read_bytes()[cut.first : cut.first + 8].strip(b"\0")
    assert capped_log.last_lines(str(path), 2, 4096) == ["0000063", "0000063"]


def test_last_lines_of_short_binary_and_missing_logs(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert capped_log.last_lines(str(path), 50, 4096) == []
    path.write_bytes(b"one\n\xff\nunfinished")
    assert capped_log.last_lines(str(path), 2, 4096) == ["\ufffd", "unfinished"]
    path.write_bytes(b"a" * 10000)
    assert capped_log.last_lines(str(path), 2, 4096) == ["a" * 4096]


# --- ports ------------------------------------------------------------------------------------------------------


def test_ports_are_free_given_once_and_the_same_again_to_the_same_run(agent: AgentDir) -> None:
    first = ports.reserve(agent.run("train", 1), 3)
    assert ports.reserve(agent.run("train", 1), 3) == first
    assert not set(first) & set(ports.reserve(agent.run("other", 1), 3))
    for port in first:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
    assert ports.free(agent.run("train", 1)) == first
    assert ports.free(agent.run("train", 1)) == []


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert ports.bind_errno(taken.getsockname()[1]) == errno.EADDRINUSE


# --- surviving a logout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kills", "lingers", "firsts"),
    [(False, False, [""]), (False, True, ["systemd-run", "systemd-run", ""]), (True, True, ["systemd-run"] * 2)],
)
def test_a_supervisor_is_started_where_a_logout_does_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: bool, lingers: bool, firsts: list[str]
) -> None:
    found = daemonize.ways(_system(tmp_path, monkeypatch, kills, lingers), "unit", str(tmp_path))
    assert [next(iter(way), "") for way in found] == firsts


def test_where_logind_would_kill_a_run_it_is_refused_with_the_command_that_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = _system(tmp_path, monkeypatch, True, False)
    with pytest.raises(Refused, match=f"loginctl enable-linger {system['user']}") as refusal:
        daemonize.ways(system, "unit", str(tmp_path))
    assert refusal.value.kind == "would-be-killed"


# --- the code itself --------------------------------------------------------------------------------------------


def test_every_crash_point_is_in_one_place() -> None:
    on_nodes = [*SOURCES.rglob("*.py"), *Path(making.__file__).parent.glob("*.py")]
    text = "".join(path.read_text() for path in on_nodes)
    assert sorted(re.findall(r'\bpoint\("([a-z.]+)"\)', text)) == sorted([*POINTS, *making.POINTS, *deleting.POINTS])


def enter(fence: Fence, attempt: int) -> None:
    with fence.held() as held:
        held.enter(attempt)


def close(fence: Fence, attempt: int) -> None:
    with fence.held() as held:
        held.close(attempt)


def _fork(work: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(2)
    return pid


def _with_file_size_limit(work: Callable[[], Any]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def _system(prefix: Path, monkeypatch: pytest.MonkeyPatch, kills: bool, lingers: bool) -> dict[str, Any]:
    """The files of a machine with logind, as ``doctor`` reads them."""
    (prefix / "run/systemd/system").mkdir(parents=True)
    (prefix / f"run/user/{os.getuid()}/systemd").mkdir(parents=True)
    (prefix / "etc/systemd").mkdir(parents=True)
    setting = "[Login]\nKillUserProcesses=yes\nKillExcludeUsers=\n" if kills else "[Login]\n"
    (prefix / "etc/systemd/logind.conf").write_text(setting)
    if lingers:
        linger = prefix / "var/lib/systemd/linger"
        linger.mkdir(parents=True)
        (linger / user_name(os.getuid())).touch()
    tools = prefix / "bin"
    tools.mkdir()
    (tools / "systemd-run").write_text("#!/bin/sh\n")
    (tools / "systemd-run").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    return survival.survival(str(prefix))

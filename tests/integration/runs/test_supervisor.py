"""A run on a node: its life, its last word, and that it goes on when everything around it goes away.

The judge is the ledger that the ranks write, and /proc; see ``tests.rig.ledger``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, in_loop, link_to
from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import AGENT, LocalNode, agent_folder
from tests.rig.waiting import name_of, parent_of, wait_until
from ugro.kernel.links.link import Link
from ugro.kernel.support.errors import RemoteFailure

ONE = f"{AGENT}/train.1"
# A leader and its child, each saying which signal it got.
HEARING = """
for n in 2 10 15; do trap "echo leader-$n >> $SAID; exit $n" $n; done
sh -c 'for n in 2 10 15; do trap "echo child-$n >> $SAID; exit $n" $n; done
    echo ready >> $SAID; while :; do sleep 0.02; done' &
echo ready >> $SAID
while :; do sleep 0.02; done
"""


def status_of(answer: dict[str, Any]) -> str:
    return str(answer["run"]["status"])


# --- the plain life of a run ------------------------------------------------------------------------------------


def test_a_run_whose_ranks_all_end_well_has_succeeded(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    spec = {"ranks": [ledger.rank(number, "exit_with", 0) for number in range(3)]}
    node.call(link, "start", job="train", attempt=1, spec=spec)
    record = ended(node, link)
    assert record["outcome"] == "succeeded"
    assert [(rank["rank"], rank["code"]) for rank in record["ranks"]] == [(0, 0), (1, 0), (2, 0)]
    assert len(ledger.starts(ONE)) == 3
    ledger.expect_nothing_alive()


def test_the_first_rank_that_fails_is_named_with_its_last_lines_and_the_others_are_asked_to_end(
    node: LocalNode, ledger: Ledger
) -> None:
    link = node.link()
    go = ledger.path.with_name("go")
    lines = "".join(f"line {number}\n" for number in range(80))
    ranks = [ledger.rank(0, "polite", 0), ledger.rank(1, "wait_for", go, 3), ledger.rank(2, "sleep")]
    ranks[1]["argv"] = ["sh", "-c", 'printf "%s" "$LINES_TO_SAY" >&2; exec "$@"', "sh", *ranks[1]["argv"]]
    ranks[1]["env"]["LINES_TO_SAY"] = lines
    node.call(link, "start", job="train", attempt=1, spec={"ranks": ranks, "grace_s": 5})
    wait_until(lambda: len(ledger.lines("ready")) == 2)
    go.touch()
    record = ended(node, link)
    assert record["outcome"] == "failed"
    assert record["reason"] == "rank 1 ended with code 3"
    whole = node.call(link, "stop", job="train", attempt=1)["run"]["exit"]["failure"]
    assert (whole["rank"], whole["code"], whole["signal"], whole["is_oom"]) == (1, 3, None, False)
    assert whole["tail"] == lines.splitlines()[-50:]
    assert [(rank["code"], rank["signal"]) for rank in record["ranks"]] == [(0, None), (3, None), (None, 15)]
    assert len(ledger.lines("asked")) == 1


def test_a_rank_sees_its_login_its_own_variables_and_a_folder_to_work_in(node: LocalNode, ledger: Ledger) -> None:
    link = node.link(crash="no.such.point")
    rank = ledger.rank(7, "environment", env={"BOTH": "rank", "ÜBER": "größe\udcff"})
    spec = {"ranks": [rank], "env": {"BOTH": "run"}}
    node.call(link, "start", job="train", attempt=1, spec=spec)
    ended(node, link)
    folder = node.run_dir("train", 1)
    said = (folder / "logs" / "rank_7.log").read_bytes().decode("utf-8", "surrogateescape")
    for line in ("BOTH=rank", "ÜBER=größe\udcff", "RANK=7", f"UGRO_RUN={ONE}", f"UGRO_OUTPUT={folder}/output"):
        assert line in said.splitlines()
    assert "UGRO_CRASH_POINT" not in said
    pid = ledger.starts(ONE)[0].pid
    assert f"cwd={folder}/work sid={pid} pid={pid} oom=200" in said


def test_a_program_that_cannot_be_started_ends_the_run_and_says_why(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    ranks = [ledger.rank(0, "sleep"), {"rank": 1, "argv": ["no-such-program"]}, ledger.rank(2, "sleep")]
    node.call(link, "start", job="train", attempt=1, spec={"ranks": ranks})
    record = ended(node, link)
    assert record["outcome"] == "start-failed"
    assert record["reason"] == "rank 1: no-such-program: no such file or directory"
    failure = {key: record["failure"][key] for key in ("rank", "code", "signal", "is_oom", "kind")}
    assert failure == {"rank": 1, "code": 127, "signal": None, "is_oom": False, "kind": "program"}
    assert (node.run_dir("train", 1) / "logs" / "rank_1.log").read_text().startswith("no-such-program: ")
    ledger.expect_nothing_alive()


@pytest.mark.parametrize(
    ("argv", "cwd", "code", "reason"),
    [
        (["{folder}/missing.py"], None, 127, "rank 0: {folder}/missing.py: no such file or directory"),
        (["{folder}/plain.txt"], None, 126, "rank 0: {folder}/plain.txt: permission denied"),
        (["{folder}/no-first-line"], None, 126, "rank 0: {folder}/no-first-line: exec format error"),
        (["{folder}"], None, 126, "rank 0: {folder}: permission denied"),
        (
            ["{folder}/bad-first-line"], None, 127,
            "rank 0: {folder}/bad-first-line: what its first line names: no such file or directory",
        ),
        (["plain.txt"], None, 126, "rank 0: plain.txt: permission denied"),
        (["true"], "/no/such", 127, "rank 0: working directory /no/such: no such file or directory"),
        (["true"], "{folder}/plain.txt", 127, "rank 0: working directory {folder}/plain.txt: not a directory"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_program_is_said_plainly_and_is_its_own_fault(
    node: LocalNode, tmp_path: Path, argv: list[str], cwd: str | None, code: int, reason: str
) -> None:
    link = node.link()
    (tmp_path / "plain.txt").write_text("text")
    for name, content in (("no-first-line", "\x01\x02"), ("bad-first-line", "#!/no/such/python\n")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    rank = {"rank": 0, "argv": [word.format(folder=tmp_path) for word in argv], "env": {"PATH": f"{tmp_path}:/bin"}}
    where = cwd.format(folder=tmp_path) if cwd else None
    node.call(link, "start", job="train", attempt=1, spec={"ranks": [rank], "cwd": where})
    record = ended(node, link)
    assert (record["outcome"], record["reason"]) == ("start-failed", reason.format(folder=tmp_path))
    assert (record["failure"]["kind"], record["failure"]["code"]) == ("program", code)
    assert record["ranks"][0]["code"] == code


def test_a_folder_for_checkpoints_that_cannot_be_filled_is_not_the_programs_fault(
    node: LocalNode, ledger: Ledger
) -> None:
    link = node.link()
    (agent_folder(node.root, node.spec.name) / "checkpoints.lock").mkdir(parents=True)
    spec = {"ranks": [ledger.rank(0, "exit_with", 0)], "checkpoint_dir": "checkpoints"}
    node.call(link, "start", job="train", attempt=1, spec=spec)
    record = ended(node, link)
    assert (record["outcome"], record["failure"]["kind"]) == ("start-failed", "node")
    assert record["reason"] == "rank 0: its folder for checkpoints: is a directory"
    assert not ledger.starts(ONE)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a user without any processes left")
def test_what_the_node_lacks_is_the_nodes_fault(tmp_path: Path) -> None:
    """A user who may have only so many processes: a node program, a supervisor, its reaper, and few ranks."""
    root = Path(tempfile.mkdtemp(prefix="r"))
    user = 60_000 + os.getpid() % 4000
    os.chown(root, user, user)
    limited = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--bounding-set=-all")
    node = LocalNode(root, prefix=(*limited, "prlimit", "--nproc=6"), python="/usr/bin/python3")
    try:
        link = node.link()
        ranks = [{"rank": number, "argv": ["sleep", "600"]} for number in range(8)]
        node.call(link, "start", job="train", attempt=1, spec={"ranks": ranks})
        record = ended(node, link)
        assert record["outcome"] == "start-failed"
        assert record["reason"].endswith(": resource temporarily unavailable")
        assert record["failure"]["kind"] == "node"
    finally:
        node.close()
        shutil.rmtree(root)


@pytest.mark.parametrize(("in_spec", "asked", "expected"), [("INT", None, 2), (None, "USR1", 10), ("INT", "USR1", 10)])
def test_ranks_are_asked_with_the_signal_they_want_and_their_children_are_not(
    node: LocalNode, ledger: Ledger, tmp_path: Path, in_spec: str | None, asked: str | None, expected: int
) -> None:
    link = node.link()
    said = tmp_path / "said"
    rank = {"rank": 0, "argv": ["sh", "-c", HEARING], "env": {"SAID": str(said)}}
    spec = {"ranks": [rank], "grace_s": 20, **({"stop_signal": in_spec} if in_spec else {})}
    node.call(link, "start", job="train", attempt=1, spec=spec)
    wait_until(lambda: said.exists() and said.read_text().split() == ["ready", "ready"])
    record = node.call(link, "stop", job="train", attempt=1, grace_s=20, signal=asked)["run"]["exit"]
    assert said.read_text().split()[2:] == [f"leader-{expected}", "child-15"]
    assert (record["outcome"], record["ranks"][0]["code"]) == ("stopped", expected)


def test_a_rank_that_fails_has_the_others_asked_with_their_signal(
    node: LocalNode, ledger: Ledger, tmp_path: Path
) -> None:
    link = node.link()
    said = tmp_path / "said"
    rank = {"rank": 0, "argv": ["sh", "-c", HEARING], "env": {"SAID": str(said)}}
    failing = ledger.rank(1, "wait_for", tmp_path / "go", 3)
    spec = {"ranks": [rank, failing], "grace_s": 20, "stop_signal": "USR1"}
    node.call(link, "start", job="train", attempt=1, spec=spec)
    wait_until(lambda: said.exists() and said.read_text().split() == ["ready", "ready"])
    (tmp_path / "go").touch()
    assert ended(node, link)["reason"] == "rank 1 ended with code 3"
    assert said.read_text().split()[2] == "leader-10"


@pytest.mark.parametrize("name", ["SIGTERM", "term", "STOP", "CONT", "NONE", "", "_DFL", 15])
def test_a_signal_that_ends_nothing_is_refused(node: LocalNode, ledger: Ledger, name: Any) -> None:
    link = node.link()
    spec = ledger.sleeping() | {"stop_signal": name}
    with pytest.raises(RemoteFailure, match="without SIG, such as INT"):
        node.call(link, "start", job="train", attempt=1, spec=spec)
    with pytest.raises(RemoteFailure, match="without SIG, such as INT"):
        node.call(link, "stop", job="train", attempt=1, signal=name)


def test_a_rank_that_saves_its_work_has_its_children_meanwhile(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    node.call(link, "start", job="train", attempt=1, spec={"ranks": [ledger.rank(0, "saving")]})
    wait_until(lambda: ledger.lines("ready"))
    node.call(link, "stop", job="train", attempt=1, grace_s=20)
    assert ledger.lines("saved") == [f"saved {ONE} together"]
    ledger.expect_nothing_alive(0.1)


def test_a_program_that_a_rank_only_wraps_gets_its_time_too(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    rank = ledger.rank(0, "polite", 9)
    # The shell ends at once; the program it started is then asked, too, and not killed.
    rank["argv"] = ["sh", "-c", '"$@"; :', "sh", *rank["argv"]]
    node.call(link, "start", job="train", attempt=1, spec={"ranks": [rank]})
    wait_until(lambda: ledger.lines("ready"))
    answer = node.call(link, "stop", job="train", attempt=1, reason="cancelled by me", grace_s=20)
    assert status_of(answer) == "exited"
    assert (answer["run"]["exit"]["outcome"], answer["run"]["exit"]["reason"]) == ("stopped", "cancelled by me")
    assert len(ledger.lines("asked")) == 1
    assert answer["run"]["exit"]["leftovers"] == 1


def test_a_second_stop_hastens_the_first(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    node.call(link, "start", job="train", attempt=1, spec={"ranks": [ledger.rank(0, "hostile", "plain")]})
    wait_until(lambda: ledger.lines("ready"))

    async def twice() -> list[dict[str, Any]]:
        slow = asyncio.create_task(node.acall(link, "stop", job="train", attempt=1, grace_s=600))
        await asyncio.wait([slow], timeout=0.5)
        assert not slow.done()
        return [await node.acall(link, "stop", 20, job="train", attempt=1, grace_s=0), await slow]

    assert [status_of(answer) for answer in node.wait(twice())] == ["exited", "exited"]
    ledger.expect_nothing_alive()


# --- how it stands in the system -------------------------------------------------------------------------------


def test_a_supervisor_is_named_by_its_run_and_has_nothing_of_the_node_program(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    node.call(link, "start", job="other", attempt=1, spec={"ranks": [ledger.rank(5, "sleep")]})
    node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping())
    [program] = node.pids()
    pid = node.supervisor("train", 1)
    proc = Path(f"/proc/{pid}")
    variables = (proc / "environ").read_bytes().split(b"\0")
    assert f"UGRO_RUN={AGENT}/supervisor".encode() in variables
    assert not [variable for variable in variables if variable.startswith(b"UGRO_RUN_DIR=")]
    assert name_of_run(pid) == "train.1"
    assert (proc / "cwd").readlink() == Path("/")
    assert program not in (parent_of(pid), parent_of(parent_of(pid)))
    assert os.getsid(pid) not in (os.getsid(program), pid)
    theirs = {link for link in open_files(program) if not link.startswith("/dev/")}
    assert not {link for link in open_files(pid) if link in theirs}
    assert len(open_files(pid)) <= 14  # two of them keep claims on GPUs
    assert [line for line in (proc / "status").read_text().splitlines() if line.startswith("SigBlk")] == [
        "SigBlk:\t0000000000000000"
    ]


def test_a_node_program_has_no_dead_children_and_no_more_files_open_after_many_runs(
    node: LocalNode, ledger: Ledger
) -> None:
    link = node.link()
    [program] = node.pids()
    before = len(open_files(program))
    for attempt in range(1, 11):
        node.call(link, "start", job="train", attempt=attempt, spec={"ranks": [{"rank": 0, "argv": ["true"]}]})
        wait_until((node.run_dir("train", attempt) / "exit.json").exists)
        node.call(link, "remove", job="train", attempt=attempt)
    assert len(open_files(program)) <= before + 1
    assert Path(f"/proc/{program}/task/{program}/children").read_text() == ""
    assert os.listdir(node.run_dir("train", 1).parent) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a machine with a user manager")
def test_where_a_user_lingers_a_supervisor_is_started_afresh_in_a_scope_of_its_own(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub stands in for systemd-run, and files for what the system would have."""
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "systemd-run"
    stub.write_text('#!/bin/sh\necho "$@" > "$0.args"\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    machine = (
        "mount -t tmpfs none /run && mkdir -p /run/user/0/systemd /var/lib/systemd &&"
        "mount -t tmpfs none /var/lib/systemd && mkdir /var/lib/systemd/linger &&"
        'touch "/var/lib/systemd/linger/$0" && exec "$@"'
    )
    (tmp_path / "root").mkdir()
    node = LocalNode(tmp_path / "root", prefix=("unshare", "--mount", "sh", "-c", machine, "root"))
    try:
        link = node.link()
        node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping())
        assert "--user --scope" in Path(f"{stub}.args").read_text()
        wait_until(lambda: len(ledger.starts(ONE)) == 2)
        node.kill_programs()
        assert len(ledger.alive_of(ONE)) == 2
        assert node.call(node.link(), "stop", job="train", attempt=1)["run"]["exit"]["outcome"] == "stopped"
        ledger.expect_nothing_alive()
    finally:
        node.close()


# --- whoever goes away ------------------------------------------------------------------------------------------


def test_ranks_never_notice_that_the_node_program_was_killed(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping())
    before = wait_until(lambda: len(ledger.starts(ONE)) == 2) and ledger.alive()
    node.kill_programs()
    wait_until(lambda: not node.pids())
    link = node.link()
    runs = node.runs()
    assert [(run["status"], run["attempt"]) for run in runs] == [("running", 1)]
    assert ledger.alive() == before
    assert status_of(node.call(link, "stop", job="train", attempt=1)) == "exited"
    ledger.expect_nothing_alive()


@in_loop
async def test_ranks_never_notice_that_their_ssh_session_was_killed(farm_of: Farms, ledger: Ledger) -> None:
    farm = farm_of(1)
    who, run = {"agent": AGENT, "generation": 1}, {"job": "train", "attempt": 1}
    async with link_to(farm, farm.nodes[0]) as link:
        await link.call("runs.start", {**who, "runs": [{**run, "spec": ledger.sleeping()}]}, timeout_s=20)
        wait_until(lambda: len(ledger.starts(ONE)) == 2)
        farm.nodes[0].kill_sessions()
        await asyncio.wait_for(asyncio.shield(link.lost), 10)
    assert len(ledger.alive_of(ONE)) == 2
    async with link_to(farm, farm.nodes[0]) as link:
        assert len(ledger.alive_of(ONE)) == 2
        await link.call("runs.stop", {**who, **run}, timeout_s=20)
    ledger.expect_nothing_alive()
    ledger.judge()


def test_a_killed_guard_of_a_command_takes_no_run_along(node: LocalNode, ledger: Ledger) -> None:
    """After its first command a node program adopts orphans, and ends those it does not know."""
    link = node.link()

    async def command_and_run() -> None:
        stream = link.stream("exec", {"argv": ["sleep", "600"], "marker": str(node.root)})
        await node.acall(link, "start", job="train", attempt=1, spec=ledger.sleeping())
        wait_until(lambda: len(ledger.starts(ONE)) == 2)
        reaper = parent_of(node.supervisor("train", 1))
        assert parent_of(reaper) not in node.pids()  # it would be a zombie there one day
        [command] = wait_until(lambda: [pid for pid in node.pids() if name_of(pid) == "sleep"])
        os.kill(parent_of(command), signal.SIGKILL)
        with pytest.raises(RemoteFailure):
            await asyncio.wait_for(stream.future, 10)

    node.wait(command_and_run())
    assert [run["status"] for run in node.runs()] == ["running"]
    assert len(ledger.alive_of(ONE)) == 2


def test_a_supervisor_that_is_asked_to_end_ends_its_ranks_and_says_so(node: LocalNode, ledger: Ledger) -> None:
    """As a machine does that is shut down."""
    link = node.link()
    node.call(link, "start", job="train", attempt=1, spec={"ranks": [ledger.rank(0, "polite", 0)], "grace_s": 20})
    wait_until(lambda: ledger.lines("ready"))
    os.kill(node.supervisor("train", 1), signal.SIGTERM)
    assert (ended(node, link)["outcome"], len(ledger.lines("asked"))) == ("interrupted", 1)
    ledger.expect_nothing_alive(0.1)


def test_a_stopped_supervisor_counts_as_alive_and_hears_a_stop(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping())
    os.kill(node.supervisor("train", 1), signal.SIGSTOP)
    assert [run["status"] for run in node.runs()] == ["running"]
    assert node.call(link, "stop", job="train", attempt=1)["run"]["exit"]["outcome"] == "stopped"


def test_a_rank_that_had_died_before_the_order_to_stop_is_the_reason(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    state = node.call(link, "start", job="train", attempt=1, spec=ledger.sleeping(2))["run"]["state"]
    os.kill(node.supervisor("train", 1), signal.SIGSTOP)  # too slow to have seen it
    rank = Path(f"/proc/{state['ranks'][1]['pid']}/stat")
    os.kill(state["ranks"][1]["pid"], signal.SIGKILL)
    wait_until(lambda: rank.read_text().rpartition(")")[2].split()[0] == "Z", what="the rank to be dead")
    record = node.call(link, "stop", job="train", attempt=1)["run"]["exit"]
    assert (record["outcome"], record["reason"]) == ("failed", "rank 1 ended with signal 9")


def test_a_killed_supervisor_is_seen_as_dead_and_its_leftovers_are_ended(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    spec = {"ranks": [ledger.rank(0, "hostile", "plain", "setsid", "double", "setsid-double", "setsid-empty-double")]}
    node.call(link, "start", job="train", attempt=1, spec=spec)
    wait_until(lambda: ledger.lines("ready"))
    wait_until(lambda: len(ledger.entries()) == 6)
    node.kill_supervisor("train", 1)
    wait_until(lambda: not ledger.starts(ONE)[0].is_alive, what="the rank to die with its supervisor")
    assert [run["status"] for run in node.runs()] == ["dead"]
    assert status_of(node.call(link, "start", job="train", attempt=1, spec=spec)) == "dead"
    answer = node.call(link, "stop", job="train", attempt=1)
    record = answer["run"]["exit"]
    assert (record["outcome"], record["may_have_left"]) == ("lost", True)
    assert record["reason"].startswith("its supervisor was killed, and so was its reaper: a process that left")
    ledger.expect_nothing_alive(0.1)  # one without environment and parent still has the log open


def test_two_nodes_on_one_machine_with_the_same_run_do_not_touch_each_other(
    node: LocalNode, ledger: Ledger, tmp_path: Path
) -> None:
    """As in a lab: one agent, one job, one attempt, two folders."""
    (tmp_path / "other").mkdir()
    other = LocalNode(tmp_path / "other")
    try:
        node.call(node.link(), "start", job="train", attempt=1, spec=ledger.sleeping())
        more = {"ranks": [ledger.rank(7, "sleep")]}
        other.call(other.link(), "start", job="train", attempt=1, spec=more)
        wait_until(lambda: len(ledger.starts(ONE)) == 3)
        os.kill(other.supervisor("train", 1), signal.SIGKILL)
        other.call(other.link(), "stop", job="train", attempt=1)
        assert sorted(entry.rank for entry in ledger.alive_of(ONE)) == ["0", "1"]
        node.call(node.link(), "stop", job="train", attempt=1)
        assert ledger.alive_of(ONE) == []
    finally:
        other.close()


def test_a_hostile_tree_ends_whatever_it_did_to_get_away(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    spec = {"ranks": [ledger.rank(number, "hostile") for number in range(2)], "grace_s": 0.3}
    node.call(link, "start", job="train", attempt=1, spec=spec)
    wait_until(lambda: len(ledger.lines("ready")) == 2)
    wait_until(lambda: len(ledger.entries()) == 14)
    assert all(entry.is_alive for entry in ledger.entries())
    answer = node.call(link, "stop", job="train", attempt=1, grace_s=0.3)
    assert [entry for entry in ledger.entries() if entry.is_alive] == []
    assert answer["run"]["exit"]["unkillable"] == []
    assert answer["run"]["exit"]["leftovers"] == 12


@pytest.mark.parametrize("pause_s", [0.002, 0])
def test_a_process_that_is_never_the_same_for_long_ends_too(node: LocalNode, ledger: Ledger, pause_s: float) -> None:
    link = node.link()
    node.call(link, "start", job="train", attempt=1, spec={"ranks": [ledger.rank(0, "hop", pause_s)]})
    wait_until(lambda: ledger.lines("ready"))
    record = node.call(link, "stop", 5, job="train", attempt=1, grace_s=0.1)["run"]["exit"]
    assert (record["outcome"], record["unkillable"]) == ("stopped", [])
    ledger.expect_nothing_alive(0.1)


def test_children_that_a_rank_left_end_with_the_run_that_succeeded(node: LocalNode, ledger: Ledger) -> None:
    link = node.link()
    rank = ledger.rank(0, "hostile", "setsid-double")
    rank["argv"] = ["sh", "-c", '"$@" & while ! grep -q ready "$TEST_LEDGER"; do :; done', "sh", *rank["argv"]]
    node.call(link, "start", job="train", attempt=1, spec={"ranks": [rank], "grace_s": 0.3})
    assert ended(node, link)["outcome"] == "succeeded"
    ledger.expect_nothing_alive(0.1)


# --- helpers ----------------------------------------------------------------------------------------------------


def name_of_run(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1].decode()


def open_files(pid: int) -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(path))
    return found


def ended(node: LocalNode, link: Link) -> dict[str, Any]:
    """The record of train.1, once it is there, as a list gives it."""

    def record() -> dict[str, Any] | None:
        [run] = [run for run in node.runs() if run["job"] == "train"]
        assert run["status"] != "dead"
        found: dict[str, Any] | None = run["exit"]
        return found

    found = wait_until(record, 20, "the run to end")
    assert found is not None
    return found

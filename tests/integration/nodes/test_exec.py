"""``ugro exec`` on real nodes: its output, its exit codes, and that nothing of it is left, however it ends."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import is_alive, processes_with, wait_until

ENDLESS = "echo $$; while :; do sleep 0.05; done"
STUBBORN = "trap '' TERM INT HUP; echo $$; while :; do sleep 0.05; done"


@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    """Five nodes, of which two are fast. A test that ends one starts it again."""
    with ExitStack() as stack:
        yield Farms(stack)(5)


@pytest.fixture(scope="module")
def ugro(farm: SshdFarm) -> Iterator[Ugro]:
    fast = {"labels": ["fast"]}
    with commands(farm.cluster_yaml(nodes={"n002": fast, "n004": fast})) as ugro:
        yield ugro


def begin(ugro: Ugro, *words: str) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    """A running ``exec`` of a script that first writes its pid; the pids by node. It leads a process group."""
    nodes = 1 if words[0].startswith("n") else 5
    running = subprocess.Popen(
        ugro.argv("exec", *words),
        env=ugro.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert running.stdout is not None
    lines = [running.stdout.readline().decode() for _ in range(nodes)]
    return running, {name: int(pid) for name, _, pid in (line.partition(" | ") for line in lines)}


def finish(running: subprocess.Popen[bytes], timeout_s: float = 20) -> tuple[int, str, str]:
    out, err = running.communicate(timeout=timeout_s)
    return running.returncode, out.decode(), err.decode()


def wait_until_gone(pids: dict[str, int], timeout_s: float = 10) -> None:
    wait_until(lambda: not any(map(is_alive, pids.values())), timeout_s, f"{pids} to end")


def raw(ugro: Ugro, *words: str) -> tuple[int, bytes, bytes]:
    """As bytes: what a command writes need not be text."""
    argv = ugro.argv("exec", *words)
    done = subprocess.run(argv, env=ugro.environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


# --- output --------------------------------------------------------------------------------------------------------


def test_five_nodes_run_at_once_and_their_lines_never_mix(ugro: Ugro, farm: SshdFarm) -> None:
    script = (
        "i=0; while [ $i -lt 200 ]; do printf abc; printf 'def %d %s\\n' $i 0123456789; "
        "printf 'err %d\\n' $i >&2; i=$((i+1)); done"
    )
    answer = ugro("exec", "@all", "--", "sh", "-c", script)
    assert answer.returncode == 0
    lines = answer.stdout.splitlines()
    by_node = {name: [line for line in lines if line.startswith(f"{name} | ")] for name in (n.name for n in farm.nodes)}
    assert sum(map(len, by_node.values())) == len(lines) == 1000
    for name, own in by_node.items():
        assert own == [f"{name} | abcdef {number} 0123456789" for number in range(200)]
    errors = answer.stderr.splitlines()
    assert sum(bool(re.fullmatch(r"n00\d \| err \d+", line)) for line in errors) == 1000
    assert errors[-1] == "5 ok"


def test_the_nodes_really_run_at_the_same_time(ugro: Ugro, farm: SshdFarm, tmp_path: Path) -> None:
    # Each waits until all five are there: one after the other would wait for ever.
    script = f"touch {tmp_path}/$$; while [ $(ls {tmp_path} | wc -l) -lt 5 ]; do sleep 0.02; done"
    answer = ugro("exec", *(node.name for node in farm.nodes), "--", "sh", "-c", script, timeout=30)
    assert answer.returncode == 0, answer.stderr


def test_every_byte_arrives_as_it_was_written(ugro: Ugro, farm: SshdFarm) -> None:
    code = "import sys; sys.stdout.buffer.write(bytes(range(256))); sys.stderr.buffer.write(bytes(range(255, -1, -1)))"
    exit_code, out, err = raw(ugro, "n001", "--no-prefix", "--", "python3", "-c", code)
    assert exit_code == 0
    assert out == bytes(range(256))
    assert err == bytes(range(255, -1, -1))


def test_with_a_prefix_a_last_line_without_an_end_is_shown_too(ugro: Ugro, farm: SshdFarm) -> None:
    _, out, _ = raw(ugro, "n001", "--", "printf", "one\\n\\ntwo\\r\\xff")
    assert out == b"n001 | one\nn001 | \nn001 | two\r\xff\n"


def test_a_line_of_any_length_stays_one_line(ugro: Ugro, farm: SshdFarm) -> None:
    code = "import sys; sys.stdout.write('x' * 300000 + '\\n'); sys.stdout.write('y' * 70000)"
    _, out, _ = raw(ugro, "n001", "--", "python3", "-c", code)
    assert out == b"n001 | " + b"x" * 300000 + b"\nn001 | " + b"y" * 70000 + b"\n"


def test_fifty_megabytes_arrive_whole_and_a_slow_reader_holds_them_back(ugro: Ugro, farm: SshdFarm) -> None:
    # Numbers, so that a lost or repeated piece changes the hash.
    script = "seq 1 6800000 | head -c 50000000"
    argv = ugro.argv("exec", "n001", "--no-prefix", "--", "sh", "-c", script)
    expected = hashlib.sha256(subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout).hexdigest()
    assert ugro("exec", "n001", "--", "true").returncode == 0
    agent = agent_pid(ugro)
    before = resident_bytes(agent)
    with subprocess.Popen(argv, env=ugro.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        digest = hashlib.sha256(running.stdout.read(1))
        held_back = settled(lambda: resident_bytes(agent)) - before
        digest.update(running.stdout.read())
        assert running.wait(30) == 0
    assert digest.hexdigest() == expected
    assert held_back < 25_000_000


def settled(value: Callable[[], int]) -> int:
    """The value once it has stopped growing."""
    last = [0]

    def stands() -> bool:
        time.sleep(0.1)  # the pace of looking, not a guess at how long it takes
        before, last[0] = last[0], value()
        return last[0] - before < 1_000_000

    wait_until(stands, 20, "memory to stop growing")
    return last[0]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_command_gets_no_input(ugro: Ugro, farm: SshdFarm) -> None:
    assert ugro("exec", "n001", "--", "cat", timeout=20).returncode == 0


def test_json_is_one_document_a_line(ugro: Ugro, farm: SshdFarm) -> None:
    answer = ugro("exec", "--json", "@fast", "--", "sh", "-c", "echo out; echo err >&2; exit 4")
    documents = [json.loads(line) for line in answer.stdout.splitlines()]
    assert answer.returncode == 1
    for name in ("n002", "n004"):
        own = [document for document in documents if document["node"] == name]
        assert "".join(document.get("stdout", "") for document in own) == "out\n"
        assert "".join(document.get("stderr", "") for document in own) == "err\n"
        end = own[-1]
        assert (end["code"], end["signal"], end["exit_code"], end["error"], end["unkillable"]) == (4, None, 4, None, [])
        assert set(end) == {"node", "code", "signal", "exit_code", "error", "unkillable"}
    assert {document["node"] for document in documents} == {"n002", "n004"}
    assert answer.stderr == ""


def test_json_carries_bytes_that_are_no_text(ugro: Ugro, farm: SshdFarm) -> None:
    answer = ugro("exec", "--json", "n001", "--", "printf", "a\\xffb")
    pieces = [json.loads(line).get("stdout_base64", "") for line in answer.stdout.splitlines()]
    assert b"".join(map(base64.b64decode, pieces)) == b"a\xffb"


# --- what is run ---------------------------------------------------------------------------------------------------


def test_nodes_are_named_by_label_and_options_may_stand_anywhere_before_the_dashes(ugro: Ugro, farm: SshdFarm) -> None:
    words = ("@fast", "--cwd", "/usr", "n002", "-e", "COLOUR=dark red", "--env", "EMPTY=", "--")
    script = 'echo "$PWD" "$COLOUR" "${EMPTY-unset}" "$@"'
    answer = ugro("exec", *words, "sh", "-c", script, "sh", "--json", "--cwd", "--")
    assert sorted(answer.stdout.splitlines()) == [
        f"{name} | /usr dark red  --json --cwd --" for name in ("n002", "n004")
    ]


def test_it_begins_in_the_home_folder_with_the_nodes_own_environment(ugro: Ugro, farm: SshdFarm) -> None:
    answer = ugro("exec", "n001", "--", "sh", "-c", 'pwd; echo "$HOME"; env', env={"MINE": "not yours"})
    home = str(farm["n001"].home)
    lines = [line.removeprefix("n001 | ") for line in answer.stdout.splitlines()]
    assert lines[:2] == [home, home]
    assert "MINE=not yours" not in lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("@all", "true"), "put -- before the command"),
        ((), "put -- before the command"),
        (("--", "true"), "name the nodes before the --"),
        (("n001", "--"), "there is no command after the --"),
        (("n001", "--env", "COLOUR", "--", "true"), "--env COLOUR: expected NAME=VALUE"),
        (("n001", "--env", "=red", "--", "true"), "--env =red: expected NAME=VALUE"),
        (("n001", "--colour", "--", "true"), "--colour"),
    ],
)
def test_wrong_usage_is_one_clear_error_and_starts_nothing(ugro: Ugro, words: tuple[str, ...], message: str) -> None:
    nowhere = str(ugro.home / "nowhere")
    answer = ugro("exec", *words, env={"UGRO_HOME": nowhere})
    assert (answer.returncode, answer.stdout) == (2, "")
    assert message in answer.stderr.splitlines()[0]
    assert not Path(nowhere).exists()


def test_unknown_nodes_and_commands_that_are_too_long_are_refused(ugro: Ugro, farm: SshdFarm) -> None:
    unknown = ugro("exec", "n01", "--", "true")
    assert (unknown.returncode, unknown.stdout) == (4, "")
    assert "hint:  did you mean n001?" in unknown.stderr
    assert ugro("exec", "@slow", "--", "true").returncode == 4
    long = ugro("exec", "n001", "--", "true", *["x" * 100_000] * 12)
    assert long.returncode == 2
    assert "longer than 1 MiB" in long.stderr


# --- exit codes ----------------------------------------------------------------------------------------------------


def test_one_nodes_exit_code_is_its_own(ugro: Ugro, farm: SshdFarm) -> None:
    for script, code in {"exit 0": 0, "exit 7": 7, "kill -9 $$": 137, "kill -TERM $$": 143, "exit 255": 255}.items():
        assert ugro("exec", "n001", "--", "sh", "-c", script).returncode == code
    missing = ugro("exec", "n001", "--", "no-such-command")
    assert missing.returncode == 127
    assert "n001 | no-such-command: No such file or directory" in missing.stderr
    assert ugro("exec", "n001", "--", "/etc/passwd").returncode == 126
    assert ugro("exec", "n001", "--cwd", "/no/such/folder", "--", "true").returncode == 127


def test_several_nodes_are_zero_one_or_unreachable(ugro: Ugro, farm: SshdFarm) -> None:
    assert ugro("exec", "@all", "--", "true").returncode == 0
    script = "case $HOME in *n003/*) exit 9;; *n004/*) kill -9 $$;; *n005/*) kill -40 $$;; esac"
    some = ugro("exec", "@all", "--", "sh", "-c", script)
    assert some.returncode == 1
    ends = "2 ok · n003 exit 9 · n004 ended by SIGKILL · n005 ended by signal 40"  # which has no name
    assert some.stderr.splitlines()[-1] == ends
    farm["n005"].stop()
    alone = ("exec", "n005", "--", "true")
    wait_until(lambda: "connection refused" in ugro(*alone).stderr, 20, "the node to be known as gone")
    gone = ugro("exec", "@all", "--", "echo", "here")
    assert gone.returncode == 5
    assert sorted(gone.stdout.splitlines()) == [f"n00{number} | here" for number in range(1, 5)]
    restart(ugro, farm, "n005")
    assert gone.stderr.startswith("warning: n005: connection refused")
    assert gone.stderr.splitlines()[-1] == "4 ok · 1 unreachable"
    assert gone.stderr.count("connection refused") == 1


# --- ends ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_it_everywhere_and_says_so(ugro: Ugro, farm: SshdFarm) -> None:
    running, pids = begin(ugro, "@all", "--", "sh", "-c", ENDLESS)
    os.killpg(running.pid, signal.SIGINT)
    code, _, errors = finish(running)
    assert code == 130
    assert errors.startswith("stopping it on the nodes")
    assert errors.count("ended by SIGTERM") == 5
    wait_until_gone(pids)


@pytest.mark.proof
def test_ctrl_c_ends_also_what_ignores_it_within_the_grace(ugro: Ugro, farm: SshdFarm) -> None:
    # The script ignores all, and its child has left the session and the process group.
    script = f"setsid sh -c \"{STUBBORN.replace('$$', 'child')}\" & {STUBBORN}"
    running, pids = begin(ugro, "n001", "--", "sh", "-c", script.replace("echo child; ", ""))
    began = time.monotonic()
    os.killpg(running.pid, signal.SIGINT)
    code, _, _ = finish(running)
    assert code == 130
    assert 4 < time.monotonic() - began < 12
    wait_until_gone(pids)
    assert [pid for pid in farm["n001"].processes() if b"trap" in cmdline(pid)] == []


@pytest.mark.proof
def test_a_second_ctrl_c_leaves_at_once_and_the_nodes_end_it_alone(ugro: Ugro, farm: SshdFarm) -> None:
    running, pids = begin(ugro, "n001", "--", "sh", "-c", STUBBORN)
    running.send_signal(signal.SIGINT)
    assert running.stderr is not None
    assert b"stopping it" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    assert running.wait(2) == 130
    finish(running)
    wait_until_gone(pids, 12)


def test_a_killed_command_line_ends_it_too(ugro: Ugro, farm: SshdFarm) -> None:
    running, pids = begin(ugro, "@all", "--", "sh", "-c", ENDLESS)
    running.kill()
    finish(running)
    wait_until_gone(pids)
    wait_until(lambda: running_commands(ugro) == 0)


def test_a_killed_command_line_that_did_not_read_ends_it_too(ugro: Ugro, farm: SshdFarm) -> None:
    running, pids = begin(ugro, "n001", "--", "sh", "-c", "echo $$; exec yes")
    agent = agent_pid(ugro)
    settled(lambda: resident_bytes(agent))  # all pipes are full now
    running.kill()
    finish(running)
    wait_until_gone(pids)
    wait_until(lambda: running_commands(ugro) == 0)


def test_a_reader_that_has_seen_enough_ends_it_without_complaint(ugro: Ugro, farm: SshdFarm) -> None:
    running, pids = begin(ugro, "n001", "--", "sh", "-c", "echo $$; exec yes")
    assert running.stdout is not None
    running.stdout.close()
    assert running.wait(20) == 0
    assert running.stderr is not None
    assert running.stderr.read() == b""
    running.stderr.close()
    wait_until_gone(pids)


def test_a_killed_agent_is_told_and_leaves_no_orphan(ugro: Ugro, farm: SshdFarm) -> None:
    running, pids = begin(ugro, "@all", "--", "sh", "-c", ENDLESS)
    os.kill(agent_pid(ugro), signal.SIGKILL)
    code, _, errors = finish(running)
    assert code == 5
    assert errors == "error: the agent ended in the middle of its answer\n"
    wait_until_gone(pids)
    wait_until(lambda: not any(node.processes() for node in farm.nodes), 10, "the node programs to end")


def test_a_node_that_is_lost_is_named_and_the_others_go_on(ugro: Ugro, farm: SshdFarm) -> None:
    script = "echo $$; until [ -e go ]; do sleep 0.02; done; echo done"
    running, pids = begin(ugro, "@all", "--", "sh", "-c", script)
    farm["n003"].power_off()
    for node in farm.nodes:
        (node.home / "go").touch()
    code, out, errors = finish(running)
    restart(ugro, farm, "n003")
    assert code == 5
    assert sorted(out.splitlines()) == [f"{name} | done" for name in ("n001", "n002", "n004", "n005")]
    assert re.search(r"^warning: n003: the link broke", errors, re.MULTILINE)
    wait_until_gone(pids)


@pytest.mark.proof
def test_a_node_that_is_cut_off_is_named_and_the_others_go_on(farm_of: Farms) -> None:
    farm = farm_of.with_cables(2)
    with commands(farm.cluster_yaml()) as ugro:
        assert ugro("health").returncode == 0
        script = "echo begun; until [ -e go ]; do sleep 0.05; done; echo done"
        with ugro.start("exec", "@all", "--", "sh", "-c", script) as running:
            assert running.stdout is not None
            assert {running.stdout.readline() for _ in "12"} == {b"n001 | begun\n", b"n002 | begun\n"}
            farm["n002"].cut()
            # Nothing tells a cut cable from a long silence but time.
            wait_until(lambda: lost(ugro), 30, "the cut node to be noticed")
            (farm["n001"].home / "go").touch()
            code, out, errors = finish(running)
        assert (code, out) == (5, "n001 | done\n")
        assert "warning: n002: stopped answering" in errors
        farm["n002"].heal()
        wait_until(lambda: not lost(ugro), 30, "the healed node to be back")


def lost(ugro: Ugro) -> bool:
    nodes: list[dict[str, Any]] = json.loads(ugro("health", "--json").stdout)["nodes"]
    return [node["status"] == "unreachable" for node in nodes] == [False, True]


def test_what_a_command_leaves_behind_ends_with_it(ugro: Ugro, farm: SshdFarm) -> None:
    mark = f"left-{os.getpid()}"
    answer = ugro("exec", "n001", "--", "sh", "-c", f"setsid sleep 1000 {mark} & sleep 1001 {mark} & echo $!")
    assert answer.returncode == 0
    assert processes_with(mark.encode()) == []


@pytest.mark.proof
def test_ctrl_c_before_a_node_is_connected_is_obeyed(farm_of: Farms) -> None:
    farm = farm_of(1)
    farm["n001"].freeze()
    with commands(farm.cluster_yaml()) as ugro:
        ugro("agent", "start")
        with ugro.start("exec", "n001", "--", "touch", str(farm.directory / "ran")) as running:
            wait_until(lambda: running_commands(ugro) == 1)
            running.send_signal(signal.SIGINT)
            assert running.wait(5) == 130
        farm["n001"].thaw()
        wait_until(lambda: ugro("exec", "n001", "--", "true").returncode == 0, 30, "the node to be back")
        assert not (farm.directory / "ran").exists()


def restart(ugro: Ugro, farm: SshdFarm, name: str) -> None:
    farm[name].start()
    wait_until(lambda: ugro("exec", name, "--", "true").returncode == 0, 30, f"{name} to be back")


def agent_pid(ugro: Ugro) -> int:
    return int(json.loads(ugro("agent", "status", "--json").stdout)["agent"]["pid"])


def running_commands(ugro: Ugro) -> int:
    return int(json.loads(ugro("agent", "status", "--json").stdout)["agent"]["running_commands"])


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""

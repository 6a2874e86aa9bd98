"""The rig must be true: what other tests conclude from it is worth no more than this."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rig import netns
from tests.rig.sshd import Farm, SshdFarm, SshdNode
from tests.rig.waiting import is_alive, processes_with, wait_until

# Everybody else notices when the rig is wrong: these say what it is.
pytestmark = pytest.mark.proof

SHELLS = [
    pytest.param(shell, marks=pytest.mark.skipif(not Path(shell).exists(), reason=f"not installed: {shell}"))
    for shell in ("/bin/bash", "/bin/dash", "/usr/bin/fish", "/usr/bin/tcsh")
]


def test_twenty_nodes_answer_each_from_its_own_home(tmp_path: Path) -> None:
    with SshdFarm(tmp_path, count=20) as farm, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda node: ssh(farm, node, 'echo "$HOME" && pwd'), farm.nodes))
        homes = [str(node.home) for node in farm.nodes]
        assert [answer.stdout.split() for answer in answers] == [[home, home] for home in homes]
        assert len({(node.host, node.port, node.public_key) for node in farm.nodes}) == 20


def test_a_session_sees_a_clean_environment(tmp_path: Path) -> None:
    with SshdFarm(tmp_path, count=1) as farm:
        lines = ssh(farm, farm.nodes[0], "env").stdout.splitlines()
        variables = dict(line.split("=", 1) for line in lines)
        assert variables["PATH"] == "/usr/local/bin:/usr/bin:/bin"
        assert variables["SSH_CONNECTION"].endswith(f"{farm.nodes[0].host} {farm.nodes[0].port}")
        assert variables["SSH_ORIGINAL_COMMAND"] == "env"
        set_by_bash = {"PWD", "SHLVL", "_"}
        set_by_sshd = {"HOME", "USER", "LOGNAME", "SHELL", "PATH", "SSH_CLIENT", "SSH_CONNECTION"}
        assert set(variables) == {*set_by_bash, *set_by_sshd, "SSH_ORIGINAL_COMMAND"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_prints_the_banner_twice_and_runs_the_command(tmp_path: Path, shell: str) -> None:
    with SshdFarm(tmp_path, count=1, shell=shell, banner="mind the gap\n") as farm:
        answer = ssh(farm, farm.nodes[0], "sh -c 'cat /proc/$PPID/comm'; echo $SHELL; exit 7")
        assert answer.stdout.splitlines() == ["mind the gap", Path(shell).name, shell]
        assert answer.stderr == "mind the gap\n"
        assert answer.returncode == 7
        farm.nodes[0].configure(banner="")
        assert ssh(farm, farm.nodes[0], "echo only this").stdout == "only this\n"


@pytest.mark.parametrize("wrapped", [True, False])
def test_bash_reads_the_bashrc_of_the_node(tmp_path: Path, wrapped: bool) -> None:
    with SshdFarm(tmp_path, count=1, wrapped=wrapped) as farm:
        (farm.nodes[0].home / ".bashrc").write_text("echo from the rc file\n")
        assert ssh(farm, farm.nodes[0], 'echo "$HOME"').stdout.splitlines() == [
            "from the rc file",
            str(farm.nodes[0].home),
        ]


def test_a_node_without_python_has_every_other_command(tmp_path: Path) -> None:
    with SshdFarm(tmp_path, count=1, python=False) as farm:
        answer = ssh(farm, farm.nodes[0], "command -v python3 python python3.11 pypy3 uv tar")
        assert [Path(found).name for found in answer.stdout.split()] == ["tar"]


def test_a_node_can_have_one_python_only(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "python3").write_text("#!/bin/sh\necho Python 3.4.0\n")
    (old / "python3").chmod(0o755)
    with SshdFarm(tmp_path, count=1, python_path=old) as farm:
        assert ssh(farm, farm.nodes[0], "python3 --version; command -v python3.11").stdout == "Python 3.4.0\n"


def test_a_read_only_home_cannot_be_written_even_by_root(tmp_path: Path) -> None:
    with SshdFarm(tmp_path, count=1, home_mode=0o555) as farm:
        answer = ssh(farm, farm.nodes[0], "mkdir work")
        assert answer.returncode == 1
        assert "Permission denied" in answer.stderr
        farm.nodes[0].configure(home_mode=0o755)
        assert ssh(farm, farm.nodes[0], "mkdir work").returncode == 0


def test_a_frozen_node_hangs_and_goes_on_after_a_thaw(tmp_path: Path) -> None:
    with SshdFarm(tmp_path, count=1) as farm, open_session(farm, farm.nodes[0]) as session:
        farm.nodes[0].freeze()
        assert not says_back(session, b"into the void\n", timeout_s=0.5)
        assert "banner exchange" in ssh(farm, farm.nodes[0], "true", "-oConnectTimeout=1").stderr
        farm.nodes[0].thaw()
        assert says_back(session, b"awake\n", timeout_s=10)


def test_a_stopped_node_refuses_and_comes_back_at_the_same_address(tmp_path: Path) -> None:
    with SshdFarm(tmp_path, count=1) as farm, open_session(farm, farm.nodes[0]) as session:
        farm.nodes[0].stop()
        assert session.wait(10) == 255
        assert "Connection refused" in ssh(farm, farm.nodes[0], "true").stderr
        farm.nodes[0].start()
        assert ssh(farm, farm.nodes[0], "echo back").stdout == "back\n"


def test_killing_only_sshds_part_of_a_session_leaves_its_command_to_notice(tmp_path: Path) -> None:
    with SshdFarm(tmp_path, count=1) as farm:
        node = farm.nodes[0]
        with open_session(farm, node, "cat; echo noticed >> fate; exec sleep 100") as session:
            assert len(node.sessions()) >= 2
            node.kill_sessions(commands=False)
            assert session.wait(10) == 255
            wait_until((node.home / "fate").exists, what="the command to see the end of its input")
            assert node.sessions() == []
            [left] = node.processes()
            node.power_off()
            assert not is_alive(left)


def test_a_changed_host_key_is_refused_until_it_is_trusted(tmp_path: Path) -> None:
    with SshdFarm(tmp_path, count=2) as farm:
        farm.nodes[0].change_host_key()
        assert "HOST IDENTIFICATION HAS CHANGED" in ssh(farm, farm.nodes[0], "true").stderr
        assert ssh(farm, farm.nodes[1], "echo same").stdout == "same\n"
        farm.trust(farm.nodes)
        assert ssh(farm, farm.nodes[0], "echo trusted").stdout == "trusted\n"


def test_keys_can_be_refused_and_accepted_again(tmp_path: Path) -> None:
    with SshdFarm(tmp_path, count=1) as farm:
        farm.nodes[0].refuse_keys()
        assert "Permission denied" in ssh(farm, farm.nodes[0], "true").stderr
        farm.nodes[0].accept_keys()
        assert ssh(farm, farm.nodes[0], "echo open").stdout == "open\n"


def test_max_startups_can_be_lowered(tmp_path: Path) -> None:
    with SshdFarm(tmp_path, count=1, max_startups="1:100:1") as farm:
        with socket.create_connection((farm.nodes[0].host, farm.nodes[0].port), timeout=10) as hung:
            assert hung.recv(4) == b"SSH-"
            assert ssh(farm, farm.nodes[0], "true").returncode == 255
        wait_until(lambda: ssh(farm, farm.nodes[0], "true").returncode == 0, what="room for a login again")


def test_nothing_is_left_after_the_exit_not_even_what_left_its_session(tmp_path: Path) -> None:
    with SshdFarm(tmp_path, count=2) as farm, open_session(farm, farm.nodes[0]):
        # The child has neither the session nor the environment of the node any more.
        detach = "setsid sh -c 'env -i sleep 1000 & echo $$ $! > pids; wait' >/dev/null 2>&1 </dev/null &"
        ssh(farm, farm.nodes[1], detach)
        pids = farm.nodes[1].home / "pids"
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), what="the detached to run")
        running = [*farm.nodes[0].processes(), *map(int, pids.read_text().split())]
        assert len(running) >= 4
        assert all(map(is_alive, running))
    assert not any(map(is_alive, running))
    assert processes_with(os.fsencode(tmp_path)) == []


def test_nothing_is_left_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), SshdFarm(tmp_path, count=2):
        raise ZeroDivisionError
    assert processes_with(os.fsencode(tmp_path)) == []


def test_a_failed_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    lines = ("NoSuchOption yes",)
    with pytest.raises(RuntimeError, match="NoSuchOption"), SshdFarm(tmp_path, count=3, sshd_lines=lines):
        pass
    assert processes_with(os.fsencode(tmp_path)) == []


def test_the_cluster_file_names_all_nodes_and_the_ssh_configuration(tmp_path: Path) -> None:
    with SshdFarm(tmp_path, count=2) as farm:
        file = farm.cluster_yaml(name="lab", nodes={"n002": {"labels": ["slow"]}})
        assert yaml.safe_load(file.read_text()) == {
            "ssh": {"config_file": str(farm.ssh_config)},
            "nodes": {
                "n001": {"remote_root": str(farm.nodes[0].home / "grid_workspace")},
                "n002": {"remote_root": str(farm.nodes[1].home / "grid_workspace"), "labels": ["slow"]},
            },
            "name": "lab",
        }


@pytest.mark.parametrize("way", list(netns.Way))
def test_a_cut_cable_swallows_packets_and_a_healed_one_goes_on(tmp_path: Path, way: netns.Way) -> None:
    if reason := netns.available():
        pytest.skip(reason)
    with netns.NetnsFarm(tmp_path, count=1) as farm, open_session(farm, farm.nodes[0]) as session:
        farm.nodes[0].cut(way)
        assert not says_back(session, b"into the void\n", timeout_s=0.5)
        assert "timed out" in ssh(farm, farm.nodes[0], "true", "-oConnectTimeout=1").stderr
        farm.nodes[0].heal()
        assert says_back(session, b"healed\n", timeout_s=20)
        namespace = farm.nodes[0].cable.namespace
        assert Path("/run/netns", namespace).exists()
    assert not Path("/run/netns", namespace).exists()


def test_waiting_in_vain_tells_the_last_value_seen() -> None:
    with pytest.raises(AssertionError, match=r"waited 0\.15 s for snow; last seen: \[\]"):
        wait_until(list, timeout_s=0.05, what="snow")


def test_processes_are_found_by_environment_and_by_command_line() -> None:
    mark = f"mark-{os.getpid()}"
    argv = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(argv, stdin=subprocess.PIPE, env={"MARK": mark}) as by_environment,
        subprocess.Popen([*argv, mark], stdin=subprocess.PIPE) as by_command_line,
    ):
        try:
            # A child shows its own command line only once it has executed.
            expected = {by_environment.pid, by_command_line.pid}
            wait_until(lambda: set(processes_with(mark.encode())) == expected, what="both to be found")
        finally:
            by_environment.kill()
            by_command_line.kill()


def ssh(farm: Farm[Any], node: SshdNode, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    argv = farm.ssh_argv(node, command)
    argv[1:1] = options
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)


@contextmanager
def open_session(farm: Farm[Any], node: SshdNode, command: str = "cat") -> Iterator[subprocess.Popen[bytes]]:
    argv = farm.ssh_argv(node, command)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as session:
        try:
            assert says_back(session, b"hello\n", timeout_s=10)
            yield session
        finally:
            session.kill()


def says_back(session: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bool:
    """Whether ``line`` comes back from a ``cat`` in time; lines sent before it may come first."""
    assert session.stdin is not None
    assert session.stdout is not None
    session.stdin.write(line)
    session.stdin.flush()
    said = b""
    while not said.endswith(line):
        ready, _, _ = select.select([session.stdout], [], [], timeout_s)
        if not ready or not (piece := os.read(session.stdout.fileno(), 4096)):
            return False
        said += piece
    return True

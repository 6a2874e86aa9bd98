"""Jobs in the accounts of their users: real sshds, each with accounts of its own. The user of these jobs is root's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.rig import agent as rig
from tests.rig.accounts import FIRST_UID, AccountsFarm
from tests.rig.waiting import is_alive, processes_with_variable, wait_until
from ugro.client.client import Client
from ugro.client.tunnel import Dialer, NodeStream
from ugro.kernel.support import process as crashpoint

ACCOUNT = "lab-{user}"
MINE = "lab-root"
WAITS = """
echo "$(id -un) $UGRO_ATTEMPT" >> ~/began
until [ -e ~/go ]; do sleep 0.05; done
echo done
id -un > made.txt
"""

NODE_PYTHON = "/usr/bin/python3"
LISTENS = """
import getpass, os, pathlib, socket
listener = socket.socket(socket.AF_UNIX)
os.chdir(os.environ["UGRO_RUN_DIR"])  # the whole path is too long for a socket
listener.bind("hello")
listener.listen()
pathlib.Path.home().joinpath("began").write_text("once")
connection, _ = listener.accept()
connection.sendall(getpass.getuser().encode())
"""


def personal(farm: AccountsFarm, **more: Any) -> Path:
    nodes = {node.name: {"remote_root": "~/grid_workspace"} for node in farm.nodes}
    return farm.cluster_yaml(team={"account": ACCOUNT}, nodes=nodes, **more)


@pytest.fixture
def one(farm_of: Farms, ugro: Ugro) -> AccountsFarm:
    farm = farm_of.with_accounts([MINE])
    ugro.cluster = personal(farm)
    return farm


def submit(ugro: Ugro, *words: str, script: str = WAITS) -> int:
    done = ugro("run", "--json", "--detach", "--no-sync", "--stop-grace", "1s", *words, "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["job"]["id"])


def talk(client: Client, number: int) -> NodeStream:
    return Dialer(client, "n001", job=number, socket="hello")()


def job(ugro: Ugro, number: int) -> dict[str, Any]:
    return dict(json.loads(ugro("status", str(number), "--json").stdout)["job"])


def until(ugro: Ugro, number: int, *states: str, limit_s: float = 60) -> dict[str, Any]:
    wait_until(lambda: job(ugro, number)["state"] in states, limit_s, f"job {number} to be {states}")
    return job(ugro, number)


def began(farm: AccountsFarm) -> list[str]:
    file = farm["n001"].home_of(MINE) / "began"
    return file.read_text().splitlines() if file.exists() else []


def go(farm: AccountsFarm) -> None:
    (farm["n001"].home_of(MINE) / "go").touch()


def ranks(farm: AccountsFarm) -> list[int]:
    theirs = processes_with_variable("HOME", [str(farm["n001"].home_of(MINE))])
    return [pid for pid in theirs if b"until [ -e" in command_of(pid)]


def denials(farm: AccountsFarm, node: str) -> int:
    """How often the server has let somebody without an account try."""
    return sum(line.startswith(f"Invalid user {MINE}") for line in farm[node].log.splitlines())


def command_of(pid: int) -> bytes:
    """Empty if it has ended meanwhile."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_a_job_runs_in_its_users_account_and_its_results_are_collected(one: AccountsFarm, ugro: Ugro) -> None:
    go(one)
    done = ugro("run", "--name", "mine", "--", "sh", "-c", WAITS)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert began(one) == [f"{MINE} 1"]
    node = one["n001"]
    assert (node.home_of(MINE) / "grid_workspace").stat().st_uid == FIRST_UID
    found = job(ugro, 1)
    assert found["nodes"] == [{"name": "n001", "gpus": [], "account": MINE}]
    made = wait_until(lambda: list(ugro.home.glob("jobs/1/**/made.txt")), 30, "its results")
    assert made[0].read_text() == f"{MINE}\n"
    runs = "grid_workspace/.ugro/agents/*/runs/*"
    wait_until(lambda: not list(node.home_of(MINE).glob(runs)), 30, "its run directory to be removed")
    assert not list(node.home.glob(runs)), "nothing of it is in the account of the node's entry"
    for name in ("n001", f"{MINE}@n001"):
        assert ugro("logs", "1", "--node", name).stdout == "done\n"
    assert "it ran on n001\n" in ugro("logs", "1", "--node", "n002").stderr
    health = json.loads(ugro("health", "--json").stdout)["nodes"]
    assert [(one["name"], one["status"]) for one in health] == [("n001", "healthy")], "a login is no node of its own"


@pytest.mark.proof
def test_code_that_is_sent_by_hand_goes_where_a_job_looks_for_it(one: AccountsFarm, ugro: Ugro) -> None:
    (ugro.home / "cwd" / "train.py").write_text("print(1)\n")
    for words in (("sync", "--dry-run"), ("sync",)):
        done = ugro(*words, "--json")
        assert done.returncode == 0, done.stderr
        assert [one["node"] for one in json.loads(done.stdout)["nodes"]] == ["n001"]
    packs, node = "grid_workspace/.ugro/contents/packs/*", one["n001"]
    assert list(node.home_of(MINE).glob(packs))
    assert not list(node.home.glob(packs)), "nothing of it is in the account of the node's entry"


@pytest.mark.proof
def test_the_next_agent_finds_a_job_in_its_users_account_and_starts_it_once(one: AccountsFarm, ugro: Ugro) -> None:
    number = submit(ugro)
    until(ugro, number, "running")
    rig.end_agent(ugro.home)
    assert until(ugro, number, "running")["attempt"] == 1
    go(one)
    assert until(ugro, number, "succeeded", "failed")["state"] == "succeeded"
    assert began(one) == [f"{MINE} 1"]


@pytest.mark.proof
@pytest.mark.parametrize(
    "point", ["start.recorded", "start.planned", "start.asked", "start.answered", "conclude.begun", "conclude.recorded"]
)
def test_an_agent_that_is_killed_at_a_step_starts_a_job_in_an_account_once(
    one: AccountsFarm, ugro: Ugro, point: str
) -> None:
    assert ugro("agent", "start", env={crashpoint.VARIABLE: point}).returncode == 0
    agent = rig.holder(ugro.home)
    assert agent is not None
    number = submit(ugro)
    if not point.startswith("start"):
        wait_until(lambda: began(one), 30, "it to begin")
        until(ugro, number, "running")
        go(one)
    wait_until(lambda: not is_alive(agent), 30, f"the agent to be killed at {point}")
    go(one)
    assert until(ugro, number, "succeeded", "failed")["state"] == "succeeded"
    assert began(one) == [f"{MINE} 1"]
    runs = "grid_workspace/.ugro/agents/*/runs/*"
    wait_until(lambda: not list(one["n001"].home_of(MINE).glob(runs)), 30, "its run directory to be removed")


@pytest.mark.proof
def test_a_cut_link_to_the_account_is_mended_and_the_log_is_whole(one: AccountsFarm, ugro: Ugro) -> None:
    number = submit(ugro)
    until(ugro, number, "running")
    wait_until(lambda: began(one), 30, "it to begin")
    one["n001"].kill_sessions()
    go(one)
    assert until(ugro, number, "succeeded", "failed")["state"] == "succeeded"
    assert ugro("logs", str(number)).stdout.endswith("done\n")
    assert began(one) == [f"{MINE} 1"]


@pytest.mark.proof
def test_a_cancelled_job_leaves_no_process_in_the_account(one: AccountsFarm, ugro: Ugro) -> None:
    number = submit(ugro)
    wait_until(lambda: began(one), 30, "it to begin")
    assert ugro("cancel", str(number)).returncode == 0
    until(ugro, number, "cancelled")
    assert not ranks(one)


def test_a_job_goes_to_the_node_that_its_user_can_log_in_to(farm_of: Farms, ugro: Ugro) -> None:
    farm = farm_of.with_accounts(["somebody"], [MINE], ["somebody"])
    ugro.cluster = personal(farm)
    done = ugro("run", "--no-sync", "--", "sh", "-c", "id -un")
    assert (done.returncode, done.stdout) == (0, f"{MINE}\n"), done.stderr
    assert [node["name"] for node in job(ugro, 1)["nodes"]] == ["n002"]


@pytest.mark.proof
def test_a_job_of_somebody_who_can_log_in_nowhere_waits_and_says_so_until_there_is_an_account(
    farm_of: Farms, ugro: Ugro
) -> None:
    farm = farm_of.with_accounts(["somebody"])
    ugro.cluster = personal(farm)
    go_home = farm["n001"]
    number = submit(ugro, script="id -un")
    words = f"n001 cannot be reached as {MINE}: "
    wait_until(lambda: words in ugro("why", str(number)).stdout.replace("\n", " "), 60, words)
    assert job(ugro, number)["state"] == "queued"
    go_home.give("somebody", MINE)

    def has_run() -> bool:
        assert ugro("doctor", "n001").returncode in (0, 1)  # has it tried now
        return job(ugro, number)["state"] in ("succeeded", "failed")

    wait_until(has_run, 60, "it to run")
    assert until(ugro, number, "succeeded", "failed")["state"] == "succeeded"


@pytest.mark.proof
def test_a_killed_rank_is_retried_in_the_same_account(one: AccountsFarm, ugro: Ugro) -> None:
    number = submit(ugro)
    wait_until(lambda: began(one), 30, "it to begin")
    for pid in ranks(one):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(began(one)) == 2, 60, f"a second attempt; {began(one)}")
    go(one)
    assert until(ugro, number, "succeeded", "failed")["attempt"] == 2
    assert began(one) == [f"{MINE} 1", f"{MINE} 2"]


@pytest.mark.proof
def test_a_login_is_no_node_that_people_can_name(one: AccountsFarm, ugro: Ugro) -> None:
    submit(ugro)
    wait_until(lambda: began(one), 30, "it to begin")
    login = f"{MINE}@n001"
    for words in (["exec", login, "--", "id"], ["node", "drain", login], ["node", "show", login], ["health", login]):
        done = ugro(*words)
        assert done.returncode != 0, (words, done.stdout)
        assert f"no node '{login}'" in done.stderr, (words, done.stderr)
    go(one)


@pytest.mark.proof
def test_a_run_that_was_given_up_in_an_account_ends_when_its_node_is_back(farm_of: Farms, ugro: Ugro) -> None:
    farm = farm_of.with_accounts([MINE], ["somebody"])
    ugro.cluster = personal(farm)
    number = submit(ugro, "--only", "n001")
    wait_until(lambda: ranks(farm), 30, "it to run")
    whole = ugro.cluster.read_text()
    assert ugro("node", "rm", "n001", "--force").returncode == 0
    assert ugro("cancel", str(number)).returncode == 0
    assert "cannot be asked under this name any more" in until(ugro, number, "cancelled")["reason"]
    assert ranks(farm), "nobody could end it"
    ugro.cluster.write_text(whole)
    wait_until(lambda: not ranks(farm), 60, "it to be ended")


@pytest.mark.proof
def test_a_job_whose_account_was_taken_away_can_be_cancelled_and_ends_when_the_account_is_back(
    farm_of: Farms, ugro: Ugro
) -> None:
    farm = farm_of.with_accounts([MINE])
    ugro.cluster = personal(farm)
    number = submit(ugro)
    wait_until(lambda: ranks(farm), 30, "it to run")
    farm["n001"].give()
    farm["n001"].kill_sessions(commands=False)
    until(ugro, number, "unreachable")
    assert ugro("cancel", str(number)).returncode == 0
    wait_until(lambda: job(ugro, number)["state"] == "cancelled", 120, "it to be refused for a minute")
    assert "cannot be asked under this name any more" in job(ugro, number)["reason"]
    assert ranks(farm), "nobody could end it"
    farm["n001"].give(MINE)

    def is_ended() -> bool:
        assert ugro("doctor", "n001").returncode in (0, 1)
        return not ranks(farm)

    wait_until(is_ended, 60, "it to be ended")


@pytest.mark.proof
def test_a_login_that_is_denied_for_a_moment_does_not_free_what_a_cancelled_job_holds(
    one: AccountsFarm, ugro: Ugro
) -> None:
    number = submit(ugro)
    wait_until(lambda: ranks(one), 30, "it to run")
    one["n001"].give()
    one["n001"].kill_sessions(commands=False)
    until(ugro, number, "unreachable")
    assert ugro("cancel", str(number)).returncode == 0
    wait_until(lambda: job(ugro, number)["state"] == "stopping", 30, "it to be asked to end")
    one["n001"].give(MINE)
    assert "cannot be asked" not in until(ugro, number, "cancelled", limit_s=120)["reason"]
    assert not ranks(one)


@pytest.mark.proof
def test_somebody_without_an_account_is_not_tried_again_and_again(farm_of: Farms, ugro: Ugro) -> None:
    farm = farm_of.with_accounts(["somebody"], ["somebody"])
    for node in farm.nodes:
        node.configure(sshd_lines=("LogLevel VERBOSE",))
        node.stop()
        node.start()
    ugro.cluster = personal(farm)
    number = submit(ugro, "--only", "n001", script="id -un")
    wait_until(lambda: denials(farm, "n001"), 60, "it to be denied")
    asked_until = time.monotonic() + 15
    while time.monotonic() < asked_until:  # people look, and nothing of that dials
        assert "cannot be reached as" in ugro("why", str(number)).stdout.replace("\n", " ")
        assert ugro("health", "n001").returncode in (0, 1)
    assert (denials(farm, "n001"), denials(farm, "n002")) == (1, 0)


@pytest.mark.proof
def test_a_job_in_an_account_is_talked_to_by_the_name_of_its_node(one: AccountsFarm, ugro: Ugro) -> None:
    number = submit(ugro, script=f"exec {NODE_PYTHON} -c '{LISTENS}'")
    wait_until(lambda: began(one), 30, "it to listen")
    with Client(home=ugro.home, cluster=ugro.cluster) as client, talk(client, number) as way:
        assert way.recv(100) == MINE.encode()
    assert until(ugro, number, "succeeded", "failed")["state"] == "succeeded"


def test_a_mistake_in_the_configuration_is_one_error_with_its_place(ugro: Ugro, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text('nodes: {gpu1: {account: "{user}"}}\nremote_root: /data/ugro\n')
    done = ugro("--cluster", str(file), "health")
    assert done.returncode == 2
    assert f"{file}:1: nodes: jobs on gpu1 run in accounts of their users, who cannot share" in done.stderr
    assert "/data/{user}/ugro" in done.stderr
    file.write_text("nodes: {gpu1: {account: ann}}\n")
    done = ugro("--cluster", str(file), "health")
    assert 'expected a name with {user} in it, such as "{user}", got "ann"' in done.stderr

"""Machines that are found: shown, added, joining by themselves, leaving. Never one whose key nobody has accepted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import Farms, Ugro
from tests.integration.discovery import LIMIT_S, NO_KEY, Lab, document, eventually, found, nodes
from tests.integration.sharing import commands
from tests.rig import zookeeper
from tests.rig.agent import end_agent
from tests.rig.sleeping import Beds
from tests.rig.sshd import SshdFarm, SshdNode
from tests.rig.waiting import wait_until
from tests.rig.zookeeper import ZooKeeperServer


@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    with ExitStack() as stack:
        yield Farms(stack)(3)


# --- join: ask -----------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(farm: SshdFarm) -> Iterator[tuple[Ugro, Lab]]:
    lab = Lab(farm)
    lab.accept(farm["n001"])
    lab.list(*farm.nodes[:2])
    with commands(lab.cluster) as ugro:
        yield ugro, lab


def test_machines_that_are_found_are_shown_and_those_with_a_known_key_are_added(asked: tuple[Ugro, Lab]) -> None:
    ugro, lab = asked
    one, two, _ = lab.farm.nodes
    answer = ugro("node", "discover")
    assert answer.returncode == 0, answer.stderr
    header, *rows = [line.split("\t") for line in answer.stdout.splitlines()]
    assert header == ["name", "standing", "target", "source", "hardware", "labels", "note"]
    assert [row[:4] for row in rows] == [
        [node.name, "new", f"{node.host}:{node.port}", "command"] for node in (one, two)
    ]
    assert " cores, " in rows[0][4]
    assert [rows[0][6], *rows[1][4:]] == ["", "", "found", NO_KEY.format("n002")]
    assert not two.processes(), "nobody logged in there"

    added = ugro("node", "discover", "--add")
    assert "added to the cluster file: n001\n" in added.stderr
    assert "not added, because host keys are not known: n002;" in added.stderr
    assert yaml.safe_load(lab.cluster.read_text())["nodes"] == {
        "n001": {"host": one.host, "port": one.port, "labels": ["found"]}
    }
    seen = found(ugro, "n001")["n001"]
    assert (seen["standing"], seen["node"], seen["report"]["status"]) == ("node", "n001", "healthy")

    unknown = ugro("node", "discover", "n009")
    assert (unknown.returncode, unknown.stderr.splitlines()[0]) == (4, "error: no source lists a machine named n009")
    lab.registry.write_text('[{"name": "-oProxyCommand=x"}, "gpu1 ; id"]')
    odd = ugro("node", "discover")
    assert odd.returncode == 0
    assert odd.stderr.count("warning: command: not usable: ") == 2
    lab.registry.unlink()
    down = ugro("node", "discover")
    assert down.returncode == 1
    assert "command cannot be read, what it listed before stays: cat ended with exit code 1" in down.stderr


@pytest.mark.proof
def test_keys_are_accepted_by_name_one_by_one_or_with_the_machines(asked: tuple[Ugro, Lab]) -> None:
    ugro, lab = asked
    lab.list(*lab.farm.nodes)
    trusted = ugro("node", "trust", "n002", "--yes")
    assert trusted.returncode == 0, trusted.stderr
    assert found(ugro, "n002")["n002"]["report"]["status"] == "healthy"
    accepted = ugro("node", "discover", "--add", "--accept-new", "n003")
    assert accepted.returncode == 0, accepted.stderr
    assert list(nodes(ugro)) == ["n003"], "the others were not named"
    lab.registry.unlink()
    assert "discovery command" in ugro("doctor").stdout
    lab.cluster.write_text("nodes: {here: {transport: local}}\n")
    none = ugro("node", "discover")
    assert none.returncode == 4
    assert "discovery: {mdns: _ssh._tcp}" in none.stderr


# --- join: auto ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ugro(farm: SshdFarm) -> Iterator[Ugro]:
    lab = Lab(farm, join="auto")
    with commands(lab.cluster) as made:
        yield made


@pytest.fixture
def lab(farm: SshdFarm, ugro: Ugro) -> Lab:
    made = Lab(farm, join="auto")
    made.accept(*farm.nodes)
    return made


def joined(ugro: Ugro, *names: str) -> Callable[[], bool]:
    return lambda: sorted(nodes(ugro)) == sorted(names)


@pytest.mark.proof
def test_a_machine_joins_once_its_key_is_accepted_and_never_before(ugro: Ugro, lab: Lab) -> None:
    one, two, _ = lab.farm.nodes
    lab.accept(one)
    lab.list(one, two)
    eventually(joined(ugro, "n001"), "n001 to join")
    assert nodes(ugro)["n001"]["found_by"] == "command"
    assert "found by command" in ugro("node", "ls").stdout
    seen = found(ugro)["n002"]
    assert (seen["standing"], seen["note"]) == ("new", NO_KEY.format("n002"))
    assert list(nodes(ugro)) == ["n001"]
    assert two.public_key.split()[1] not in lab.farm.known_hosts.read_text(), "ssh has accepted nothing by itself"
    assert ugro("node", "trust", "n002", "--yes").returncode == 0
    eventually(joined(ugro, "n001", "n002"), "n002 to join")
    assert "nodes" not in yaml.safe_load(lab.cluster.read_text())
    refused = ugro("node", "rm", "n001")
    assert (refused.returncode, "listed by command" in refused.stderr) == (6, True)


def run(ugro: Ugro, flag: Path) -> int:
    words = ["sh", "-c", f"until [ -e {flag} ]; do sleep 0.1; done"]
    answer = ugro("run", "-d", "--no-sync", "--json", "--", *words)
    assert answer.returncode == 0, answer.stderr
    return int(json.loads(answer.stdout)["job"]["id"])


def job(ugro: Ugro, number: int) -> Any:
    return document(ugro, "status", str(number))["job"]


def in_state(ugro: Ugro, number: int, *states: str) -> Callable[[], bool]:
    return lambda: job(ugro, number)["state"] in states


@pytest.mark.proof
def test_a_machine_joins_runs_a_job_leaves_is_drained_and_goes_when_it_is_idle(
    ugro: Ugro, lab: Lab, tmp_path: Path
) -> None:
    one = lab.farm["n001"]
    none = ugro("run", "-d", "--no-sync", "--", "true")
    assert (none.returncode, none.stderr) == (3, "error: there are no nodes\nhint:  see: ugro node discover\n")
    lab.list(one)
    eventually(joined(ugro, "n001"), "n001 to join")
    first = run(ugro, tmp_path / "first")
    eventually(in_state(ugro, first, "running"), "the job to run")

    lab.list()
    eventually(lambda: nodes(ugro)["n001"]["drained"], "n001 to be drained")
    assert nodes(ugro)["n001"]["drained"] == "no longer listed by command"
    second = run(ugro, tmp_path / "second")
    assert "n001 is drained: no longer listed by command" in ugro("why", str(second)).stdout
    refused = ugro("node", "resume", "n001")
    assert (refused.returncode, "no longer listed by command" in refused.stderr) == (6, True)
    assert found(ugro)["n001"]["standing"] == "left"

    # A registry that is down changes nothing, also for the next agent.
    lab.registry.write_text("oops")
    end_agent(ugro.home)
    assert list(nodes(ugro)) == ["n001"]
    assert job(ugro, first)["state"] in ("running", "unreachable")
    eventually(in_state(ugro, first, "running"), "the job to be found again")
    assert "its output is not JSON; nodes that it listed stay" in ugro("doctor").stdout

    lab.list()
    (tmp_path / "first").touch()
    eventually(in_state(ugro, first, "succeeded"), "the job to end")
    eventually(joined(ugro), "n001 to be gone")
    assert job(ugro, second)["state"] == "queued"

    lab.list(one)
    (tmp_path / "second").touch()
    eventually(in_state(ugro, second, "succeeded"), "the second job to run on n001")
    assert job(ugro, second)["attempt"] == 1


@pytest.mark.proof
def test_a_machine_that_left_is_removed_only_after_the_files_of_its_last_job_are_here(
    ugro: Ugro, lab: Lab, tmp_path: Path
) -> None:
    lab.list(lab.farm["n001"])
    eventually(joined(ugro, "n001"), "n001 to join")
    flag = tmp_path / "flag"
    (ugro.home / "cwd" / "write.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.05)\n"
        "for number in range(1500): open(f'{number}.bin', 'wb').write(os.urandom(1 << 17))\n"
    )
    answer = ugro("run", "-d", "--json", "--", "python3", "write.py")
    number = int(json.loads(answer.stdout)["job"]["id"])
    eventually(in_state(ugro, number, "running"), "the job to run")
    lab.list()
    eventually(lambda: nodes(ugro)["n001"]["drained"], "n001 to be drained")
    flag.touch()
    wait_until(joined(ugro), 4 * LIMIT_S, "n001 to be gone")
    assert job(ugro, number)["state"] == "succeeded"
    assert len(list((ugro.home / "jobs" / str(number)).glob("*.bin"))) == 1500


@pytest.mark.proof
def test_machines_that_do_not_answer_do_not_keep_others_from_joining(ugro: Ugro, lab: Lab) -> None:
    tree = yaml.safe_load(lab.cluster.read_text())
    tree["discovery"]["most"] = 1
    lab.cluster.write_text(yaml.safe_dump(tree))
    one = lab.farm["n001"]
    dead = [{"name": f"a{number}", "host": one.host, "port": 1} for number in range(3)]
    lab.registry.write_text(json.dumps([*dead, {"name": "n001", "host": one.host, "port": one.port}]))
    eventually(joined(ugro, "n001"), "n001 to join")


@pytest.mark.proof
def test_a_node_that_may_no_longer_join_by_itself_says_so_and_is_back_when_it_may(
    ugro: Ugro, lab: Lab, tmp_path: Path
) -> None:
    lab.list(lab.farm["n001"])
    eventually(joined(ugro, "n001"), "n001 to join")
    number = run(ugro, tmp_path / "flag")
    eventually(in_state(ugro, number, "running"), "the job to run")
    text = lab.cluster.read_text()
    lab.cluster.write_text(text.replace("join: auto", "join: ask"))
    reason = "nodes of command no longer join by themselves"
    eventually(lambda: nodes(ugro)["n001"]["drained"] == reason, "n001 to be drained")
    refused = ugro("node", "resume", "n001")
    assert refused.stderr.startswith(f"error: n001: {reason}; "), "it is listed all the same"
    assert found(ugro)["n001"]["standing"] == "left"
    lab.cluster.write_text(text)
    eventually(lambda: nodes(ugro)["n001"]["drained"] is None, "n001 to take jobs again")
    (tmp_path / "flag").touch()
    eventually(in_state(ugro, number, "succeeded"), "the job to end")


@pytest.mark.proof
def test_the_first_job_of_an_agent_waits_for_machines_that_are_about_to_join(ugro: Ugro, lab: Lab) -> None:
    lab.list(lab.farm["n001"])
    (ugro.home / "cwd" / "hello.py").write_text("print('hello')\n")
    answer = ugro("run", "--", "python3", "hello.py")
    assert (answer.returncode, answer.stdout) == (0, "hello\n"), answer.stderr


@pytest.mark.proof
def test_what_a_person_drained_stays_drained_when_the_machine_is_back(ugro: Ugro, lab: Lab) -> None:
    one = lab.farm["n001"]
    lab.list(one)
    eventually(joined(ugro, "n001"), "n001 to join")
    assert ugro("node", "drain", "n001", "--reason", "new fans").returncode == 0
    lab.list()
    eventually(joined(ugro), "n001 to be gone")
    lab.list(one)
    eventually(joined(ugro, "n001"), "n001 to be back")
    assert nodes(ugro)["n001"]["drained"] == "new fans"
    assert ugro("node", "resume", "n001").returncode == 0
    assert nodes(ugro)["n001"]["drained"] is None


@pytest.mark.proof
def test_a_machine_that_registers_in_zookeeper_is_a_node_until_its_session_ends(
    farm: SshdFarm, tmp_path: Path
) -> None:
    if (reason := zookeeper.available()) is not None:
        pytest.skip(reason)
    one = farm["n001"]
    with ZooKeeperServer(tmp_path / "zookeeper") as server:
        registered = {"host": one.host, "port": one.port, "user": "nobody"}
        session = server.register("n001", registered)
        lab = Lab(farm, join="auto", command=[], zookeeper={"hosts": server.hosts})
        lab.accept(*farm.nodes)
        with commands(lab.cluster) as ugro:
            eventually(joined(ugro, "n001"), "n001 to join, as the user that ssh chooses")
            server.kill()
            eventually(lambda: "nodes that it listed stay" in ugro("doctor").stdout, "the agent to notice")
            assert list(nodes(ugro)) == ["n001"]
            server.start()
            session.stop()
            eventually(joined(ugro), "n001 to be gone")
            kinds = [line.split("\t")[2] for line in ugro("events").stdout.splitlines()]
            steps = ["node-joined", "node-left", "node-removed"]
            assert [kind for kind in kinds if kind in steps] == steps


@pytest.mark.proof
def test_a_node_that_joined_can_be_kept_in_the_cluster_file(ugro: Ugro, lab: Lab) -> None:
    one = lab.farm["n001"]
    lab.list(one)
    eventually(joined(ugro, "n001"), "n001 to join")
    assert ugro("node", "discover", "--add", "n001").returncode == 0
    lab.list()
    eventually(lambda: nodes(ugro)["n001"]["found_by"] is None, "n001 to be a node of the file")
    assert nodes(ugro)["n001"]["drained"] is None
    assert found(ugro) == {}


# --- machines that sleep -------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_machine_that_is_suspended_stays_a_node_without_being_listed_and_a_job_wakes_it() -> None:
    with ExitStack() as stack:
        farm = Farms(stack)(2)
        one, two = farm.nodes
        beds = stack.enter_context(Beds(farm, exclude=["n002"]))
        lab = Lab(farm, join="auto", keys={"power": beds.power})
        for node in farm.nodes:
            node.configure(variables=(("UGRO_PRESENCE_DEV", str(beds.dev)),))

        def suspend(node: SshdNode) -> None:
            node.stop()
            lab.list(two)

        def resume(node: SshdNode) -> None:
            lab.list(node)
            node.start()

        beds.acts = {"suspend": suspend, "resume": resume}
        lab.list(one, two)
        ugro = stack.enter_context(commands(lab.cluster))
        eventually(lambda: nodes(ugro).get("n001", {}).get("status") == "asleep", "n001 to join and to fall asleep")
        lab.list()
        eventually(joined(ugro, "n001"), "n002 to be gone, which is awake")
        end_agent(ugro.home)
        assert (nodes(ugro)["n001"]["status"], nodes(ugro)["n001"]["drained"]) == ("asleep", None)
        assert found(ugro)["n001"]["standing"] == "joined"
        done = ugro("run", "--no-sync", "--", "sh", "-c", "echo here")
        assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr
        assert beds.calls()[:2] == ["suspend n001", "resume n001"]

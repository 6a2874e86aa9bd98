"""Hooks: real receivers and real commands, an agent that is killed between two steps, and an autoscaler."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.agent import holder
from tests.rig.engines import on_each
from tests.rig.receivers import HttpReceiver, Posted, http_receiver
from tests.rig.stores import use_engine
from tests.rig.waiting import is_alive, wait_until

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 60
SECRET = "0123456789abcdef0123456789abcdef"


def document(ugro: Ugro, *words: str) -> Any:
    answer = ugro(*words, "--json")
    assert answer.stdout, answer.stderr
    return json.loads(answer.stdout)


class Place:
    """This machine as a node, a receiver, and a cluster file with hooks."""

    def __init__(self, folder: Path, ugro: Ugro, web: HttpReceiver) -> None:
        self.folder, self.ugro, self.web = folder, ugro, web
        self.secret = folder / "secret"
        self.secret.write_text(f"{SECRET}\n")
        self.file = folder / "cluster.yaml"
        ugro.cluster = self.file

    def use(self, **hooks: Any) -> None:
        nodes = {"here": {"transport": "local", "remote_root": str(self.folder / "root")}}
        self.file.write_text(yaml.safe_dump({"nodes": nodes, "hooks": hooks}))

    def posted(self, **keys: Any) -> dict[str, Any]:
        return {"call": f"{self.web.url}/hook", "secret_file": str(self.secret), **keys}

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(one.body) for one in self.web.posted]

    def received(self, count: int) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.web.posted) >= count, LIMIT_S, f"{count} calls")
        return self.bodies()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with http_receiver() as web, commands() as ugro:
        yield Place(tmp_path, ugro, web)


def check(posted: Posted) -> None:
    """As a receiver would."""
    headers = {name.lower(): value for name, value in posted.headers.items()}
    signed = headers["ugro-timestamp"].encode() + b"." + posted.body
    wanted = "sha256=" + hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
    assert headers["ugro-signature"] == wanted
    assert abs(time.time() - int(headers["ugro-timestamp"])) < 60
    assert headers["ugro-delivery"] == json.loads(posted.body)["id"]


def test_an_ended_job_is_delivered_signed_and_a_test_says_whether_it_works(place: Place) -> None:
    place.use(job_ended=place.posted(states=["failed"]))
    assert place.ugro("hooks", "test", "job_ended").returncode == 0
    assert place.ugro("run", "--", "true").returncode == 0
    assert place.ugro("run", "--", "false").returncode == 1
    [test, call] = place.received(2)
    assert (test["test"], call["test"]) == (True, False)
    assert (call["hook"], call["job"], call["state"]) == ("job_ended", 2, "failed")
    for one in place.web.posted:
        check(one)
    wait_until(
        lambda: [one["state"] for one in document(place.ugro, "hooks", "deliveries")["deliveries"]] == ["delivered"],
        LIMIT_S,
        "it to be noted",
    )
    [hook] = document(place.ugro, "hooks", "ls")["hooks"]
    assert (hook["call"], hook["last"]) == (f"{place.web.url}/…", "delivered")
    place.web.answers = [403]
    refused = place.ugro("hooks", "test", "job_ended")
    assert (refused.returncode, "answered 403" in refused.stderr) == (1, True)
    missing = place.ugro("hooks", "test", "idle")
    assert (missing.returncode, "there is no hook idle" in missing.stderr) == (4, True)
    assert SECRET not in (place.ugro.home / "agent.log").read_text()


@pytest.mark.proof
def test_what_fails_is_tried_again_in_order_with_the_same_id_and_content(place: Place) -> None:
    place.use(job_ended=place.posted())
    place.ugro("hooks", "ls")
    place.web.answers = [500, 500]
    for _ in range(2):
        place.ugro("run", "--", "true")
    calls = place.received(4)
    assert [call["job"] for call in calls] == [1, 1, 1, 2]
    assert len({one.body for one in place.web.posted[:3]}) == 1


@pytest.mark.proof
def test_a_redirect_is_not_followed_and_a_refusal_is_not_repeated(place: Place) -> None:
    place.use(job_ended=place.posted())
    place.ugro("hooks", "ls")
    place.web.answers = [302, 404]
    for _ in range(3):
        place.ugro("run", "--", "true")
    assert [call["job"] for call in place.received(3)] == [1, 2, 3]
    assert {one.path for one in place.web.posted} == {"/hook"}
    states = [one["state"] for one in document(place.ugro, "hooks", "deliveries")["deliveries"]]
    assert states[1:] == ["failed", "failed"]


@pytest.mark.proof
@on_each
@pytest.mark.parametrize("at", ["hook.sending", "hook.sent"])
def test_an_agent_that_is_killed_while_it_delivers_does_so_again(place: Place, at: str, engine: str) -> None:
    use_engine(place.ugro.home)
    place.use(job_ended=place.posted())
    place.ugro("agent", "start", env={"UGRO_AGENT_CRASH_POINT": at})
    place.ugro("hooks", "ls")
    place.ugro("run", "--detach", "--", "true")
    wait_until(lambda: holder(place.ugro.home) is None, LIMIT_S, "the agent to be killed")
    seen = len(place.web.posted)
    assert seen == (1 if at == "hook.sent" else 0)
    place.ugro("agent", "start")
    calls = place.received(seen + 1)
    assert {call["job"] for call in calls} == {1}
    assert len({call["id"] for call in calls}) == 1
    place.ugro("run", "--", "true")
    assert place.received(seen + 2)[-1]["job"] == 2


@pytest.mark.proof
def test_a_command_gets_the_call_on_stdin_and_is_ended_with_its_tree_when_it_hangs(place: Place) -> None:
    saved, pids = place.folder / "saved", place.folder / "pids"
    script = place.folder / "hook.sh"
    script.write_text(
        f'cat >> {saved}; echo >> {saved}; echo "$UGRO_HOOK $UGRO_DELIVERY"\n'
        f"setsid sleep 600 & echo $! >> {pids}; [ -e {pids}.hang ] && sleep 600; exit 0\n"
    )
    Path(f"{pids}.hang").touch()
    place.use(job_ended={"call": ["sh", str(script)], "timeout": "1s"})
    place.ugro("hooks", "ls")
    place.ugro("run", "--", "true")
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) >= 2, LIMIT_S, "a second try")
    Path(f"{pids}.hang").unlink()
    wait_until(
        lambda: document(place.ugro, "hooks", "deliveries")["deliveries"][0]["state"] == "delivered", LIMIT_S, "an end"
    )
    calls = [json.loads(line) for line in saved.read_text().splitlines() if line]
    assert len(calls) >= 3
    assert {(call["job"], call["id"]) for call in calls} == {(1, calls[0]["id"])}
    wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()), LIMIT_S, "all to be ended")
    log = (place.ugro.home / "agent.log").read_text()
    assert re.search(rf"job_ended {calls[0]['id']}", log), "what it says is logged"


@pytest.mark.proof
def test_a_long_queue_calls_once_in_its_cool_down_and_idle_nodes_are_named(place: Place) -> None:
    place.use(
        queue_longer_than=place.posted(jobs=1, **{"for": "1s"}),
        idle=place.posted(cool_down="1s", **{"for": "1s"}),
    )
    place.ugro("hooks", "ls")
    first = place.received(1)[0]
    assert (first["hook"], [one["node"] for one in first["nodes"]]) == ("idle", ["here"])
    gate = place.folder / "go"
    for _ in range(4):
        waits = f"until [ -e {gate} ]; do sleep 0.1; done"
        place.ugro("run", "--detach", "--cpus", str(_cores(place.ugro)), "--", "sh", "-c", waits)
    wait_until(lambda: [one for one in place.bodies() if one["hook"] == "queue_longer_than"], LIMIT_S, "a call")
    [call] = [one for one in place.bodies() if one["hook"] == "queue_longer_than"]
    assert (call["waiting"], call["running"], call["limit"]) == (3, 1, 1)
    assert [job["job"] for job in call["jobs"]] == [2, 3, 4]
    kept = place.ugro("node", "rm", "--if-idle", "here")
    assert (kept.returncode, "it has jobs" in kept.stderr) == (6, True)
    gate.touch()
    assert place.ugro("wait", "4").returncode == 0
    assert len([one for one in place.bodies() if one["hook"] == "queue_longer_than"]) == 1


def _cores(ugro: Ugro) -> int:
    [node] = document(ugro, "node", "ls")["nodes"]
    return int(node["machine"]["cores"])


@pytest.mark.proof
def test_a_lost_node_is_reported_once() -> None:
    with ExitStack() as stack:
        web = stack.enter_context(http_receiver())
        farm = Farms(stack)(2)
        secret = farm.directory / "secret"
        secret.write_text(SECRET)
        hook = {"call": web.url, "secret_file": str(secret), "for": "1s"}
        ugro = stack.enter_context(commands(farm.cluster_yaml(hooks={"node_lost": hook})))
        assert ugro("health").returncode in (0, 1)
        farm.nodes[1].stop()
        wait_until(lambda: web.posted, LIMIT_S, "a call")
        farm.nodes[0].stop()
        wait_until(lambda: len(web.posted) == 2, LIMIT_S, "a call about the other")
        assert [json.loads(one.body)["node"] for one in web.posted] == ["n002", "n001"]


@pytest.mark.proof
def test_the_autoscaler_adds_a_node_for_a_long_queue_and_removes_it_when_it_is_idle() -> None:
    with ExitStack() as stack:
        farm = Farms(stack)(2)
        [first, second] = farm.nodes
        secret = farm.directory / "secret"
        secret.write_text(SECRET)
        pool = farm.directory / "pool.json"
        pool.write_text(json.dumps({second.name: {"host": second.name}}))
        ugro = stack.enter_context(commands(farm.directory / "cluster.yaml"))
        scaler = subprocess.Popen(
            [
                *(sys.executable, str(ROOT / "examples" / "autoscale.py"), "--port", "0", "--secret-file", str(secret)),
                *("--pool", str(pool), "--ugro", str(Path(sys.executable).with_name("ugro"))),
            ],
            env=ugro.environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(scaler)
        stack.callback(scaler.kill)
        assert scaler.stderr is not None
        port = int(scaler.stderr.readline().split()[-1])
        hook = {"call": f"http://127.0.0.1:{port}/", "secret_file": str(secret), "cool_down": "1s"}
        nodes = {first.name: {"remote_root": str(first.home / "grid_workspace")}}
        tree = {
            "ssh": {"config_file": str(farm.ssh_config)},
            "remote_root": str(farm.directory / "shared_name"),
            "nodes": nodes,
            "hooks": {
                "queue_longer_than": {**hook, "jobs": 1, "for": "500ms"},
                "idle": {**hook, "label": "pool", "for": "2s"},
            },
        }
        (farm.directory / "cluster.yaml").write_text(yaml.safe_dump(tree))
        cores = int(document(ugro, "node", "ls")["nodes"][0]["machine"]["cores"])
        for _ in range(6):
            ugro("run", "--detach", "--cpus", str(cores), "--", "sleep", "3")
        numbers = [str(number) for number in range(1, 7)]
        assert ugro("wait", *numbers, timeout=120).returncode == 0
        jobs = [document(ugro, "status", number)["job"] for number in numbers]
        assert [one["attempt"] for one in jobs] == [1] * 6, "no job was ever stopped"
        assert {one["nodes"][0]["name"] for one in jobs} == {first.name, second.name}, "the node was added and used"
        wait_until(
            lambda: [node["name"] for node in document(ugro, "node", "ls")["nodes"]] == [first.name], LIMIT_S, "removal"
        )

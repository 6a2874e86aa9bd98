"""Machines that sleep: suspended by real commands when nobody would miss them, and woken for jobs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.agent import end_agent, holder
from tests.rig.engines import on_each
from tests.rig.person import Person
from tests.rig.receivers import http_receiver
from tests.rig.sleeping import Beds
from tests.rig.sshd import SshdFarm, SshdNode
from tests.rig.stores import use_engine
from tests.rig.waiting import wait_until
from ugro.kernel.support.commands import signature

LIMIT_S = 60


def document(ugro: Ugro, *words: str) -> Any:
    answer = ugro(*words, "--json")
    assert answer.stdout, answer.stderr
    return json.loads(answer.stdout)


def report(ugro: Ugro, node: SshdNode) -> dict[str, Any]:
    found = {one["name"]: one for one in document(ugro, "node", "ls")["nodes"]}
    one: dict[str, Any] = found[node.name]
    return one


def becomes(ugro: Ugro, node: SshdNode, *wanted: str, limit_s: float = LIMIT_S) -> None:
    wait_until(lambda: report(ugro, node)["status"] in wanted, limit_s, f"{node.name} to be {' or '.join(wanted)}")


def events(ugro: Ugro) -> list[str]:
    found = [json.loads(line)["event"] for line in ugro("events", "--json").stdout.splitlines()]
    return [one["text"] for one in found if one["kind"] == "power"]


def submitted(ugro: Ugro, *words: str) -> int:
    answer = ugro("run", "--json", "--detach", *words)
    assert answer.returncode == 0, answer.stderr
    return int(json.loads(answer.stdout)["job"]["id"])


def why(ugro: Ugro, number: int) -> str:
    found = document(ugro, "why", str(number))["why"]
    return str(found["text"]) if found else ""


def ended(ugro: Ugro, number: int) -> dict[str, Any]:
    assert ugro("wait", str(number), timeout=90).returncode == 0
    found: dict[str, Any] = document(ugro, "status", str(number))["job"]
    return found


class Place:
    def __init__(self, stack: ExitStack, nodes: int, **keys: Any) -> None:
        self.farm: SshdFarm = Farms(stack)(nodes)
        self.beds = stack.enter_context(Beds(self.farm, **keys))
        self.ugro = stack.enter_context(commands(self.beds.cluster()))

    @property
    def node(self) -> SshdNode:
        return self.farm.nodes[0]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.proof
def test_an_idle_node_falls_asleep_and_a_job_wakes_it(stack: ExitStack) -> None:
    place = Place(stack, 1)
    ugro, node = place.ugro, place.node
    becomes(ugro, node, "asleep")
    assert ugro("health").returncode == 0, "nothing is wrong with it"
    assert document(ugro, "alerts", "ls")["alerts"] == []
    assert "asleep" in ugro("node", "ls").stdout
    done = ugro("run", "--", "sh", "-c", "echo here")
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr
    assert place.beds.calls()[:2] == [f"suspend {node.name}", f"resume {node.name}"]
    told = events(ugro)
    assert told[:2] == ["going to sleep: nothing was done on it for 1.00 s", "asleep: suspended"], told
    assert told[2] == "waking: woken for job 1"
    assert told[3].startswith("awake: it was awake after ")


@pytest.mark.proof
def test_why_says_since_when_a_node_is_being_woken(stack: ExitStack) -> None:
    place = Place(stack, 1)
    may_wake = threading.Event()

    def wake_later(node: SshdNode) -> None:
        assert may_wake.wait(LIMIT_S)
        node.start()

    place.beds.acts["resume"] = wake_later
    becomes(place.ugro, place.node, "asleep")
    number = submitted(place.ugro, "--", "true")
    wait_until(lambda: f"waking {place.node.name} (since " in why(place.ugro, number), LIMIT_S, "why to say so")
    assert report(place.ugro, place.node)["status"] == "waking"
    may_wake.set()
    assert ended(place.ugro, number)["state"] == "succeeded"


@pytest.mark.proof
def test_jobs_start_on_nodes_that_are_awake_and_wake_others_only_when_those_are_full(stack: ExitStack) -> None:
    place = Place(stack, 2, exclude=["n001"])
    ugro, [awake, asleep] = place.ugro, place.farm.nodes
    becomes(ugro, asleep, "asleep")
    first = submitted(ugro, "--cpus", "2", "--", "sh", "-c", "until [ -e go ]; do sleep 0.1; done")
    wait_until(lambda: document(ugro, "status", str(first))["job"]["state"] == "running", LIMIT_S, "the first to run")
    assert document(ugro, "status", str(first))["job"]["nodes"][0]["name"] == awake.name
    assert f"resume {asleep.name}" not in place.beds.calls()
    second = submitted(ugro, "--cpus", "2", "--", "true")
    assert ended(ugro, second)["nodes"][0]["name"] == asleep.name
    ugro("cancel", str(first))
    assert f"suspend {awake.name}" not in place.beds.calls()


@pytest.mark.proof
def test_a_node_that_never_wakes_is_an_alert_and_its_job_goes_elsewhere(stack: ExitStack) -> None:
    place = Place(stack, 2, exclude=["n001"], resume_timeout="3s")
    ugro, [other, sick] = place.ugro, place.farm.nodes
    place.beds.acts["resume"] = lambda node: None
    becomes(ugro, sick, "asleep")
    ugro("node", "drain", other.name)
    number = submitted(ugro, "--", "true")
    said = "did not wake within 3.00 s"
    wait_until(lambda: said in why(ugro, number), LIMIT_S, "why to say that it did not wake")
    wait_until(lambda: document(ugro, "alerts", "ls")["alerts"], LIMIT_S, "an alert")
    [alert] = document(ugro, "alerts", "ls")["alerts"]
    assert (alert["rule"], alert["node"], said in alert["text"]) == ("power", sick.name, True)
    assert said in ugro("doctor", sick.name).stdout
    ugro("node", "resume", other.name)
    assert ended(ugro, number)["nodes"][0]["name"] == other.name
    assert place.beds.calls().count(f"resume {sick.name}") <= 3


@pytest.mark.proof
def test_a_node_that_is_woken_by_hand_is_awake(stack: ExitStack) -> None:
    place = Place(stack, 1, cool_down="1h")
    becomes(place.ugro, place.node, "healthy", "degraded")
    wait_until(lambda: _falls_asleep(place.ugro, place.node), LIMIT_S, "it to be idle")
    becomes(place.ugro, place.node, "asleep")
    place.node.start()
    becomes(place.ugro, place.node, "healthy", "degraded", limit_s=90)
    assert events(place.ugro)[-1] == "awake: it was woken by somebody else, or by itself"
    assert place.beds.calls() == [f"suspend {place.node.name}"]


@pytest.mark.proof
def test_a_node_that_is_going_to_sleep_is_not_woken_before_it_sleeps(stack: ExitStack) -> None:
    place = Place(stack, 1)
    ugro, node, may_sleep = place.ugro, place.node, threading.Event()
    sleep = place.beds.acts["suspend"]

    def sleep_later(one: SshdNode) -> None:
        assert may_sleep.wait(LIMIT_S)
        sleep(one)

    place.beds.acts["suspend"] = sleep_later
    becomes(ugro, node, "going to sleep")
    refused = ugro("node", "wake", node.name)
    may_sleep.set()
    assert "it is going to sleep" in refused.stderr, refused.stderr
    becomes(ugro, node, "asleep")
    assert ugro("node", "wake", node.name).returncode == 0
    becomes(ugro, node, "healthy", "warning")


@pytest.mark.proof
def test_a_node_that_falls_silent_without_jobs_is_taken_to_be_asleep_and_is_woken_for_one(stack: ExitStack) -> None:
    place = Place(stack, 1, suspend_after="1h")
    ugro, node = place.ugro, place.node
    place.beds.acts["resume"] = SshdNode.thaw
    becomes(ugro, node, "healthy", "degraded")
    node.freeze()
    becomes(ugro, node, "asleep", limit_s=120)
    number = submitted(ugro, "--", "true")
    assert ended(ugro, number)["state"] == "succeeded"
    assert place.beds.calls() == [f"resume {node.name}"]


@pytest.mark.proof
def test_a_node_that_falls_asleep_with_a_job_on_it_is_woken_and_the_job_goes_on(stack: ExitStack) -> None:
    place = Place(stack, 1, suspend_after="1h")
    ugro, node = place.ugro, place.node
    place.beds.acts["resume"] = SshdNode.thaw
    gate = place.farm.directory / "go"
    number = submitted(ugro, "--", "sh", "-c", f"until [ -e {gate} ]; do sleep 0.1; done; echo once")
    wait_until(lambda: document(ugro, "status", str(number))["job"]["state"] == "running", LIMIT_S, "it to run")
    node.freeze()
    place.beds.called(f"resume {node.name}", 120)
    gate.touch()
    found = ended(ugro, number)
    assert (found["state"], found["attempt"]) == ("succeeded", 1)
    assert f"it fell silent with job {number} on it" in " ".join(events(ugro))


@pytest.mark.proof
def test_a_node_that_falls_asleep_while_a_job_is_starting_is_woken_and_starts_it_once(stack: ExitStack) -> None:
    place = Place(stack, 1, suspend_after="1h")
    ugro, node = place.ugro, place.node
    place.beds.acts["resume"] = SshdNode.thaw
    ledger = place.farm.directory / "ledger"
    becomes(ugro, node, "healthy", "degraded")
    node.freeze()
    number = submitted(ugro, "--", "sh", "-c", f"echo started >> {ledger}")
    assert ended(ugro, number)["state"] == "succeeded"
    assert ledger.read_text() == "started\n"
    assert f"resume {node.name}" in place.beds.calls()


@pytest.mark.proof
def test_a_signed_webhook_suspends_and_wakes_a_node(stack: ExitStack) -> None:
    farm, web = Farms(stack)(1), stack.enter_context(http_receiver())
    secret = farm.directory / "secret"
    secret.write_text("0123456789abcdef")
    beds = Beds(farm, suspend="webhook", resume="webhook", webhook=f"{web.url}/power", secret_file=str(secret))
    stack.enter_context(beds)

    def obey() -> None:
        call = json.loads(web.posted[-1].body)
        (beds.folder / f"{call['node']}.{call['act']}").touch()

    web.before_answer = obey
    ugro = stack.enter_context(commands(beds.cluster()))
    becomes(ugro, farm.nodes[0], "asleep")
    number = submitted(ugro, "--", "true")
    assert ended(ugro, number)["state"] == "succeeded"
    assert [json.loads(one.body)["act"] for one in web.posted][:2] == ["suspend", "resume"]
    signed = {name.lower(): value for name, value in web.posted[0].headers.items()}
    assert signed["ugro-signature"] == signature(b"0123456789abcdef", signed["ugro-timestamp"], web.posted[0].body)


@pytest.mark.proof
def test_somebody_at_a_node_and_a_running_command_keep_it_awake(stack: ExitStack) -> None:
    place = Place(stack, 1, suspend_after="5s")
    ugro, node = place.ugro, place.node
    becomes(ugro, node, "healthy", "degraded")
    begun = place.farm.directory / "begun"
    # Longer than it would have to be idle.
    command = stack.enter_context(ugro.start("exec", node.name, "--", "sh", "-c", f"touch {begun}; sleep 12"))
    wait_until(begun.exists, LIMIT_S, "the command to run")
    # Until the node has said what runs there, that is the reason.
    refused = partial(ugro, "node", "sleep", node.name)
    wait_until(lambda: "it runs a command" in refused().stderr, 10, "the command to be the reason")
    with Person(place.beds.dev) as ann:
        over = threading.Event()

        def type_on() -> None:
            while not over.wait(0.2):
                ann.go_on()

        typing = threading.Thread(target=type_on)
        typing.start()
        assert command.wait(LIMIT_S) == 0
        wait_until(lambda: "is used by somebody" in ugro("node", "sleep", node.name).stderr, LIMIT_S, "her to be seen")
        over.set()
        typing.join()
    assert place.beds.calls() == []
    becomes(ugro, node, "asleep")


@pytest.mark.proof
def test_a_command_on_the_node_suspends_it_and_one_that_fails_is_said(stack: ExitStack) -> None:
    farm = Farms(stack)(2)
    [good, bad] = farm.nodes
    beds = stack.enter_context(Beds(farm, suspend="ssh", suspend_timeout="20s", cool_down="1h"))
    beds.power["on_node"] = ["touch", str(beds.folder / "{node}.suspend")]
    ugro = stack.enter_context(
        commands(beds.cluster(nodes={bad.name: {"power": {"on_node": ["sh", "-c", "echo no seat >&2; exit 3"]}}}))
    )
    for node in (good, bad):
        becomes(ugro, node, "healthy", "degraded")
        wait_until(partial(_falls_asleep, ugro, node), LIMIT_S, "it to be idle")
    becomes(ugro, good, "asleep")
    said = "could not be suspended: sh ended with exit code 3: no seat"
    wait_until(lambda: said in str(report(ugro, bad)["power"]["problem"]), LIMIT_S, "the complaint")
    assert report(ugro, bad)["status"] != "asleep"


def _falls_asleep(ugro: Ugro, node: SshdNode) -> bool:
    return ugro("node", "sleep", node.name).returncode == 0


@pytest.mark.proof
@on_each
@pytest.mark.parametrize("act", ["suspend", "resume"])
def test_an_agent_that_is_killed_between_record_and_act_leaves_no_doubt(
    stack: ExitStack, act: str, engine: str
) -> None:
    place = Place(stack, 1)
    use_engine(place.ugro.home)
    ugro, node = place.ugro, place.node
    times = {"suspend": 1, "resume": 3}[act]  # going to sleep, asleep, waking
    crash = {"UGRO_AGENT_CRASH_POINT": f"power.recorded@{times}"}
    ugro("agent", "start", env=crash)
    if act == "resume":
        becomes(ugro, node, "asleep")
        submitted(ugro, "--", "true")
    wait_until(lambda: holder(ugro.home) is None, LIMIT_S, "the agent to be killed")
    assert place.beds.calls().count(f"{act} {node.name}") == 0
    ugro("agent", "start")
    if act == "resume":
        assert ended(ugro, 1)["state"] == "succeeded"
        assert place.beds.calls()[:2] == [f"suspend {node.name}", f"resume {node.name}"]
    else:
        becomes(ugro, node, "asleep")  # after it was idle again
        assert events(ugro)[:2] == [
            "going to sleep: nothing was done on it for 1.00 s",
            "awake: its link was opened again",
        ]
        assert place.beds.calls() == [f"suspend {node.name}"]


@pytest.mark.proof
def test_what_is_asleep_stays_so_for_the_next_agent(stack: ExitStack) -> None:
    place = Place(stack, 1)
    becomes(place.ugro, place.node, "asleep")
    end_agent(place.ugro.home)
    assert report(place.ugro, place.node)["status"] == "asleep"
    number = submitted(place.ugro, "--", "true")
    assert ended(place.ugro, number)["state"] == "succeeded"

"""Services of real processes behind a real HAProxy: clients count what fails while parts are killed and replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from tests.rig import needs
from tests.rig.service import LIMIT_S, ServicePlace, words
from tests.rig.waiting import wait_until
from ugro.features.services.model import Phase, ReplicaPhase, ServiceReport
from ugro.features.services.operations import CreateServiceKey, RevokeServiceKey
from ugro.kernel.agent.operations import DrainNode
from ugro.kernel.support.errors import ConfigError, NotAllowed, UgroError

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(240),
    needs.programs("haproxy"),
]


@pytest.fixture
def place() -> Iterator[ServicePlace]:
    with ServicePlace() as made:
        yield made


def has_restarted(number: int, found: ServiceReport) -> bool:
    return any(one.number == number and one.restarts for one in found.replicas)


def nodes_of(found: ServiceReport) -> list[str]:
    return sorted(str(one.node) for one in found.replicas)


def test_a_service_spreads_over_the_nodes_answers_and_leaves_nothing(place: ServicePlace) -> None:
    found = place.start(3)
    assert nodes_of(found) == ["n1", "n2", "n3"]
    assert {place.ask_once().split()[1] for _ in range(5)} == {"one"}
    place.ask(lambda client: client.services.scale("echo", 1))
    assert len(place.settled().replicas) == 1
    assert place.ask_once("POST").endswith("one")
    place.ask(lambda client: client.services.stop("echo"))
    ended = place.until(lambda one: one.state is Phase.STOPPED)
    assert ended.replicas == ()
    states = {job.state for job in place.ask(lambda client: client.jobs.newest(None))}
    assert states == {"cancelled"}
    wait_until(lambda: not any(place.servers_of(number) for number in (1, 2, 3)), 10, "no process is left")


def test_no_request_fails_when_a_replica_is_killed_and_it_comes_back(place: ServicePlace) -> None:
    place.start(3)
    with place.load() as clients:
        clients.more(50)
        for number in (1, 2, 3):
            place.kill_replica(number)
            place.until(partial(has_restarted, number))
            place.settled()
            clients.more(50)
    assert clients.failures == []


def test_the_door_and_the_replicas_go_on_without_the_agent(place: ServicePlace) -> None:
    agent = place.agent()
    assert agent.wait_ready()
    place.start(2)
    with place.load() as clients:
        clients.more(30)
        agent.kill()
        place.kill_replica(1)
        clients.more(100)
        place.settled()  # by the next agent, with the same replicas
        clients.more(30)
    assert clients.failures == []
    assert [one.number for one in place.report().replicas] == [1, 2]


def test_a_door_that_is_killed_is_back_with_the_same_servers(place: ServicePlace) -> None:
    place.start(2)
    before = place.report().door.job
    with place.load() as clients:
        clients.more(30)
        killed = [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_haproxy(place, int(pid))]
        assert killed
        for pid in killed:
            os.kill(int(pid), signal.SIGKILL)
        wait_until(lambda: not place.ask_once().startswith("status"), 5, "an answer")
        seen = len(clients.failures)
        clients.more(50)
        assert len(clients.failures) == seen
    # What HAProxy had in its hands is lost with it, and nothing that came later.
    assert len(clients.failures) <= 8, clients.failures
    assert place.report().door.job == before


def _is_haproxy(place: ServicePlace, pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii") as comm, open(f"/proc/{pid}/environ", "rb") as environ:
            return comm.read().strip() == "haproxy" and os.fsencode(place.folder) in environ.read()
    except OSError:
        return False


def test_an_update_replaces_all_replicas_and_no_request_fails(place: ServicePlace) -> None:
    place.start(3)
    with place.load() as clients:
        clients.more(50)
        place.update("two")
        found = place.until(lambda one: one.revision == 2 and not one.update)
        place.settled()
        clients.answers.clear()
        clients.more(50)
        assert words(clients.answers) == {"two"}
    assert clients.failures == []
    assert "revision 2 serves now" in found.note


@pytest.mark.parametrize("bad", ["exits", "never-ready"])
def test_an_update_that_does_not_get_ready_is_rolled_back_and_no_request_fails(place: ServicePlace, bad: str) -> None:
    place.start(2, {"update.timeout": "4s"})
    with place.load() as clients:
        place.update(bad)
        found = place.until(lambda one: "rolled back" in one.note)
        place.settled()
        clients.more(50)
    assert clients.failures == []
    assert words(clients.answers) == {"one"}
    assert found.revision == 1
    assert ("cannot load" if bad == "exits" else "503") in found.note or "ended" in found.note


def test_a_canary_gets_its_share_until_somebody_decides(place: ServicePlace) -> None:
    place.start(2)
    with place.load() as clients:
        place.update("two", canary=0.2)
        place.until(lambda one: one.is_canary and any(seen.is_new and seen.weight for seen in one.replicas))
        clients.more(50)
        clients.answers.clear()
        clients.more(400)
        new = sum(count for text, count in clients.answers.items() if text.endswith("two"))
        assert 0.08 < new / sum(clients.answers.values()) < 0.35
        place.ask(lambda client: client.services.decide("echo", promotes=True))
        place.until(lambda one: one.revision == 2 and not one.update)
        place.settled()
        clients.answers.clear()
        clients.more(50)
        assert words(clients.answers) == {"two"}
    assert clients.failures == []


def test_replicas_move_when_their_node_is_drained_and_no_request_fails(place: ServicePlace) -> None:
    before = place.start(2)
    gone = before.replicas[0].node
    assert gone is not None
    with place.load() as clients:
        clients.more(50)
        place.ask(lambda client: client.ask(DrainNode(gone, "a test")))
        found = place.until(lambda one: gone not in nodes_of(one) and len(one.replicas) == 2 and one.ready == 2)
        clients.more(50)
    assert clients.failures == []
    assert len(set(nodes_of(found))) == 2


def test_a_crash_loop_is_failed_and_says_why_and_the_others_serve_on(place: ServicePlace) -> None:
    place.start(2, {"restart.max": 1})
    with place.load() as clients:
        clients.more(20)
        (place.code / "server.py").write_text("import sys; sys.exit('the disk is gone')")
        place.kill_replica(1)
        found = place.until(lambda one: any(seen.state is ReplicaPhase.FAILED for seen in one.replicas))
        clients.more(50)
    assert clients.failures == []
    assert found.state is Phase.DEGRADED
    [failed] = [one for one in found.replicas if one.state is ReplicaPhase.FAILED]
    assert "the disk is gone" in failed.reason


def test_a_replica_that_is_not_ready_gets_no_requests(place: ServicePlace) -> None:
    place.start(2, {"probes.ready.failures": 1, "probes.ready.interval": "200ms"})
    (place.code / "unready-1").touch()
    place.until(lambda one: any(seen.state is ReplicaPhase.UNREADY for seen in one.replicas))
    wait_until(lambda: {place.ask_once().split()[0] for _ in range(10)} == {"2"}, 20, "only replica 2 to answer")
    (place.code / "unready-1").unlink()
    place.settled()
    wait_until(lambda: {place.ask_once().split()[0] for _ in range(10)} == {"1", "2"}, 20, "both to answer")


def test_a_service_that_scales_to_zero_holds_the_request_that_wakes_it(place: ServicePlace) -> None:
    place.start({"min": 0, "max": 2, "idle": "1s"})
    assert place.report().state is Phase.IDLE
    assert place.ask_once("POST").endswith("one")
    place.until(lambda one: one.state is Phase.IDLE and one.traffic.requests >= 1)


def test_mistakes_are_refused_with_a_hint(place: ServicePlace) -> None:
    def refused(kind: type[UgroError], **options: object) -> str:
        wish = place.wish(options=options)
        with pytest.raises(kind) as error:
            place.ask(lambda client: client.services.start(wish, env={}))
        assert error.value.hint
        return str(error.value)

    assert "tls" in refused(ConfigError, bind="0.0.0.0")
    assert "keys" in refused(ConfigError, bind="0.0.0.0", keys=False, **{"tls.cert": "/c", "tls.key": "/k"})
    assert "replicas" in refused(ConfigError, replicas="many")
    place.start(1)
    assert "already" in refused(NotAllowed, port=place.port + 1)
    wish = place.wish()
    other = replace(wish, fields={**wish.fields, "name": "other"})
    with pytest.raises(NotAllowed, match="port"):
        place.ask(lambda client: client.services.start(other, env={}))


def test_a_key_lets_in_until_it_is_revoked(place: ServicePlace) -> None:
    place.start(1, {"keys": True})
    assert place.ask_once().startswith("status 401")
    created = place.ask(lambda client: client.ask(CreateServiceKey("echo", "a test")))
    made, secret = created.key, created.secret

    def answered() -> str:
        import urllib.request

        request = urllib.request.Request(
            f"http://127.0.0.1:{place.port}/", headers={"Authorization": f"Bearer {secret}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    def is_let_in() -> bool:
        try:
            return answered().endswith("one")
        except OSError:
            return False

    wait_until(is_let_in, LIMIT_S, "the key to be known")
    place.ask(lambda client: client.ask(RevokeServiceKey("echo", made.id)))
    wait_until(lambda: not is_let_in(), LIMIT_S, "the key to be refused")
    state = (place.home / "state.db").read_bytes() + (place.home / "state.db-wal").read_bytes()
    assert secret.encode() not in state

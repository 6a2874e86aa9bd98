"""The monitor on real sshds: a node that stops is flagged, told of once, left alone, and comes back by itself."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.rig.receivers import HttpReceiver, http_receiver
from tests.rig.sshd import SshdFarm, SshdNode
from tests.rig.waiting import wait_until
from ugro.client.client import Client

LIMIT_S = 60
INTERVAL_S = 0.5
PACE = dict.fromkeys(("busy_interval", "recent_interval", "quiet_interval", "idle_interval"), INTERVAL_S)


class Watched:
    """A cluster whose agent looks often, and who is told by it."""

    def __init__(self, ugro: Ugro, farm: SshdFarm, web: HttpReceiver, **monitor: object) -> None:
        self.farm = farm
        self.web = web
        self._ugro = ugro
        ugro.cluster = farm.cluster_yaml(
            monitor={**PACE, **monitor},
            alerts={"channels": ["hook"]},
            channels={"hook": {"type": "webhook", "url": web.url}},
        )
        self.client = Client(home=ugro.home, cluster=ugro.cluster)
        self.client.agent()

    def ask(self, path: str) -> Any:
        return self.client._ask("GET", path)

    def node(self, name: str) -> dict[str, Any]:
        return next((one for one in self.ask("/v1/nodes")["nodes"] if one["name"] == name), {})

    def watched(self, name: str) -> dict[str, Any]:
        return next(one for one in self.ask("/v1/nodes")["watched"] if one["name"] == name)

    def told(self, rule: str, node: str | None) -> list[str]:
        heard = [json.loads(posted.body) for posted in self.web.posted]
        return [one["state"] for one in heard if (one["rule"], one["node"]) == (rule, node)]

    def wait(self, is_so: Callable[[], object], what: str) -> None:
        wait_until(is_so, LIMIT_S, what)

    def looks(self, name: str) -> int:
        """How often the node was looked at."""
        return sum(count for count, _ in self._seen_up(name))

    def misses(self, name: str) -> int:
        """How often it did not answer."""
        return round(sum(count * (1 - mean) for count, mean in self._seen_up(name)))

    def wait_for_looks(self, name: str, more: int) -> None:
        looks = self.looks(name)
        self.wait(lambda: self.looks(name) >= looks + more, f"{more} looks at {name}")

    def _seen_up(self, name: str) -> list[tuple[int, float]]:
        curves = self.ask(f"/v1/nodes/{name}/history?key=up")["curves"]
        return list(zip(curves[0]["counts"], curves[0]["means"], strict=True)) if curves else []


@pytest.fixture
def web() -> Iterator[HttpReceiver]:
    with http_receiver() as receiver:
        yield receiver


Watch = Callable[..., Watched]


@pytest.fixture
def watch(ugro: Ugro, farm_of: Farms, web: HttpReceiver) -> Iterator[Watch]:
    """``watch(nodes, **monitor)`` gives a cluster that is watched."""
    made: list[Watched] = []

    def make(nodes: int, **monitor: object) -> Watched:
        made.append(Watched(ugro, farm_of(nodes), web, **monitor))
        return made[-1]

    yield make
    for one in made:
        one.client.close()


@contextmanager
def refused(database: Path, change: str) -> Iterator[None]:
    """Meanwhile this cannot be written down, as on a disk that is full."""
    _execute(database, f"CREATE TRIGGER refused BEFORE {change} BEGIN SELECT RAISE(ABORT, 'no space left'); END")
    yield
    _execute(database, "DROP TRIGGER refused")


def _execute(database: Path, statement: str) -> None:
    with closing(sqlite3.connect(database, timeout=LIMIT_S)) as db, db:
        db.execute(statement)


def hang(node: SshdNode) -> None:
    node.freeze()


def end(node: SshdNode) -> None:
    node.stop()


def revive(node: SshdNode) -> None:
    if node.pid is None:
        node.start()
    else:
        node.thaw()


@pytest.mark.proof
@pytest.mark.parametrize("stop", [hang, end], ids=["hangs", "ends"])
def test_a_node_that_stops_is_flagged_told_once_left_alone_and_comes_back_by_itself(
    watch: Watch, ugro: Ugro, stop: Callable[[SshdNode], None]
) -> None:
    watched = watch(3, breaker_pause=3600)
    other, name = (node.name for node in watched.farm.nodes[:2])
    watched.wait(lambda: watched.node(name).get("status") == "healthy", "the node to be healthy")
    looks, misses = watched.looks(name), watched.misses(name)
    stop(watched.farm.nodes[1])
    watched.wait(lambda: watched.node(name)["status"] == "unreachable", "the node to be flagged")
    watched.wait(lambda: watched.told("unreachable", name), "an alert")
    watched.wait(lambda: watched.watched(name)["breaker"] == "open", "the breaker to open")
    watched.wait_for_looks(other, 2)  # looks come to disk in their order: the last one at the node is there
    # Three looks open it: no more were needed, and none comes while the others are looked at as before.
    assert watched.misses(name) - misses == 3
    left_alone_at = watched.looks(name)
    assert looks < left_alone_at
    watched.wait_for_looks(other, 6)
    assert watched.looks(name) == left_alone_at
    [alert] = [one for one in watched.ask("/v1/alerts")["alerts"] if one["node"] == name]
    assert (alert["rule"], alert["severity"]) == ("unreachable", "critical")
    shown = ugro("alerts", "ls")
    assert shown.returncode == 1
    assert f"{name} is unreachable" in shown.stdout

    revive(watched.farm.nodes[1])
    watched.wait(lambda: watched.node(name)["status"] == "healthy", "the node to be back by itself")
    watched.wait(lambda: watched.told("unreachable", name)[-1] == "cleared", "the end of the alert")
    assert watched.told("unreachable", name) == ["started", "cleared"]
    assert watched.watched(name)["breaker"] == "closed"
    assert [one for one in watched.ask("/v1/alerts")["alerts"] if one["node"] == name] == []
    assert watched.looks(name) > left_alone_at
    # One of three is not more than half; the end, which came after it, has been told by the same channel.
    assert watched.told("unhealthy-nodes", None) == []


@pytest.mark.proof
def test_an_agent_that_starts_anew_does_not_tell_an_alert_again(watch: Watch, ugro: Ugro) -> None:
    watched = watch(1, breaker_pause=1)
    [node] = watched.farm.nodes
    watched.wait(lambda: watched.node(node.name).get("status") == "healthy", "the node to be healthy")
    node.stop()
    watched.wait(lambda: watched.told("unreachable", node.name), "an alert")
    watched.wait(lambda: watched.told("unhealthy-nodes", None), "an alert of the cluster")
    ugro("agent", "stop")
    watched.client.agent()
    watched.wait_for_looks(node.name, 3)
    assert watched.told("unreachable", node.name) == ["started"]
    assert watched.told("unhealthy-nodes", None) == ["started"]
    node.start()
    watched.wait(lambda: watched.told("unreachable", node.name)[-1] == "cleared", "the end of the alert")


@pytest.mark.proof
def test_a_job_that_ends_is_told_to_whom_it_names(watch: Watch, ugro: Ugro, web: HttpReceiver) -> None:
    watched = watch(1)
    assert ugro("run", "--name", "quiet", "--", "true").returncode == 0  # first: who is heard later proves it silent
    assert ugro("run", "--notify", "hook", "--name", "good", "--", "true").returncode == 0
    assert ugro("run", "--notify", "hook", "--notify", "log", "--name", "bad", "--", "false").returncode == 1
    heard: list[dict[str, Any]] = []

    def has_both() -> bool:
        heard[:] = [one for one in (json.loads(posted.body) for posted in web.posted) if one["kind"] == "job"]
        return len(heard) >= 2

    watched.wait(has_both, "both ends to be told")
    assert [(one["job"], one["state"], one["severity"]) for one in heard] == [
        (2, "succeeded", "info"),
        (3, "failed", "warning"),
    ]
    assert heard[1]["title"].startswith("job 3 bad failed after ")
    logged = [json.loads(line) for line in (ugro.home / "agent.log").read_text().splitlines()]
    assert any(line.get("job") == 3 and line.get("attempt") == 1 and "bad failed" in line["message"] for line in logged)
    refused = ugro("run", "--notify", "nobody", "--", "true")
    assert refused.returncode == 2
    assert "notify: there is no channel 'nobody'" in refused.stderr


@pytest.mark.proof
def test_an_alert_that_cannot_be_recorded_is_told_when_it_can(watch: Watch, ugro: Ugro) -> None:
    watched = watch(1, breaker_pause=1)
    [node] = watched.farm.nodes
    watched.wait(lambda: watched.node(node.name).get("status") == "healthy", "the node to be healthy")
    with refused(ugro.home / "state.db", "INSERT ON events"):
        node.stop()
        watched.wait(lambda: watched.misses(node.name) >= 3, "more looks than an alert takes")
        assert watched.node(node.name)["status"] == "unreachable", "what is shown is what was seen"
        assert watched.told("unreachable", node.name) == []
    watched.wait(lambda: watched.told("unreachable", node.name), "an alert")
    kinds = [event["kind"] for event in watched.ask("/v1/alerts")["events"] if event["node"] == node.name]
    assert sorted(kinds) == ["alert-started", "node-changed"]


def test_alerts_are_told_while_curves_cannot_be_written(watch: Watch, ugro: Ugro) -> None:
    watched = watch(1)
    [node] = watched.farm.nodes
    watched.wait(lambda: watched.node(node.name).get("status") == "healthy", "the node to be healthy")
    with refused(ugro.home / "metrics.db", "INSERT ON chunk"):
        node.stop()
        watched.wait(lambda: watched.told("unreachable", node.name), "an alert")
    listed = ugro("alerts", "ls")
    assert listed.returncode == 1
    assert node.name in listed.stdout


@pytest.mark.proof
def test_an_end_is_told_once_if_that_cannot_be_recorded(watch: Watch, ugro: Ugro, web: HttpReceiver) -> None:
    watched = watch(1)

    def heard() -> list[int]:
        return [one["job"] for one in (json.loads(posted.body) for posted in web.posted) if one["kind"] == "job"]

    with refused(ugro.home / "state.db", "UPDATE ON meta WHEN NEW.key = 'told_jobs'"):
        for number in (1, 2):
            assert ugro("run", "--notify", "hook", "--", "true").returncode == 0
            watched.wait(lambda: number in heard(), "its end to be told")  # noqa: B023  # waited for here
    assert ugro("run", "--notify", "hook", "--", "true").returncode == 0
    watched.wait(lambda: 3 in heard(), "the last end to be told")
    assert heard() == [1, 2, 3]


@pytest.mark.proof
def test_channels_can_be_tried(watch: Watch, ugro: Ugro, web: HttpReceiver) -> None:
    watch(1)
    tried = ugro("alerts", "test")
    assert (tried.returncode, tried.stdout) == (0, "log: sent\nhook: sent\n")
    web.answers = [500]
    tried = ugro("--json", "alerts", "test", "hook")
    assert tried.returncode == 1
    assert json.loads(tried.stdout) == {
        "channels": [{"channel": "hook", "error": "channel hook: answered 500", "hint": None}]
    }


def heard(stream: Any, keys: set[str]) -> dict[str, Any]:
    """What a stream of changes has said, until all of these were in it."""
    seen: dict[str, Any] = {}
    rest = b""
    for piece in stream:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            seen |= json.loads(line)
        if keys <= set(seen):
            break
    stream.close()
    return seen


def test_a_jobs_metrics_become_curves_and_the_stream_tells_of_all_that_changes(watch: Watch, ugro: Ugro) -> None:
    watched = watch(1)
    assert ugro("run", "--name", "curves", "--", "true").returncode == 0
    folder = ugro.home / "jobs/1/attempt_1/output"
    folder.mkdir(parents=True)
    stream = watched.client._stream("GET", "/v1/changes?after=0", timeout_s=LIMIT_S)
    with (folder / "metrics.jsonl").open("w") as lines:
        for step in range(1000):
            values = {"loss": 1 / (step + 1), "lr": 0.1}
            lines.write(json.dumps({"step": step, "time": time.time(), "rank": 0, "values": values}) + "\n")
    assert heard(stream, {"event", "nodes", "metrics"})["metrics"] == [1]
    # A page that was made before the metrics came, and listens only now, hears of them all the same.
    late = watched.client._stream("GET", "/v1/changes", timeout_s=LIMIT_S)
    assert heard(late, {"metrics"})["metrics"] == [1]

    def counts() -> list[int]:
        return [key["count"] for key in watched.ask("/v1/metrics/keys?job=curves")["keys"]]

    watched.wait(lambda: counts() == [1000, 1000], "all points")
    [curve] = watched.ask("/v1/metrics?job=1&key=loss&bins=100")["curves"]
    assert (curve["owner"], curve["attempt"], curve["width"], sum(curve["counts"])) == ("job/1", 1, 16, 1000)
    assert curve["highs"][0] == 1.0
    [zoomed] = watched.ask("/v1/metrics?job=1&key=loss&first=500&last=520&bins=100")["curves"]
    assert (zoomed["width"], zoomed["steps"][0], len(zoomed["steps"])) == (1, 500, 21)

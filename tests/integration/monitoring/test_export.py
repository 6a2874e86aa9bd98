"""Metrics go to real servers: an HTTP receiver that comes and goes, and InfluxDB itself."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro, in_loop
from tests.rig.receivers import Posted, http_receiver
from tests.rig.waiting import wait_until
from tests.unit.config.test_load import config_of
from ugro.features.trackers.config import ExportSection
from ugro.features.trackers.service import ExportService, Figures
from ugro.kernel.telemetry.curves import Points, SeriesKey

LIMIT_S = 60


def points(first: int, count: int, job: int = 7) -> dict[SeriesKey, Points]:
    steps = list(range(first, first + count))
    times = [1_700_000_000_000 + step for step in steps]
    return {SeriesKey(f"job/{job}", 1, 0, "loss"): Points(steps, times, [1.0 / (1 + step) for step in steps])}


def section(text: str) -> ExportSection:
    return config_of(f"nodes: [gpu1]\nexport: {{interval: 50ms, {text}}}\n").section(ExportSection)


class Rig:
    def __init__(self, folder: Path, text: str) -> None:
        self.said: list[str] = []
        self.section = section(text)
        self.service = ExportService(folder, lambda: self.section, lambda: "lab", self._say)

    async def _say(self, text: str) -> None:
        self.said.append(text)

    async def until(self, is_so: Any, what: str) -> None:
        """While it sends."""
        task = asyncio.create_task(self.service.run())
        try:
            await asyncio.to_thread(wait_until, is_so, LIMIT_S, what)
        finally:
            task.cancel()
            await asyncio.wait([task])


def steps_of(body: bytes) -> list[int]:
    return [int(line.partition("step=")[2].partition("i ")[0]) for line in body.decode().splitlines()]


def test_what_a_server_does_not_take_waits_and_comes_later_once_and_in_order(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("very-secret\n")

    async def work() -> None:
        with http_receiver() as receiver:
            text = f"influxdb: {{url: '{receiver.url}', org: a b, bucket: ugro, token_file: {token}}}"
            receiver.answers += [503, 503, 401]
            first = Rig(tmp_path / "spool", text)
            await first.service.take(points(0, 5))
            await first.service.take(points(5, 5))
            await first.until(lambda: len(receiver.posted) >= 2, "two tries")
            assert first.service.figures()["influxdb"].sent == 0
            again = Rig(tmp_path / "spool", text)  # the agent was killed
            await again.service.take(points(10, 5))
            await again.until(lambda: again.service.figures()["influxdb"].sent == 15, "all of it")
            taken = [step for one in receiver.posted[3:] for step in steps_of(one.body)]
            assert taken == list(range(15))
            post = receiver.posted[-1]
            assert post.path == "/api/v2/write?org=a+b&bucket=ugro&precision=ns"
            assert post.headers["Authorization"] == "Token very-secret"
            assert again.service.figures()["influxdb"].waiting == 0
            assert again.said == []

    asyncio.run(work())


def test_above_the_bound_the_oldest_is_dropped_counted_and_said_once(tmp_path: Path) -> None:
    async def work() -> None:
        with http_receiver() as receiver:
            rig = Rig(tmp_path, f"spool_limit: 2000, otlp: {{endpoint: '{receiver.url}'}}")
            for number in range(20):
                await rig.service.take(points(10 * number, 10))
            figures = rig.service.figures()["otlp"]
            assert figures.dropped + figures.waiting == 200
            assert 0 < figures.spool_bytes <= 2000
            [said] = rig.said
            assert said.startswith("export to otlp: ")
            assert said.endswith("points were dropped: its spool is full")
            await rig.until(lambda: figures.waiting == 0 and figures.sent, "the rest")
            assert figures.sent + figures.dropped == 200
            assert receiver.posted[0].path == "/v1/metrics"
            document = json.loads(receiver.posted[-1].body)
            assert document["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]["name"] == "ugro.run"

    asyncio.run(work())


@dataclass
class Influx:
    """Refuses a request whole, as a server may, for a step that it does not like or too many of them."""

    bad: frozenset[int] = frozenset()
    most: int = 10**9
    taken: list[int] = field(default_factory=list)
    requests: int = 0

    def judge(self, posted: Posted) -> int:
        self.requests += 1
        steps = steps_of(posted.body)
        if len(steps) > self.most:
            return 413
        if self.bad & set(steps):
            return 400
        self.taken += steps
        return 200


async def exported(folder: Path, server: Influx, count: int) -> tuple[Figures, str]:
    """What was counted when nothing is left, and the last of what was said."""
    with http_receiver() as receiver:
        receiver.judge = server.judge
        rig = Rig(folder, f"influxdb: {{url: '{receiver.url}', database: ugro}}")
        await rig.service.take(points(0, count))
        figures = rig.service.figures()["influxdb"]
        await rig.until(lambda: figures.sent + figures.dropped >= count, "all of it")
        assert figures.waiting == 0
        return figures, rig.said[-1] if rig.said else ""


@in_loop
async def test_a_point_that_a_server_refuses_loses_only_itself(tmp_path: Path) -> None:
    server = Influx(bad=frozenset({3}))
    figures, said = await exported(tmp_path, server, 12_000)
    assert (figures.sent, figures.dropped) == (11_999, 1)
    assert sorted(server.taken) == [step for step in range(12_000) if step != 3], "and none came twice"
    assert "1 points were dropped: it was refused" in said
    assert "answered 400" in said


@in_loop
async def test_a_request_that_is_too_large_is_sent_in_smaller_ones(tmp_path: Path) -> None:
    server = Influx(most=700)
    figures, said = await exported(tmp_path, server, 6_000)
    assert (figures.sent, figures.dropped, said) == (6_000, 0, "")
    assert sorted(server.taken) == list(range(6_000))


@in_loop
async def test_points_that_are_all_refused_cost_a_bounded_number_of_requests(tmp_path: Path) -> None:
    server = Influx(bad=frozenset(range(4_000)))
    figures, _ = await exported(tmp_path, server, 6_000)
    assert figures.sent + figures.dropped == 6_000
    assert figures.dropped - 4_000 < 50, "few neighbours"
    assert server.requests < 600


@in_loop
async def test_what_was_taken_is_not_sent_again_when_the_server_goes_away(tmp_path: Path) -> None:
    server = Influx(bad=frozenset({7_000}))
    away: list[int] = []

    def judge(posted: Posted) -> int:
        if server.requests == 2 and not away:
            away.append(503)
            return 503
        return server.judge(posted)

    with http_receiver() as receiver:
        receiver.judge = judge
        rig = Rig(tmp_path, f"influxdb: {{url: '{receiver.url}', database: ugro}}")
        await rig.service.take(points(0, 12_000))
        figures = rig.service.figures()["influxdb"]
        await rig.until(lambda: figures.sent + figures.dropped >= 12_000, "all of it")
    assert away
    assert (figures.sent, figures.dropped) == (11_999, 1)
    assert sorted(server.taken) == [step for step in range(12_000) if step != 7_000]


@in_loop
async def test_what_a_server_refuses_for_good_holds_up_nothing(tmp_path: Path) -> None:
    with http_receiver() as receiver:
        receiver.judge = lambda posted: 400
        rig = Rig(tmp_path, f"influxdb: {{url: '{receiver.url}', database: ugro}}")
        await rig.service.take(points(0, 3))
        figures = rig.service.figures()["influxdb"]
        await rig.until(lambda: figures.dropped == 3, "the refusal")
        receiver.judge = lambda posted: 200
        await rig.service.take(points(3, 3))
        await rig.until(lambda: figures.sent == 3, "what comes next")
        assert "answered 400" in rig.said[0]


@in_loop
async def test_a_wrong_token_of_otlp_is_not_tried_with_every_half(tmp_path: Path) -> None:
    with http_receiver() as receiver:
        receiver.judge = lambda posted: 401
        rig = Rig(tmp_path, f"otlp: {{endpoint: '{receiver.url}'}}")
        await rig.service.take(points(0, 300))
        figures = rig.service.figures()["otlp"]
        await rig.until(lambda: figures.dropped == 300, "the refusal")
        assert len(receiver.posted) == 1


def test_a_secret_that_cannot_be_read_keeps_everything(tmp_path: Path) -> None:
    async def work() -> None:
        with http_receiver() as receiver:
            missing = tmp_path / "no-token"
            rig = Rig(tmp_path, f"otlp: {{endpoint: '{receiver.url}/x', token_file: {missing}}}")
            await rig.service.take(points(0, 3))
            figures = rig.service.figures()["otlp"]
            await rig.until(lambda: figures.problem, "the problem")
            assert "cannot be read" in str(figures.problem)
            assert (figures.waiting, figures.dropped, receiver.posted) == (3, 0, [])

    asyncio.run(work())


def test_a_spool_that_cannot_be_written_loses_no_more_than_it_says(tmp_path: Path) -> None:
    async def work() -> None:
        with http_receiver() as receiver:
            (tmp_path / "spool").write_text("no folder")
            rig = Rig(tmp_path / "spool", f"influxdb: {{url: '{receiver.url}', database: ugro}}")
            await rig.service.take(points(0, 3))
            figures = rig.service.figures()["influxdb"]
            assert figures.dropped == 3
            [said] = rig.said
            assert "3 points were dropped: its spool cannot be written" in said
            await rig.until(lambda: figures.problem, "the problem")
            (tmp_path / "spool").unlink()
            await rig.service.take(points(3, 2))
            await rig.until(lambda: figures.sent == 2, "what comes when it is mended")

    asyncio.run(work())


def test_an_agent_sends_the_metrics_of_its_nodes_and_jobs(ugro: Ugro) -> None:
    with http_receiver() as receiver:
        ugro.cluster = ugro.home / "cluster.yaml"
        ugro.cluster.write_text(
            f"nodes:\n  here: {{transport: local, remote_root: {ugro.home}/root}}\n"
            "monitor: {busy_interval: 0.5, recent_interval: 0.5}\n"
            f"export: {{interval: 200ms, influxdb: {{url: '{receiver.url}', database: ugro}}}}\n"
        )
        line = json.dumps({"step": 7, "time": 1_700_000_000.5, "loss": 0.5})
        done = ugro("run", "--no-sync", "--", "sh", "-c", f"echo '{line}' > $UGRO_OUTPUT/metrics.jsonl")
        assert done.returncode == 0, done.stderr

        def lines() -> list[str]:
            return [line for one in list(receiver.posted) for line in one.body.decode().splitlines()]

        run = "ugro_run,cluster=default,attempt=1,job=1,metric=loss,rank=0 value=0.5,step=7i 1700000000500000007"
        wait_until(lambda: run in lines(), LIMIT_S, "the job's point")
        wait_until(lambda: any("node=here" in line for line in lines()), LIMIT_S, "points of the node")
        counted = 'ugro_export_points_total{to="influxdb",outcome="dropped"} 0'
        assert counted in ugro("metrics").stdout


@contextmanager
def influxdb(folder: Path) -> Iterator[str]:
    """Debian's, with a folder and ports of its own."""
    program = shutil.which("influxd")
    if program is None:
        pytest.skip("influxd is not installed (Debian: influxdb)")
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = (one.getsockname()[1], two.getsockname()[1])
    config = folder / "influxdb.conf"
    config.write_text(
        f'reporting-disabled = true\nbind-address = "127.0.0.1:{ports[1]}"\n'
        f'[meta]\ndir = "{folder}/meta"\n[data]\ndir = "{folder}/data"\nwal-dir = "{folder}/wal"\n'
        f'[http]\nbind-address = "127.0.0.1:{ports[0]}"\n'
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "-config", str(config)], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{ports[0]}"
        wait_until(lambda: answers(url), LIMIT_S, "InfluxDB to answer")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ping", timeout=5):
            return True
    except OSError:
        return False


def query(url: str, text: str, *, database: str = "ugro") -> list[Any]:
    body = urllib.parse.urlencode({"q": text, "db": database}).encode()
    with urllib.request.urlopen(f"{url}/query", body, timeout=30) as answer:
        [result] = json.load(answer)["results"]
    return list(result.get("series", []))


@pytest.mark.proof
def test_influxdb_itself_has_every_point(tmp_path: Path) -> None:
    async def work(url: str) -> None:
        rig = Rig(tmp_path / "spool", f"influxdb: {{url: '{url}', database: ugro}}")
        strange = {SeriesKey("job/8", 2, 1, "a, b=c \\"): Points([1], [1_700_000_000_000], [2.5])}
        same_time = {SeriesKey("job/9", 1, 0, "loss"): Points([1, 2, 3], [1_700_000_000_000] * 3, [1.0, 2.0, 3.0])}
        node = {SeriesKey("node/gpu1", 0, 0, "load1"): Points([1_700_000_000], [1_700_000_000_000], [0.5])}
        for some in (points(0, 12_000), strange, same_time, node):
            await rig.service.take(some)
        await rig.until(lambda: rig.service.figures()["influxdb"].sent == 12_005, "all of it to be taken")
        assert rig.said == []

    with influxdb(tmp_path) as url:
        query(url, "CREATE DATABASE ugro")
        asyncio.run(work(url))
        [counted] = query(url, "SELECT count(value) FROM ugro_run WHERE job = '7'")
        assert counted["values"][0][1] == 12_000
        [counted] = query(url, "SELECT count(value) FROM ugro_run WHERE job = '9'")
        assert counted["values"][0][1] == 3, "steps of one millisecond stay apart"
        [series] = query(url, "SELECT value, step, metric FROM ugro_run WHERE job = '8'")
        assert series["values"][0][1:3] == [2.5, 1]
        [series] = query(url, "SELECT value FROM ugro_node WHERE node = 'gpu1' AND cluster = 'lab'")
        assert series["values"][0][1] == 0.5

"""A long queue: whether many waiting jobs are run as fast as a few, and how soon a look at them is answered.

    python -m bench jobs --queue 10000

The node is drained while jobs are submitted, so that all of them wait; then it takes work again. Looks are measured
twice: at the whole queue while it waits, and at what is left of it while it is run.
"""

from __future__ import annotations

import http.cookiejar
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.bars import Bar, Row, print_rows
from ugro.client.client import Client
from ugro.kernel.agent.operations import CreateDashboardLink, DrainNode, ResumeNode
from ugro.kernel.jobs.model import HOLDING_STATES, WAITING_STATES, JobState
from ugro.kernel.jobs.operations import ExplainJob, GetJob

_FEW = 1000
_AT_ONCE = 2000  # submitted by one call
_LEAST_SHARE = 0.7  # of the rate with few
_LOOK_S = 0.5
_MOST_IDLE_CPU = 0.02  # of one core, while nothing but the queue is there
_IDLE_S = 10.0
_LIMIT_S = 1200.0
_LOOKS = 5
_LIST = "ugro status --all"

_Look = tuple[Row, Callable[[], object]]


def measure(count: int) -> list[Bar]:
    with tempfile.TemporaryDirectory(prefix="bench") as folder, _queue(Path(folder)) as queue:
        first = queue.run(_FEW)
        queue.wait_behind_a_drain(count)
        idle = queue.idle_cpu()
        waiting = queue.look_at_all(_LOOKS)
        many, draining = queue.run_watched(count)
        last = queue.run(_FEW)
    few = (first + last) / 2
    print_rows(f"a look, {count:,} jobs wait", waiting)
    print_rows("a look, while they are run", draining)
    print(f"{_FEW:,} jobs: {first:.0f} and {last:.0f} jobs/s; {count:,} jobs: {many:.0f} jobs/s")
    print(f"agent while {count:,} jobs wait: {idle:.1%} of one core\n")
    return [
        Bar(f"time of a job among {count:,}", 1 / many, 1 / few, f"that among {_FEW:,}", 1 / _LEAST_SHARE),
        *(_bar(row, f"{count:,} wait") for row in waiting if row.name != _LIST),
        *(_bar(row, "while they are run") for row in draining),
        Bar(f"agent's CPU while {count:,} wait", idle, _MOST_IDLE_CPU, f"{_MOST_IDLE_CPU:.0%} of a core", 1.0),
    ]


def _bar(row: Row, when: str) -> Bar:
    return Bar(f"{row.name}, {when}", row.median_s, _LOOK_S, f"{_LOOK_S:g} s", 1.0)


@contextmanager
def _queue(folder: Path) -> Iterator[_Queue]:
    cluster = folder / "cluster.yaml"
    cluster.write_text(f"nodes:\n  here:\n    transport: local\n    remote_root: {folder / 'node'}\n")
    with Client(home=folder / "home", cluster=cluster) as client:
        work = folder / "empty"  # no code is sent
        work.mkdir()
        try:
            client.health()
            yield _Queue(client, work)
        finally:
            client.stop_agent()


class _Queue:
    def __init__(self, client: Client, work: Path) -> None:
        self._client = client
        self._work = work
        self._pid = client.agent().pid
        self._page = _browser(client)
        self._last = 0

    def wait_behind_a_drain(self, count: int) -> None:
        self._client.ask(DrainNode("here", "jobs are submitted"))
        for begin in range(0, count, _AT_ONCE):
            numbers = range(begin, min(count, begin + _AT_ONCE))
            jobs = self._client.jobs.submit_many([self._fields(number) for number in numbers])
            self._last = jobs[-1].id
        _progress(f"{count:,} jobs wait")

    def run(self, count: int) -> float:
        """Jobs per second, from when the node takes work until the last has ended."""
        self.wait_behind_a_drain(count)
        return self._drained(count)

    def run_watched(self, count: int) -> tuple[float, list[Row]]:
        """A list of all jobs is no look: it costs as much as it is long."""
        looks = [(row, look) for row, look in self._looks() if row.name != _LIST]
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(2.0):
                _look(looks)

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            rate = self._drained(count)
        finally:
            is_over.set()
            watcher.join()
        return rate, [row for row, _ in looks]

    def look_at_all(self, times: int) -> list[Row]:
        looks = self._looks()
        for _ in range(times):
            _look(looks)
        return [row for row, _ in looks]

    def idle_cpu(self) -> float:
        """The agent's share of one core while nobody asks anything."""
        time.sleep(2.0)
        before, begun = _cpu_s(self._pid), time.perf_counter()
        time.sleep(_IDLE_S)
        return (_cpu_s(self._pid) - before) / (time.perf_counter() - begun)

    def _drained(self, count: int) -> float:
        begun = time.perf_counter()
        self._client.ask(ResumeNode("here"))
        left = count
        while left:
            self._client.jobs.wait(self._last, timeout_s=_LIMIT_S)
            left = len(self._client.jobs.newest(None, states=WAITING_STATES | HOLDING_STATES))
            if time.perf_counter() - begun > _LIMIT_S:
                raise RuntimeError(f"{left} of {count} jobs have not ended")
        rate = count / (time.perf_counter() - begun)
        if wrong := [job for job in self._client.jobs.newest(count) if job.state is not JobState.SUCCEEDED]:
            raise RuntimeError(f"{len(wrong)} jobs did not succeed: {wrong[0]}")
        _progress(f"{count:,} jobs: {rate:.0f} jobs/s")
        return rate

    def _looks(self) -> list[_Look]:
        """Each with a connection of its own, as a command has."""
        home, cluster = self._client.home.path, self._client.agent().cluster_file

        def asked(ask: Callable[[Client], object]) -> Callable[[], object]:
            def look() -> None:
                with Client(home=home, cluster=Path(str(cluster))) as client:
                    ask(client)

            return look

        return [
            (Row("ugro why"), asked(lambda client: client.ask(ExplainJob(str(self._last))))),
            (Row("ugro status"), asked(lambda client: client.jobs.newest(20))),
            (Row("ugro status JOB"), asked(lambda client: client.ask(GetJob(str(self._last))))),
            (Row(_LIST), asked(lambda client: client.jobs.newest(None))),
            (Row("a job's page"), lambda: self._page(f"/jobs/{self._last}")),
            (Row("the page of jobs"), lambda: self._page("/jobs")),
            (Row("the page of the cluster"), lambda: self._page("/")),
            (Row("/metrics"), asked(lambda client: client.metrics_page())),
        ]

    def _fields(self, number: int) -> dict[str, object]:
        return {"command": ["echo", str(number)], "cpus": "0", "workdir": str(self._work)}


def _look(looks: list[_Look]) -> None:
    for row, look in looks:
        begun = time.perf_counter()
        look()
        row.seconds.append(time.perf_counter() - begun)


def _browser(client: Client) -> Callable[[str], bytes]:
    link = client.ask(CreateDashboardLink()).url
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    with opener.open(link, timeout=60) as answer:
        answer.read()
    address = link.split("/login")[0]

    def page(path: str) -> bytes:
        with opener.open(address + path, timeout=60) as answer:
            return bytes(answer.read())

    return page


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

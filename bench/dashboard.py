"""The dashboard in a real browser: how soon pages are ready, what they transfer, and what tabs that stay open cost.

    python -m bench dashboard

A comparison of 1,000 runs is ready when its first chart is drawn. TensorBoard and MLflow are asked for as many curves
in the same run where they are installed (``BENCH_PEERS`` names the Python that has them, else this one):

    python -m venv peers && peers/bin/pip install mlflow tensorboard
    BENCH_PEERS=peers/bin/python python -m bench dashboard --rounds 2
"""

from __future__ import annotations

import os
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.rig.browser import Dashboard, browsers, dashboards, is_live
from tests.rig.experiments import make_experiments

from bench.bars import Bar, Row, print_rows
from ugro.kernel.jobs.operations import CancelJob

_RUNS = 1000
_POINTS = 1000
_TABS = 5
_WATCH_S = 20.0
_MOST_CPU = 0.15  # of one core, with five tabs and a job that records
_READY_S = 3.0
_MOST_BYTES = 5_000_000
_PAGE_BYTES = 400_000
_WRITER = """
import json, os, time
with open(os.environ["UGRO_OUTPUT"] + "/metrics.jsonl", "a", buffering=1) as out:
    for step in range(100_000):
        values = {"loss": 1 / (step + 1), "lr": 1e-3, "grad_norm": 1.0}
        out.write(json.dumps({"step": step, "time": time.time(), "values": values}) + "\\n")
        time.sleep(0.05)
"""
_DRAWN = """least => {
    const chart = document.querySelector('ugro-chart');
    return chart !== null && chart.data.series.length >= least && chart.isReady;
}"""


def measure(rounds: int) -> list[Bar]:
    with dashboards(before=_fill) as dashboard, browsers() as browser:
        pages = {
            "cluster": ("/", _settled),
            "jobs": ("/jobs", _settled),
            "experiments, 1,000": ("/experiments", _settled),
            "one job, with curves": (f"/jobs/{_RUNS}", lambda page: _drawn(page, 1)),
            f"compare {_RUNS:,} runs": ("/compare?q=*", lambda page: _drawn(page, 900)),
        }
        found = {name: _visit(dashboard, browser, name, *how, rounds) for name, how in pages.items()}
        answer = _answer(dashboard, rounds)
        idle, watched = _costs(dashboard, browser)
    print_rows("page ready", [row for row, _ in found.values()])
    for name, (_, size) in found.items():
        print(f"{name:<28}{size / 1000:>10,.0f} kB transferred, with an empty cache")
    print(f"\nagent while a job records, of one core: {idle:.1%}; with {_TABS} live tabs: {watched:.1%}\n")
    compare, compare_bytes = found[f"compare {_RUNS:,} runs"]
    largest = max(size for name, (_, size) in found.items() if not name.startswith("compare"))
    return [
        Bar(f"a comparison of {_RUNS:,} runs", compare.min_s, _READY_S, f"{_READY_S:g} s", 1.0),
        Bar(f"what it transfers, of {_MOST_BYTES:,} bytes", compare_bytes, _MOST_BYTES, "that", 1.0),
        Bar(f"what another page transfers, of {_PAGE_BYTES:,} bytes", largest, _PAGE_BYTES, "that", 1.0),
        Bar(f"agent's CPU with {_TABS} live tabs, of {_MOST_CPU:.0%} of a core", watched, _MOST_CPU, "that", 1.0),
        *_against_peers(answer),
    ]


def _fill(home: Path) -> None:
    _say(f"{_RUNS:,} runs of {_POINTS:,} points are written")
    make_experiments(home, _RUNS, _POINTS, is_sealed=True)


def _say(what: str) -> None:
    print(f"{what} …", file=sys.stderr, flush=True)


def _visit(
    dashboard: Dashboard, browser: Any, name: str, path: str, is_ready: Callable[[Any], None], rounds: int
) -> tuple[Row, int]:
    """Each time with an empty cache; the first visit, which warms the agent up, does not count."""
    _say(f"page: {name}")
    row, transferred = Row(name), 0
    for turn in range(rounds + 1):
        context = browser.new_context(viewport={"width": 1360, "height": 900})
        page = dashboard.sign_in(context)
        network = context.new_cdp_session(page)
        network.send("Network.enable")
        network.send("Network.setCacheDisabled", {"cacheDisabled": True})
        sizes: list[float] = []
        network.on("Network.loadingFinished", lambda event, sizes=sizes: sizes.append(event["encodedDataLength"]))
        begun = time.perf_counter()
        page.goto(dashboard.url + path)
        is_ready(page)
        if turn:
            row.seconds.append(time.perf_counter() - begun)
            transferred = int(sum(sizes))
        context.close()
    return row, transferred


def _settled(page: Any) -> None:
    page.wait_for_load_state("load")
    page.locator("main h1").wait_for()


def _drawn(page: Any, least: int) -> None:
    page.wait_for_function(_DRAWN, arg=least, timeout=60_000)


def _costs(dashboard: Dashboard, browser: Any) -> tuple[float, float]:
    """The agent's share of a core, without and with tabs, while a job records twenty times a second."""
    _say(f"what {_TABS} tabs cost")
    job = dashboard.submit("recording", sys.executable, "-c", _WRITER, cpus=0)
    pid = dashboard.agent.process.pid
    context = browser.new_context()
    page = dashboard.sign_in(context)
    page.goto(f"{dashboard.url}/jobs/{job}")
    _drawn(page, 1)  # by then it runs, and its metrics are collected
    page.goto("about:blank")
    idle = _share_of_a_core(pid)
    pages = [page, *(context.new_page() for _ in range(_TABS - 1))]
    paths = ("/", f"/jobs/{job}", "/jobs", "/experiments", f"/compare?jobs={job},1")
    for page, path in zip(pages, paths, strict=True):
        page.goto(dashboard.url + path)
        is_live(page)
    for page in (pages[1], pages[4]):
        page.bring_to_front()
        _drawn(page, 1)
    watched = _share_of_a_core(pid)
    context.close()
    dashboard.client.ask(CancelJob(str(job)))
    return idle, watched


def _share_of_a_core(pid: int) -> float:
    begun, before = time.monotonic(), _cpu_s(pid)
    time.sleep(_WATCH_S)
    return (_cpu_s(pid) - before) / (time.monotonic() - begun)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _answer(dashboard: Dashboard, rounds: int) -> Row:
    """The curves of all runs, as the compare page requests them."""
    row = Row("UGRO")
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    opener.open(dashboard.link(), timeout=60).close()
    jobs = [("job", number) for number in range(1, _RUNS + 1)]
    wanted = [("key", "loss"), ("rank", 0), ("bins", 100), ("digits", 5), ("column", "steps"), ("column", "means")]
    for _ in range(rounds):
        begun = time.perf_counter()
        with opener.open(f"{dashboard.url}/v1/metrics?{urlencode([*jobs, *wanted])}", timeout=60) as answer:
            answer.read()
        row.seconds.append(time.perf_counter() - begun)
    return row


def _against_peers(ours: Row) -> list[Bar]:
    from bench import peers_dashboard

    peers = peers_dashboard.measure(os.environ.get("BENCH_PEERS", sys.executable), _RUNS, _POINTS)
    print_rows(f"the curves of {_RUNS:,} runs, asked of the server", [ours, *peers])
    claim = f"the curves of {_RUNS:,} runs"
    return [Bar(claim, ours.min_s, peer.min_s, peer.name, 1.0) for peer in peers if peer.seconds]

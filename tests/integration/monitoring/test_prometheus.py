"""Prometheus itself: its tools find nothing wrong, it scrapes the agent, and every query that we ship works there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.conftest import Ugro
from tests.rig.ports import free_port
from tests.rig.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
LIMIT_S = 30
CLUSTER = """
nodes:
  here: {transport: local, remote_root: %s/root}
monitor: {busy_interval: 0.5, recent_interval: 0.5}
"""
TOKEN_FILE = "/etc/prometheus/ugro.token"


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: prometheus)")
    return found


@pytest.fixture
def here(ugro: Ugro) -> Ugro:
    ugro.cluster = ugro.home / "cluster.yaml"
    ugro.cluster.write_text(CLUSTER % ugro.home)
    return ugro


class Prometheus:
    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self._port = port
        self.process = process

    def query(self, text: str) -> list[dict[str, Any]]:
        """Nothing while it starts."""
        address = f"http://127.0.0.1:{self._port}/api/v1/query?" + urllib.parse.urlencode({"query": text})
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                document = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 400:
                pytest.fail(f"{text}: {error.read().decode()}")
            return []
        except OSError:
            return []
        assert document["status"] == "success", document
        return list(document["data"]["result"])


def deployed(here: Ugro, folder: Path) -> Path:
    """What docs/monitoring.md says to do, with this agent's port and a path that is ours to write."""
    address = urlsplit(json.loads(here("--json", "dashboard").stdout)["dashboard"]["url"]).netloc
    token = folder / "ugro.token"
    subprocess.run(["install", "-m", "0400", here.home / "dashboard.token", token], check=True)
    shutil.copy(DEPLOY / "prometheus/ugro_alerts.yml", folder)
    text = (DEPLOY / "prometheus/prometheus.yml").read_text()
    for shipped, ours in (
        (f"credentials_file: {TOKEN_FILE}\n", f"credentials_file: {token}\n"),
        ('["127.0.0.1:8099"]', f'["{address}"]'),
        ("scrape_interval: 15s", "scrape_interval: 1s"),
    ):
        assert text.count(shipped) == 1, shipped
        text = text.replace(shipped, ours)
    config = folder / "prometheus.yml"
    config.write_text(text)
    return config


@pytest.fixture
def prometheus(here: Ugro, tmp_path: Path) -> Iterator[Prometheus]:
    program = tool("prometheus")
    config = deployed(here, tmp_path)
    port = free_port()
    argv = [program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*argv, f"--web.listen-address=127.0.0.1:{port}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield Prometheus(port, process)
    finally:
        process.kill()
        process.wait(10)
        sys.stdout.write((tmp_path / "log").read_text()[-5000:])  # shown by pytest when the test failed


def test_the_page_passes_promtool_and_has_the_promised_names(here: Ugro) -> None:
    assert here("run", "--", "true").returncode == 0
    page = ""

    def counts_the_job() -> bool:
        nonlocal page
        page = here("metrics").stdout
        return 'ugro_tasks_completed_total{status="succeeded"} 1' in page and "ugro_node_health_score{" in page

    wait_until(counts_the_job, LIMIT_S, "the job to be counted")
    for name, kind in (
        ("ugro_node_health_score", "gauge"),
        ("ugro_tasks_completed_total", "counter"),
        ("ugro_task_duration_seconds", "histogram"),
        ("ugro_sync_duration_seconds", "histogram"),
        ("ugro_active_tasks", "gauge"),
    ):
        assert f"# TYPE {name} {kind}\n" in page
    documented = (ROOT / "docs/monitoring.md").read_text()
    assert [name for name in re.findall(r"^# TYPE (\w+)", page, re.MULTILINE) if f"`{name}`" not in documented] == []
    assert json.loads(here("--json", "metrics").stdout)["text"].startswith("# HELP ugro_")
    checked = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=page, capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@pytest.mark.parametrize(("verb", "file"), [("check", "ugro_alerts.yml"), ("test", "ugro_alerts_test.yml")])
def test_the_alert_rules_are_right(verb: str, file: str) -> None:
    promtool(verb, "rules", str(DEPLOY / "prometheus" / file))


@pytest.mark.proof
def test_the_scrape_configuration_is_right_when_the_documented_steps_are_done(here: Ugro, tmp_path: Path) -> None:
    promtool("check", "config", str(deployed(here, tmp_path)))
    documented = (ROOT / "docs/monitoring.md").read_text()
    assert f"install -m 0400 -o prometheus ~/.ugro/dashboard.token {TOKEN_FILE}\n" in documented


def promtool(*args: str) -> None:
    done = subprocess.run([tool("promtool"), *args], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.proof
def test_prometheus_scrapes_the_agent_and_a_jobs_series_end_with_the_job(here: Ugro, prometheus: Prometheus) -> None:
    started = here("run", "--detach", "--name", "long", "--", "sleep", "600")
    assert started.returncode == 0, started.stderr
    folder = here.home / "jobs/1/attempt_1/output"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 7, "time": 1, "loss": 0.5}\n')
    running = 'ugro_job_metric{job_id="1",name="long",metric="loss"}'
    wait_until(lambda: prometheus.query(running), LIMIT_S, "the job's metric to be scraped")
    assert prometheus.query('ugro_job_step{job_id="1"}')[0]["value"][1] == "7"
    assert prometheus.query("up")[0]["value"][1] == "1"
    _every_query_of_the_dashboard_works(prometheus)
    assert here("cancel", "1").returncode == 0
    ended = 'ugro_tasks_completed_total{status="cancelled"} == 1'
    wait_until(lambda: prometheus.query(ended), LIMIT_S, "the end to be scraped")
    wait_until(lambda: not prometheus.query(running), LIMIT_S, "the job's series to end")
    assert prometheus.query('ugro_job_elapsed_seconds{job_id="1"}') == []


def _every_query_of_the_dashboard_works(prometheus: Prometheus) -> None:
    dashboard = json.loads((DEPLOY / "grafana/ugro.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    empty = {query for query in queries if not prometheus.query(query.replace("$node", ".*"))}
    # No GPU is here, nothing was synced, nobody was told; rates need more time than a test has.
    allowed = re.compile(r"ugro_gpu_|ugro_sync_|ugro_notifications_|rate\(|increase\(")
    assert {query for query in empty if not allowed.search(query)} == set()
    page = {found["metric"]["__name__"] for found in prometheus.query('{__name__=~"ugro_.+"}')}
    known = {re.sub(r"_(bucket|sum|count)$", "", name) for name in page}
    used = {re.sub(r"_bucket$", "", name) for query in queries for name in re.findall(r"ugro_\w+", query)}
    assert {name for name in used - known if not name.startswith(("ugro_gpu_", "ugro_notifications_"))} == set()

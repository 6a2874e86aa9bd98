"""A script that never heard of UGRO has curves while it runs, and one loss wherever it is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.metric_files import simple
from tests.rig.waiting import wait_until

LIMIT_S = 60.0
# Writes one half of its event file, waits for a file, and writes the other; all in its working directory, where git
# ignores it. What ugro.train would record is in the output folder.
_SCRIPT = """
import os, pathlib, sys, time
out, go = pathlib.Path(os.environ["UGRO_OUTPUT"]), pathlib.Path({go!r})
os.mkdir("runs")
with open("runs/events.out.tfevents.1700000000.host.17.0", "wb", buffering=0) as events:
    events.write(bytes.fromhex("{first}"))
    (out / "metrics.jsonl").write_text('{{"kind": "advice", "step": 1, "best_s": 0.5}}\\n')
    while not go.exists():
        time.sleep(0.05)
    events.write(bytes.fromhex("{second}"))
"""


@pytest.fixture(scope="module")
def ugro() -> Iterator[Ugro]:
    with ExitStack() as stack, commands(Farms(stack)(1).cluster_yaml()) as ugro:
        first = b"".join(simple("train/loss", step, 2.0 / step) for step in (1, 2))
        halves = {"first": first.hex(), "second": simple("train/loss", 4, 1.5).hex()}
        (ugro.home / "project").mkdir()
        (ugro.home / "project/.gitignore").write_text("runs/\n")
        (ugro.home / "project/train.py").write_text(_SCRIPT.format(go=str(ugro.home / "go"), **halves))
        yield ugro


def metrics_of(ugro: Ugro, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ugro("results", job, "--json").stdout)["job"]["results"]["metrics"] or {}
    return found


def launch(ugro: Ugro, *words: str) -> None:
    done = ugro("launch", str(ugro.home / "project/train.py"), "--name", "stock", "--detach", *words)
    assert done.returncode == 0, done.stderr


def test_a_stock_script_has_curves_and_one_loss_everywhere(ugro: Ugro) -> None:
    launch(ugro)
    wait_until(lambda: metrics_of(ugro, "stock").get("final_loss") == 1.0, LIMIT_S, "its loss while it runs")
    wait_until(lambda: 'metric="train/loss"' in ugro("metrics").stdout, LIMIT_S, "its curve")
    page = [line for line in ugro("metrics").stdout.splitlines() if line.startswith("ugro_job_metric{")]
    assert any('metric="train/loss"' in line and line.endswith(" 1") for line in page), page
    assert not any("advice" in line for line in page)
    (ugro.home / "go").touch()
    assert ugro("wait", "stock").returncode == 0
    wait_until(lambda: metrics_of(ugro, "stock").get("final_loss") == 1.5, LIMIT_S, "its last loss")
    found = metrics_of(ugro, "stock")
    assert (found["loss_name"], found["best_loss"], found["best_step"], found["last_step"]) == ("train/loss", 1.0, 2, 4)
    assert "last 1.5, best 1 at step 2 (train/loss)" in ugro("results", "stock").stdout


def test_a_name_beside_last_means_another_job_and_settings_are_as_written(ugro: Ugro) -> None:
    alone = ugro("compare", "stock", "last")
    assert alone.returncode == 2
    assert "cannot compare job 1 with itself: it is the only job named stock" in alone.stderr
    launch(ugro, "--gpus-per-node", "0", "--time-limit", "1h")
    assert ugro("wait", "last").returncode == 0
    wait_until(lambda: metrics_of(ugro, "2").get("final_loss") == 1.5, LIMIT_S, "the second loss")
    done = ugro("compare", "stock", "last", "--all", "--json")
    document = json.loads(done.stdout)
    assert [job["id"] for job in document["jobs"]] == [1, 2]
    rows = {row["key"]: row["values"] for row in document["rows"]}
    assert rows["metric train/loss last"] == ["1.5", "1.5"]
    assert rows["resources.gpus_per_node"] == ["default", "0"]
    assert not [key for key in rows if "advice" in key or "final loss" in key]
    same = ugro("compare", "2", "last")
    assert same.returncode == 2
    assert "cannot compare job 2 with itself: 2 and last are the same job" in same.stderr

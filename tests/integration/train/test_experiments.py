"""``ugro experiment``: its mistakes; and a real, small one on unequal nodes whose agent is killed, to its report."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from tests.rig.browser import accessibility_problems, browsers
from tests.rig.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_OVER_S = 280
_SMALL = ("--models", "gpt,resnet50", "--modes", "uniform,adaptive", "--seeds", "1", "--epochs", "1", "--nodes", "3")


@pytest.fixture
def ugro() -> Iterator[Ugro]:
    with commands() as ugro:
        yield ugro


def test_mistakes_are_named_and_a_dry_run_starts_nothing(ugro: Ugro) -> None:
    for words, code, said in (
        ((), 2, "an experiment is needed"),
        (("speed",), 2, "unknown experiment 'speed'"),
        (("balance", "--models", "gtp"), 2, "unknown model 'gtp'"),
        (("balance", "--modes", "uniform,fast"), 2, "unknown mode 'fast'"),
        (("balance", "--accumulate", "many"), 2, "expected whole numbers"),
        (("-f", "none.yaml"), 2, "none.yaml: no such file"),
        (("-f", "none.yaml", "--seeds", "2"), 2, "-f and --seeds exclude each other"),
        (("balance", "--nodes", "7"), 3, "7 nodes"),
    ):
        done = ugro("experiment", "run", *words)
        assert (done.returncode, said in done.stderr) == (code, True), (words, done)
    assert "there are no experiments" in ugro("experiment", "status").stderr
    planned = ugro("experiment", "run", "balance", "--models", "gpt,bert", "--modes", "uniform", "--dry-run", "-o", "x")
    assert planned.returncode == 0, planned.stderr
    assert "points: 6" in planned.stdout
    assert "train_bert.py" in planned.stdout
    assert json.loads(ugro("experiment", "ls", "--json").stdout) == {"experiments": []}


def shown(ugro: Ugro) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ugro("experiment", "status", "small", "--json").stdout)["experiment"]
    return found


def states(ugro: Ugro) -> list[str]:
    return [run["state"] for run in shown(ugro)["runs"]]


@pytest.fixture
def folder(ugro: Ugro, tmp_path: Path) -> Path:
    """The report of an experiment that was killed in the middle, stopped, and resumed."""
    up = ugro("lab", "up", "--nodes", "3", "--speeds", "1,0.5,0.25")
    assert up.returncode == 0, up.stderr
    begun = ugro("experiment", "run", "balance", *_SMALL, "--name", "small", "--detach")
    assert begun.returncode == 0, begun.stderr
    wait_until(lambda: states(ugro)[:1] == ["complete"] and len(states(ugro)) > 1, _OVER_S, "the second run")
    agent = json.loads(ugro("agent", "status", "--json").stdout)["agent"]
    os.kill(agent["pid"], signal.SIGKILL)
    wait_until(lambda: states(ugro)[:2] == ["complete"] * 2, _OVER_S, "the run that the agent's end did not touch")
    assert ugro("experiment", "stop", "small").returncode == 0
    wait_until(lambda: set(states(ugro)[2:]) <= {"stopped"}, _OVER_S, "its third run to end")
    other = ugro("experiment", "run", "balance", "--models", "gpt", "--name", "small", "--resume", "--nodes", "3")
    assert "has other models, modes or options than these" in other.stderr
    target = tmp_path / "report"
    again = ugro("experiment", "run", "balance", *_SMALL, "--name", "small", "--resume", "-o", str(target))
    assert again.returncode == 0, again
    assert "report.html, with the raw data beside it" in again.stderr
    return target


def expect_raw_data(ugro: Ugro, folder: Path) -> None:
    found = shown(ugro)
    complete = [run for run in found["runs"] if run["state"] == "complete"]
    assert len({(run["model"], run["variant"]) for run in complete}) == len(found["runs"]) == 4
    assert len({run["job"] for run in found["runs"]}) == len(found["runs"])
    for run in complete:
        assert run["figures"]["samples_per_s"] > 0
        assert run["figures"]["nodes"] == ["lab1", "lab2", "lab3"]
    uniform, adaptive = (
        next(one for one in found["summary"] if (one["model"], one["variant"]) == ("gpt", variant))
        for variant in ("uniform", "adaptive")
    )
    assert uniform["values"]["waiting"]["mean"] > adaptive["values"]["waiting"]["mean"]
    assert len(set(uniform["shares"])) == 1 < len(set(adaptive["shares"]))
    with (folder / "runs.csv").open() as file:
        assert [row["job"] for row in csv.DictReader(file)] == [str(run["job"]) for run in found["runs"]]
    with (folder / "steps.csv").open() as file:
        steps = [row for row in csv.DictReader(file) if row["job"] == str(complete[0]["job"])]
    assert len(steps) == complete[0]["figures"]["steps"]
    assert json.loads((folder / "experiment.json").read_text())["summary"] == found["summary"]
    assert "balance: off" in (folder / "jobs" / "gpt-uniform.yaml").read_text().replace("'", "")
    planned = ugro("experiment", "run", "-f", str(folder / "experiment.yaml"), "--dry-run")
    assert "points: 4" in planned.stdout, planned


def expect_page(page: Page, folder: Path) -> None:
    from playwright.sync_api import expect  # only those who browse pay for it

    page.goto((folder / "report.html").as_uri())
    expect(page.get_by_role("heading", name="Experiment small")).to_be_visible()
    for name in ("Samples per second", "Waiting", "Load variance"):
        panel = page.get_by_role("region", name=name, exact=True)
        expect(panel.locator("svg.bars")).to_be_visible()
        panel.get_by_text("Data table").click()
        expect(panel.locator("tbody tr")).to_have_count(4)
    expect(page.get_by_role("region", name="Energy per epoch")).to_contain_text("not measured")
    curve = page.get_by_role("region", name="gpt: loss over samples").first
    expect(curve.locator("canvas").first).to_be_visible()
    curve.locator(".chart-plot").focus()
    page.keyboard.press("End")
    expect(curve.get_by_role("status")).to_contain_text("adaptive")
    with page.expect_download() as saved:
        page.get_by_role("region", name="Runs", exact=True).get_by_role("link", name="CSV").click()
    assert Path(saved.value.path()).read_text().splitlines()[0].startswith("run,job,model,variant,seed,state")
    assert page.locator("a[href^='/']").count() == 0
    assert accessibility_problems(page) == []
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.evaluate(WIDE) <= 0, "it fits a telephone"


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("torch") is None, reason="not installed: torch")
def test_an_experiment_survives_its_agent_and_its_report_needs_no_server(ugro: Ugro, folder: Path) -> None:
    expect_raw_data(ugro, folder)
    assert ugro("lab", "down").returncode == 0
    problems, asked = list[str](), list[str]()
    with browsers() as browser:
        context = browser.new_context(viewport={"width": 1360, "height": 900}, offline=True)
        context.on("weberror", lambda error: problems.append(str(error.error)))
        context.on("request", lambda request: asked.append(request.url))
        expect_page(context.new_page(), folder)
        context.close()
    assert problems == []
    assert [url for url in asked if not url.startswith("data:")] == [(folder / "report.html").as_uri()]

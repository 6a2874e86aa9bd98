"""The pages of sweeps in a real browser: the list, a sweep with its charts, its trials, and its report as a file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.rig.browser import Dashboard, accessibility_problems, contexts, dashboards
from tests.rig.sweeps import make_sweep
from ugro.features.sweeps.client import SweepWish, html
from ugro.features.sweeps.model import Budget
from ugro.features.sweeps.operations import GetSweep

NODES = "nodes:\n  here: {transport: local, remote_root: '%(home)s/here'}\n"
COUNT = 60
SCRIPT = """
import json, os, pathlib, sys, time
while not pathlib.Path(os.environ["GATE"]).exists():
    time.sleep(0.05)
lr = float(sys.argv[1].partition("=")[2])
pathlib.Path(os.environ["UGRO_OUTPUT"], "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": lr}) + "\\n")
"""
STUDY = """
import optuna

def objective(trial):
    kind = trial.suggest_categorical("kind", ["a", "b"])
    return trial.suggest_float("x", 1, 2) if kind == "a" else trial.suggest_float("y", 0.1, 10, log=True)

study = optuna.create_study(storage="sqlite:///own.db")
for number in range(8):
    study.enqueue_trial({"kind": "ab"[number % 2]})
study.optimize(objective, n_trials=8)
"""
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
pytestmark = pytest.mark.proof


def fill(home: Path) -> None:
    make_sweep(home, COUNT)
    make_sweep(home, 2, "few")
    make_sweep(home, 1000, "many")


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    with dashboards(NODES, before=fill) as found:
        yield found


def panel(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)


def rows(page: Page) -> Locator:
    return page.get_by_role("group", name="Table of trials").locator("tbody tr:visible")


def numbers(page: Page) -> list[int]:
    return [int(text) for text in rows(page).locator("td:first-child").all_inner_texts()]


def expected(dashboard: Dashboard, **ranges: tuple[float, float]) -> list[int]:
    trials = dashboard.client.ask(GetSweep("digits")).sweep.trials
    return [
        trial.number
        for trial in trials
        if all(low <= trial.values[name] <= high for name, (low, high) in ranges.items())
    ]


def drag(page: Page, axis: str, start: float, end: float) -> None:
    """Along an axis, from one share of it to another."""
    strip = page.locator(f".axis-strip[title^='{axis}:']")
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    assert box is not None
    x, top, height = box["x"] + box["width"] / 2, box["y"] + 9, box["height"] - 18
    page.mouse.move(x, top + (1 - start) * height)
    page.mouse.down()
    page.mouse.move(x, top + (1 - (start + end) / 2) * height)
    page.mouse.move(x, top + (1 - end) * height)
    page.mouse.up()


def test_a_sweep_has_its_best_its_charts_and_its_trials(dashboard: Dashboard, page: Page) -> None:
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Sweeps").click()
    expect(page.locator("main tbody tr").filter(has_text="digits")).to_contain_text("60 of 60")
    assert accessibility_problems(page) == []
    page.get_by_role("link", name="digits").click()
    expect(page.get_by_role("heading", name="Best: trial 9")).to_be_visible()
    for name in ("History", "Parallel coordinates", "Importance", "Contour", "Slices"):
        expect(panel(page, name)).to_be_visible()
    importances = panel(page, "Importance").locator("tbody tr")
    expect(importances).to_have_count(5)
    shares = [float(text) for text in importances.locator("td:last-child").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1, abs=0.01)
    expect(rows(page)).to_have_count(COUNT)
    expect(rows(page).nth(6)).to_contain_text("▽ pruned")
    expect(page.get_by_role("main")).to_contain_text("<i>lion</i>")
    assert accessibility_problems(page) == []
    page.set_viewport_size({"width": 390, "height": 900})
    expect(panel(page, "Parallel coordinates").locator("canvas").first).to_be_visible()
    assert page.evaluate(WIDE) <= 0, "it fits a telephone"
    assert accessibility_problems(page) == []
    with page.expect_download() as saved:
        page.get_by_role("link", name="CSV").click()
    assert Path(saved.value.path()).read_text().splitlines()[0].startswith("trial,job,state,lr,layers,dropout")
    page.goto(f"{dashboard.url}/sweeps/none")
    expect(page.locator("main")).to_contain_text("there is no sweep 'none'")


def test_ranges_on_several_axes_select_trials_in_charts_table_and_address(dashboard: Dashboard, page: Page) -> None:
    page.goto(f"{dashboard.url}/sweeps/digits")
    parallel = panel(page, "Parallel coordinates")
    drag(page, "lr", 0.25, 0.75)  # half of the orders of magnitude: 1e-4 to 1e-2
    expect(page).to_have_url(re.compile(r"brush\.lr=[\d.e-]+"))
    low, high = map(float, re.search(r"brush\.lr=([\d.e-]+)\.\.([\d.e-]+)", page.url).groups())  # type: ignore[union-attr]
    assert (low, high) == pytest.approx((1e-4, 1e-2), rel=0.1)
    assert numbers(page) == expected(dashboard, lr=(low, high))
    drag(page, "layers", 0.0, 0.4)
    expect(page).to_have_url(re.compile(r"brush\.layers=2\.\.4"))
    both = expected(dashboard, lr=(low, high), layers=(2, 4))
    assert 0 < len(both) < len(expected(dashboard, lr=(low, high)))
    expect(rows(page)).to_have_count(len(both))
    assert numbers(page) == both
    expect(page.locator("#selected-trials")).to_contain_text(f"{len(both)} of 60 are selected: lr")
    page.reload()
    expect(rows(page)).to_have_count(len(both))
    parallel.get_by_role("button", name="Data table").click()
    expect(parallel.locator(".chart-table tbody tr")).to_have_count(len(both))
    page.locator(".axis-strip[title^='layers:']").dblclick(position={"x": 18, "y": 20})
    expect(rows(page)).to_have_count(len(expected(dashboard, lr=(low, high))))
    assert "brush.layers" not in page.url
    parallel.get_by_role("button", name="Clear selection").click()
    expect(rows(page)).to_have_count(COUNT)
    assert "brush" not in page.url


def test_keys_select_ranges_and_choices_and_clear_them(dashboard: Dashboard, page: Page) -> None:
    page.goto(f"{dashboard.url}/sweeps/digits")
    first = page.get_by_role("slider", name="lr, from")
    first.focus()
    page.keyboard.press("PageUp")
    expect(first).to_have_attribute("aria-valuenow", "10")
    expect(page).to_have_url(re.compile("brush.lr="))
    for _ in range(7):  # lr to; layers from, to; dropout from, to; optimizer from, to
        page.keyboard.press("ArrowRight")
    upper = page.get_by_role("slider", name="optimizer, to")
    expect(upper).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(upper).to_have_attribute("aria-valuetext", "sgd")
    expect(page.locator("#selected-trials")).to_contain_text("optimizer adam to sgd")
    expect(rows(page).filter(has_text="<i>lion</i>")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.locator("#selected-trials")).not_to_contain_text("optimizer")
    expect(page.locator("#selected-trials")).to_contain_text("lr")
    page.keyboard.press("Escape")
    expect(page.locator("#selected-trials")).to_have_text("")
    page.get_by_role("button", name="failed 5").click()
    expect(rows(page).filter(has_text="failed")).to_have_count(0)
    assert "hide=failed" in page.url


def test_a_finger_selects_a_range(dashboard: Dashboard, browser: Browser) -> None:
    with contexts(browser, viewport={"width": 390, "height": 900}, has_touch=True) as context:
        page = dashboard.sign_in(context)
        page.goto(f"{dashboard.url}/sweeps/digits")
        strip = page.locator(".axis-strip[title^='layers:']")
        strip.scroll_into_view_if_needed()
        box = strip.bounding_box()
        assert box is not None
        finger = context.new_cdp_session(page)
        x = box["x"] + 18
        for kind, share in (("touchStart", 0.1), ("touchMove", 0.3), ("touchMove", 0.5), ("touchEnd", None)):
            points = [] if share is None else [{"x": x, "y": box["y"] + share * box["height"]}]
            finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        expect(page).to_have_url(re.compile(r"brush\.layers=5\.\.8"))


def test_each_chart_is_read_with_keys_and_has_its_table(dashboard: Dashboard, page: Page) -> None:
    page.goto(f"{dashboard.url}/sweeps/digits")
    history = panel(page, "History")
    history.get_by_role("img").focus()
    page.keyboard.press("Home")
    expect(history.get_by_role("status")).to_contain_text("trial 1 · complete · lr")
    for name, header in (("History", "trial"), ("Contour", "lr")):
        panel(page, name).get_by_role("button", name="Data table").click()
        expect(panel(page, name).locator(".chart-table th").filter(has_text=header).first).to_be_visible()
    with page.expect_download() as saved:
        history.get_by_role("button", name="Download CSV").click()
    assert Path(saved.value.path()).read_text().splitlines()[:1] == ["trial,state,val/loss"]
    contour = panel(page, "Contour")
    contour.get_by_label("Vertical").select_option("optimizer")
    expect(page).to_have_url(re.compile("up=optimizer"))
    contour.get_by_role("img").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(contour.get_by_role("status")).to_contain_text(re.compile(r"optimizer <i>lion</i> · val/loss about [\d.]+"))
    contour.get_by_label("Horizontal").select_option("optimizer")
    expect(contour.get_by_label("Vertical")).to_have_value("lr")  # never twice the same
    slices = panel(page, "Slices")
    expect(slices.locator("figure")).to_have_count(5)
    slices.get_by_role("img").first.focus()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/jobs/\d+$"))


def test_a_sweep_of_two_trials_says_what_is_missing(dashboard: Dashboard, page: Page) -> None:
    page.goto(f"{dashboard.url}/sweeps/few")
    expect(panel(page, "Importance")).to_contain_text("importances need a metric and 4 complete trials; there are 2")
    expect(panel(page, "Contour")).to_contain_text("Too few trials: 2 different places have a value")


def test_a_thousand_trials_stay_fluid(dashboard: Dashboard, page: Page) -> None:
    page.goto(f"{dashboard.url}/sweeps/many")
    expect(rows(page)).to_have_count(1000)
    strip = page.locator(".axis-strip[title^='lr:']")
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    assert box is not None
    begun_s = page_cpu_s(page)
    x, steps = box["x"] + 18, 40
    page.mouse.move(x, box["y"] + 12)
    page.mouse.down()
    for step in range(steps):
        page.mouse.move(x, box["y"] + 12 + step * (box["height"] - 24) / steps)
    used_s = page_cpu_s(page) - begun_s
    page.mouse.up()
    assert used_s / steps < 0.1, "of the page's own processor time, for each step of a drag"
    expect(page.locator("#selected-trials")).to_contain_text("of 1000 are selected")


def page_cpu_s(page: Page) -> float:
    """What the page's main thread has used: it does not depend on what else the machine does."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    return float(found["TaskDuration"])


def test_the_page_of_a_running_sweep_follows_it(dashboard: Dashboard, page: Page, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    command = ["python3", "-c", SCRIPT, "${args}"]
    tree = {"method": "grid", "metric": {"name": "loss"}, "parameters": {"lr": {"values": [1, 2, 3]}}}
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps({**tree, "command": command, "name": "growing"}))
    wish = SweepWish({"env": [f"GATE={gate}"], "sync": False}, budget=Budget(parallel=1))
    dashboard.client.sweeps.start(file, wish, env={})
    page.goto(f"{dashboard.url}/sweeps/growing")
    expect(page.locator("h1 + .status")).to_have_text(re.compile("running"))
    expect(rows(page).first).to_contain_text("running")
    gate.touch()
    expect(page.locator("h1 + .status")).to_have_text(re.compile("done"))
    expect(rows(page).filter(has_text="complete")).to_have_count(3)
    expect(page.get_by_role("heading", name="Best: trial 1")).to_be_visible()
    expect(panel(page, "History").get_by_role("img")).to_have_attribute("aria-label", re.compile("of 3 trials"))


def test_a_study_whose_trials_have_different_parameters_is_shown(
    dashboard: Dashboard, page: Page, tmp_path: Path
) -> None:
    (tmp_path / "search.py").write_text(STUDY)
    fields = {"script": "search.py", "workdir": str(tmp_path), "name": "study", "existing_environment": sys.prefix}
    dashboard.client.sweeps.start(wish=SweepWish(fields, budget=Budget(parallel=1), study=True), env={})
    page.goto(f"{dashboard.url}/sweeps/study")
    expect(page.locator("h1 + .status")).to_have_text(re.compile("done"), timeout=120_000)
    expect(rows(page)).to_have_count(8)
    expect(page.get_by_role("heading", name="Best: trial")).to_be_visible()
    expect(page.get_by_role("group", name="Table of workers").locator("tbody tr")).to_have_count(1)
    expect(panel(page, "Parallel coordinates").locator(".axis-strip")).to_have_count(4)  # kind, x, y, value
    page.get_by_role("slider", name="x, from").focus()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#selected-trials")).to_contain_text(re.compile("[1-4] of 8 are selected: x"))
    assert accessibility_problems(page) == []
    assert html(dashboard.client, "study")[1]


def test_a_report_needs_no_server_and_has_the_same_charts(
    dashboard: Dashboard, browser: Browser, tmp_path: Path
) -> None:
    found, text = html(dashboard.client, "digits")
    assert found.name == "digits"
    file = tmp_path / "digits.html"
    file.write_text(text)
    problems: list[str] = []
    context = browser.new_context(viewport={"width": 1360, "height": 900}, offline=True)
    context.on("weberror", lambda error: problems.append(str(error.error)))
    context.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page = context.new_page()
    page.goto(file.as_uri())
    expect(panel(page, "Importance").locator("tbody tr")).to_have_count(5)
    for name in ("History", "Parallel coordinates", "Contour", "Slices"):
        expect(panel(page, name).locator("canvas").first).to_be_visible()
    drag(page, "layers", 0.0, 0.4)
    expect(rows(page)).to_have_count(len(expected(dashboard, layers=(2, 4))))
    assert accessibility_problems(page) == []
    assert page.locator("a[href^='/']").count() == 0
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.evaluate(WIDE) <= 0
    context.close()
    assert problems == []

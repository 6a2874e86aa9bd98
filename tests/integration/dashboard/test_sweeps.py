"""The pages of sweeps in a real browser: the list, one sweep with its drawings, and its trials as CSV."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.rig.browser import Dashboard, accessibility_problems, dashboards
from ugro.core.support.state_dir import StateDir
from ugro.core.sweep import Budget, SweepState, TrialState
from ugro.store.database import Store
from ugro.store.sweeps import NewSweep

NODES = "nodes:\n  here: {transport: local, remote_root: '%(home)s/here'}\n"
DOCUMENT = (
    '{"method": "random", "metric": {"name": "val/loss"}, '
    '"parameters": {"lr": {"min": 0.0, "max": 1.0}, "opt": {"values": ["<i>adam</i>", "sgd"]}}}'
)


def fill(home: Path) -> None:
    async def work() -> None:
        store = Store(StateDir(home).database)
        await store.open()
        sweep = await store.sweeps.create(NewSweep("k", "digits", "ann", DOCUMENT, "{}", Budget(trials=3)))
        for number, opt in ((1, "<i>adam</i>"), (2, "sgd"), (3, "sgd")):
            settings = (("lr", f"0.{number}"), ("opt", f'"{opt}"'))
            trial = await store.sweeps.add(sweep.id, settings, [])
            state = TrialState.PRUNED if number == 3 else TrialState.COMPLETE
            await store.sweeps.put(sweep.id, replace(trial, state=state, job=number, best=1 / number, last=2.0, step=9))
        await store.sweeps.end(sweep.id, SweepState.DONE, "all 3 trials were made")
        await store.close()

    asyncio.run(work())


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    with dashboards(NODES, before=fill) as found:
        yield found


@pytest.mark.proof
def test_a_sweep_has_its_best_its_drawings_and_its_trials(dashboard: Dashboard, page: Page) -> None:
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Sweeps").click()
    expect(page.locator("main tbody tr")).to_contain_text("3 of 3")
    assert accessibility_problems(page) == []
    page.get_by_role("link", name="digits").click()
    expect(page.get_by_role("heading", name="Best: trial 3")).to_be_visible()
    expect(page.get_by_role("img", name="val/loss of each trial").locator("circle")).to_have_count(3)
    expect(page.get_by_role("img", name="parameters and metric").locator("polyline")).to_have_count(3)
    rows = page.get_by_role("group", name="Table of trials").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(2)).to_contain_text("pruned")
    expect(rows.nth(0)).to_contain_text("<i>adam</i>")
    assert accessibility_problems(page) == []
    page.set_viewport_size({"width": 390, "height": 900})
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) <= 0, "it fits a telephone"
    with page.expect_download() as saved:
        page.get_by_role("link", name="CSV").click()
    assert Path(saved.value.path()).read_text().splitlines()[0].startswith("trial,job,state,lr,opt,val/loss best")
    page.goto(f"{dashboard.url}/sweeps/none")
    expect(page.locator("main")).to_contain_text("there is no sweep 'none'")

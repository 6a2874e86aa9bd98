"""As many experiments as anybody has, in a real browser: 5,000 in a table, 1,000 in a chart."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.integration.dashboard.test_experiments import WAIT_MS, drawn, rows
from tests.rig.browser import Dashboard, dashboards
from tests.rig.experiments import has_metrics, make_experiments

COUNT = 5000
RECORDED = [number for number in range(1, COUNT + 1) if has_metrics(number)]

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    with dashboards(before=lambda home: make_experiments(home, COUNT)) as found:
        yield found


def test_five_thousand_experiments_are_shown_by_pages_that_new_jobs_do_not_move(
    dashboard: Dashboard, page: Page
) -> None:
    newest = RECORDED[::-1]
    page.goto(dashboard.url + "/experiments")
    expect(page.locator("[data-part=count]")).to_contain_text(f"{len(RECORDED):,} of {len(RECORDED):,}")
    assert rows(page) == newest[:100]
    page.get_by_role("link", name="More →").click()
    expect(page.locator("[data-part=pager]")).to_contain_text("101–200")
    assert rows(page) == newest[100:200]
    job = dashboard.submit("noted")
    dashboard.client.jobs.set_note(job, "counts as an experiment now")
    page.get_by_role("link", name="More →").click()
    expect(page.locator("[data-part=pager]")).to_contain_text("202–301")
    assert rows(page) == newest[200:300]
    page.get_by_role("link", name="← Back").click()
    expect(page.locator("[data-part=pager]")).to_contain_text("102–201")
    dashboard.client.jobs.set_note(job, "")


def test_a_thousand_runs_are_drawn_read_and_grouped(dashboard: Dashboard, page: Page) -> None:
    page.goto(dashboard.url + "/experiments")
    page.get_by_role("link", name="Compare the newest 1,000").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare 1,000 jobs")
    chart = drawn(page, least=1000)
    sizes = page.evaluate(
        "() => performance.getEntriesByType('resource').filter(one => one.name.includes('/v1/metrics?'))"
        ".map(one => one.encodedBodySize)"
    )
    assert 100_000 < max(sizes) < 5_000_000
    plot = chart.get_by_role("img")
    plot.focus()
    page.keyboard.press("End")
    expect(chart.get_by_role("status")).to_contain_text(re.compile(r"step 3\d\d · 1000 curves between 0\.1"))
    height = (plot.bounding_box() or {"height": 0})["height"]
    plot.hover(position={"x": 200, "y": 0.4 * height})  # where the curves are
    expect(chart.get_by_role("status")).to_contain_text(re.compile(r"step \d+ · \d{4} [a-z-]+ [\d.]+ · 999 more"))
    page.get_by_label("Group by").select_option("config")
    group = chart.get_by_role("button", name=re.compile(r"^resnet: batch_size \d+, lr .* \(\d+\)$"))
    expect(group.first).to_be_visible()
    count = page.evaluate("() => document.querySelector('ugro-chart').data.series.length")
    assert count == 24, "three models, four rates, two sizes"
    assert "group=config" in page.url
    page.get_by_label("X axis").select_option("seconds")
    page.wait_for_function("() => document.querySelector('ugro-chart').data.x === 'seconds'", timeout=WAIT_MS)
    drawn(page, least=24)
    last = page.evaluate("() => document.querySelector('ugro-chart').data.series[0].xs.at(-1)")
    assert last == pytest.approx(39, abs=1), "0.1 s for each of 390 steps"

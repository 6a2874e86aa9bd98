"""Pages with something on them: a training's headline, its curves, panels without content, and a telephone's screen."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.rig.browser import Dashboard, accessibility_problems, contexts
from tests.rig.showcase import Showcase, settled, showcases

# Each of these pages has a quicker test elsewhere; filling this cluster takes longer than all that is seen in it.
pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(shutil.which("cc") is None, reason="not installed: a C compiler"),
]


@pytest.fixture(scope="module")
def shown() -> Iterator[Showcase]:
    with showcases() as found:
        yield found


@pytest.fixture(scope="module")
def dashboard(shown: Showcase) -> Dashboard:
    return shown.dashboard


def _open(shown: Showcase, page: Page, name: str) -> None:
    page.goto(shown.dashboard.url + shown.pages[name])
    settled(page)


def _is_above(page: Page, upper: str, lower: str) -> bool:
    script = "([upper, lower]) => document.querySelector(upper).offsetTop < document.querySelector(lower).offsetTop"
    return bool(page.evaluate(script, [upper, lower]))


def test_a_running_training_says_how_far_it_is_before_anything_else(shown: Showcase, page: Page) -> None:
    _open(shown, page, "job-running")
    headline = page.locator("#headline")
    expect(headline).to_contain_text(re.compile(r"Progress\s*step 600 of 2,000\s*30 %"))
    expect(headline).to_contain_text(re.compile(r"Time left\s*4\dm"))
    expect(headline).to_contain_text(re.compile(r"loss\s*0\.\d+\s*best 0\.\d+"))
    expect(headline.locator("ugro-spark")).to_have_attribute("aria-label", re.compile(r"^loss: now 0\.\d+, between"))
    expect(headline).to_contain_text(re.compile(r"Samples/s\s*4\d\d"))
    expect(headline).to_contain_text(re.compile(r"GPU use, 4 GPUs\s*\d\d %\s*memory 75 %"))
    assert _is_above(page, "#headline", "#curves")
    assert _is_above(page, "#curves", "#log")
    _open(shown, page, "jobs")
    row = page.locator("[data-part=running] tr", has_text="gpt-small")
    expect(row).to_contain_text(re.compile(r"step 600 of 2,000 \(30 %\) · 4\dm\w* left · loss 0\.\d+ · 4\d\d"))


def test_one_loss_is_drawn_and_other_metrics_and_ranks_on_demand(shown: Showcase, page: Page) -> None:
    _open(shown, page, "job-running")
    charts = page.locator("ugro-chart")
    expect(charts).to_have_count(1)
    expect(charts.locator("figcaption")).to_have_text("loss, rank 0")
    names = page.get_by_role("group", name="Metrics").get_by_role("checkbox")
    expect(names).to_have_count(6)
    page.get_by_role("checkbox", name="All ranks").check()
    expect(charts.locator(".chart-legend button")).to_have_text([f"rank {rank}" for rank in range(4)])
    page.get_by_role("checkbox", name="lr", exact=True).check()
    expect(charts).to_have_count(2)
    page.reload()
    expect(charts).to_have_count(2)
    expect(page.get_by_role("checkbox", name="All ranks")).to_be_checked()


def test_the_log_comes_first_where_it_explains_a_failure(shown: Showcase, page: Page) -> None:
    _open(shown, page, "job-failed")
    assert _is_above(page, "#log", "#curves")
    expect(page.locator("#headline")).to_contain_text(re.compile(r"Took.*step 39.*loss, last", re.DOTALL))


def test_the_cluster_page_says_how_far_its_jobs_are(shown: Showcase, page: Page) -> None:
    _open(shown, page, "cluster")
    running = page.locator("[data-part=running]")
    expect(running).to_contain_text(re.compile(r"step 600 of 2,000 \(30 %\) · 4\dm\d+s left · loss 0\.\d+"))
    expect(running).to_contain_text("fine-tune: 450 of 1,000 (45 %) · 1m15s left")
    expect(page.locator("[data-key=cpu-cpu1]")).to_contain_text("6 fine-tune")


def test_a_bar_in_the_log_is_progress_and_panels_without_content_are_a_line(shown: Showcase, page: Page) -> None:
    _open(shown, page, "job-bar")
    expect(page.locator("#headline")).to_contain_text(re.compile(r"fine-tune: 450 of 1,000\s*45 %"))
    absent = page.locator("#absent li b")
    expect(absent).to_have_text(["Curves", "Balance"])
    for name in ("curves", "balance"):
        expect(page.locator(f"#{name}")).to_be_hidden()
        expect(page.locator(f".sections a[href='#{name}']")).to_be_hidden()
    _open(shown, page, "job-queued")
    expect(page.locator("#headline")).to_be_hidden()
    expect(page.locator("#ranks, #plan, #outputs, #curves, #balance").filter(visible=True)).to_have_count(0)


def test_a_node_s_charts_share_one_smoothing_and_its_gpus_are_in_order(shown: Showcase, page: Page) -> None:
    _open(shown, page, "node")
    first = page.locator("ugro-chart").first
    expect(first.locator(".chart-legend button")).to_have_text([f"GPU {gpu}" for gpu in range(12)])
    expect(page.get_by_label("Smoothing")).to_have_count(1)
    page.get_by_label("Smoothing").focus()
    page.keyboard.press("End")
    weights = page.locator("ugro-chart").evaluate_all("all => all.map(one => one.getAttribute('smooth'))")
    assert set(weights) == {"0.99"}
    whole = page.locator("ugro-chart[unit='%'][min='0'][max='100']")
    expect(whole).to_have_count(page.locator("ugro-chart[unit='%']").count())
    expect(whole).to_have_count(4)
    first.get_by_role("img").hover()
    expect(first.get_by_role("status")).to_contain_text(re.compile(r"GPU \d+ [\d.]+ %|12 curves between .* %"))


_RULES = """async () => {
  const { gapsIn, tickTexts, written } = await import("/static/chart-scale.js");
  return {
    steady: [...gapsIn([0, 1, 2, 3, 4, 5])],
    paused: [...gapsIn([0, 1, 2, 3, 200, 201, 202])],
    rarer: [...gapsIn([1, 2, 5, 10, 20, 50, 100, 200, 500])],
    few: [...gapsIn([0, 1, 500])],
    given: [...gapsIn([0, 60, 100, 300], 90)],
    texts: [tickTexts([-0, 0.5, 1], ""), tickTexts([0, 50, 100], "%"), tickTexts([0, 500, 1000], "")],
    numbers: [written(1234567), written(0.00012), written(-5, "W"), written(12345)],
  };
}"""


def test_a_line_ends_where_nothing_was_recorded_and_ticks_read_alike(page: Page) -> None:
    assert page.evaluate(_RULES) == {
        "steady": [],
        "paused": [4],
        "rarer": [],
        "few": [],
        "given": [3],
        "texts": [["0.0", "0.5", "1.0"], ["0 %", "50 %", "100 %"], ["0", "500", "1,000"]],
        "numbers": ["1.235M", "1.2e−4", "−5 W", "12,345"],
    }


def test_no_page_is_wider_than_a_telephone_and_axe_finds_nothing(shown: Showcase, browser: Browser) -> None:
    with contexts(browser, viewport={"width": 390, "height": 844}, color_scheme="dark") as context:
        page = shown.dashboard.sign_in(context)
        too_wide, problems = [], []
        for name, path in shown.pages.items():
            page.goto(shown.dashboard.url + path)
            settled(page)
            if page.evaluate("() => document.documentElement.scrollWidth > innerWidth"):
                too_wide.append(name)
            if name in ("job-running", "node"):
                problems += accessibility_problems(page)
        assert too_wide == []
        assert problems == []

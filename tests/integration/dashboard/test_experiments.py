"""Experiments and comparisons in a real browser: finished runs, and live ones."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from tests.rig.browser import Dashboard, accessibility_problems, contexts, dashboards, is_live
from tests.rig.experiments import best_loss, has_metrics, make_experiments, spec_of
from tests.rig.waiting import wait_until
from ugro.kernel.telemetry.rules import parameters

COUNT = 500
RECORDED = [number for number in range(1, COUNT + 1) if has_metrics(number)]
WAIT_MS = 30_000
# Numbers as a script writes them, a few at a time, until a file says that it is enough.
LIVE = """
import json, os, pathlib, sys, time
gate = pathlib.Path(sys.argv[1])
with open(os.environ["UGRO_OUTPUT"] + "/metrics.jsonl", "a", buffering=1) as out:
    for step in range(100_000):
        value = float("nan") if step == 3 else 1 / (step + 1)
        out.write(json.dumps({"step": step, "time": time.time(), "values": {"loss": value, "speed": 2.0}}) + "\\n")
        if gate.exists():
            break
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    with dashboards(before=lambda home: make_experiments(home, COUNT)) as found:
        yield found


def rows(page: Page) -> list[int]:
    found: list[int] = page.locator("tr[data-row]").evaluate_all("rows => rows.map(row => Number(row.dataset.key))")
    return found


def drawn(page: Page, place: int = 0, least: int = 1) -> Locator:
    """A chart that has at least so many curves and shows them."""
    script = (
        "([place, least]) => { const chart = document.querySelectorAll('ugro-chart')[place];"
        " return chart && chart.data.series.length >= least && chart.isReady }"
    )
    page.wait_for_function(script, arg=[place, least], timeout=WAIT_MS)
    return page.locator("ugro-chart").nth(place)


def longest(page: Page) -> int:
    found: int = page.evaluate(
        "() => Math.max(0, ...[...document.querySelectorAll('ugro-chart')]"
        ".flatMap(chart => chart.data.series.map(one => one.xs.length)))"
    )
    return found


def test_sorting_filtering_and_columns_stand_in_the_address(dashboard: Dashboard, page: Page) -> None:
    page.goto(dashboard.url + "/experiments")
    page.get_by_role("link", name="loss best").click()
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("loss best")
    assert rows(page) == sorted(RECORDED, key=best_loss)[:100]
    is_live(page)
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("lr=1e-3 vit")
    wanted = [one for one in RECORDED if spec_of(one).name == "vit" and parameters(spec_of(one))["lr"] == "1e-3"]
    expect(page.locator("[data-part=count]")).to_have_text(re.compile(rf"^{len(wanted):,} of "))
    page.get_by_text("Columns", exact=True).click()
    page.get_by_role("checkbox", name="val/acc max").check()
    expect(page.get_by_role("columnheader", name="val/acc max")).to_be_visible(timeout=WAIT_MS)
    page.reload()
    assert rows(page) == sorted(wanted, key=best_loss)[:100]
    expect(page.get_by_role("columnheader", name="val/acc max")).to_be_visible()
    expect(page.get_by_role("searchbox")).to_have_value("lr=1e-3 vit")


@pytest.mark.proof
def test_a_filter_that_means_nothing_is_said_and_what_finds_nothing_too(dashboard: Dashboard, page: Page) -> None:
    page.goto(dashboard.url + "/experiments")
    page.get_by_role("searchbox").fill("lr>fast")
    expect(page.get_by_role("alert").filter(has_text="fast")).to_contain_text("is not a number", timeout=WAIT_MS)
    page.get_by_role("searchbox").fill("no-such-thing")
    expect(page.locator("[data-part=table]")).to_contain_text("No experiment matches", timeout=WAIT_MS)
    page.goto(dashboard.url + "/experiments?sort=nonsense")
    expect(page.get_by_role("alert").filter(has_text="nonsense")).to_contain_text("unknown column")


@pytest.mark.proof
def test_runs_that_differ_in_their_seed_alone_become_one_line_with_mean_and_deviation(
    dashboard: Dashboard, page: Page
) -> None:
    page.goto(dashboard.url + "/experiments?q=resnet+lr%3D1e-3+batch_size%3D32")
    page.get_by_label("Group by").select_option("config")
    line = page.locator("tr[data-row]")
    expect(line).to_have_count(1, timeout=WAIT_MS)
    wanted = {"lr": "1e-3", "batch_size": "32"}
    members = [
        one for one in RECORDED if spec_of(one).name == "resnet" and wanted.items() <= parameters(spec_of(one)).items()
    ]
    losses = [best_loss(one) for one in members]
    mean = math.fsum(losses) / len(losses)
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in losses) / (len(losses) - 1))
    expect(line).to_contain_text(f"{len(members)} runs")
    expect(line).to_contain_text(f"{mean:.4g} ± {deviation:.2g}")


@pytest.mark.proof
def test_a_note_written_in_one_tab_is_seen_in_another_and_at_the_terminal(
    dashboard: Dashboard, context: BrowserContext
) -> None:
    one, other = dashboard.sign_in(context), context.new_page()
    text = "best so far <img src=x onerror=alert(1)>"
    other.goto(dashboard.url + "/experiments?column=note&column=tags")
    is_live(other)
    one.goto(dashboard.url + "/experiments")
    one.get_by_role("button", name="Write the note of job 499").click()
    one.get_by_label("Text").fill(text)
    one.get_by_label("Tags, separated").fill("base paper")
    one.get_by_role("button", name="Save").click()
    expect(one.get_by_text("Note saved")).to_be_visible()
    expect(one.get_by_role("button", name="Edit the note of job 499")).to_be_visible(timeout=WAIT_MS)
    other.bring_to_front()
    expect(other.locator("tr[data-key='499']")).to_contain_text(text, timeout=WAIT_MS)
    said = run(dashboard, "note", "499", "--json")
    assert (said["note"]["text"], said["note"]["tags"]) == (text, ["base", "paper"])
    run(dashboard, "note", "499", "--tag", "mine", "--untag", "paper", "--json")
    assert run(dashboard, "note", "499", is_json=False).splitlines() == ["tags  base mine", text]
    expect(other.locator("tr[data-key='499'] a.chip")).to_have_text(["base", "mine"], timeout=WAIT_MS)
    one.goto(dashboard.url + "/jobs/499")
    note = one.locator("ugro-note")
    expect(note).to_contain_text(text)
    dashboard.client.jobs.set_note(499, "second thoughts")
    expect(note).to_contain_text("second thoughts", timeout=WAIT_MS)
    other.locator("a.chip", has_text="mine").click()
    expect(other.locator("[data-part=count]")).to_have_text(re.compile(r"^1 of \d{3} with metrics, notes or tags$"))
    assert rows(other) == [499]


@pytest.mark.proof
def test_what_is_no_tag_is_refused_and_nothing_is_lost(dashboard: Dashboard, page: Page) -> None:
    dashboard.client.jobs.set_note(498, "stays", tags=["kept"])
    page.goto(dashboard.url + "/experiments")
    page.get_by_role("button", name="the note of job 498").click()
    page.get_by_label("Tags, separated").fill("<b>")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("alert").filter(has_text="is not a tag")).to_be_visible()
    assert dashboard.client.jobs.note(498).tags == ("kept",)


def test_chosen_runs_are_compared_with_their_curves_and_differences_and_no_secret(
    dashboard: Dashboard, page: Page
) -> None:
    page.goto(dashboard.url + "/experiments")
    expect(page.locator("#compare")).to_be_disabled()
    for number in (491, 484):
        page.get_by_role("checkbox", name=f"Select job {number}").check()
    page.get_by_role("button", name="Compare 2 selected").click()
    expect(page).to_have_url(re.compile(r"/compare\?jobs=491,484$"))
    chart = drawn(page, least=2)
    sentence = chart.get_by_role("img").get_attribute("aria-label") or ""
    assert re.search(r"loss over steps\. 491 \w+ falls from .* to .*, lowest .* at step 390\.", sentence), sentence
    differing = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="parameter seed"))
    expect(differing).to_have_count(int(spec_of(491).argv[6] != spec_of(484).argv[6]))
    rates = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="parameter lr"))
    expect(rates).to_contain_text(parameters(spec_of(484))["lr"])
    expect(page.get_by_role("rowheader", name="parameter epochs")).to_have_count(0)
    page.get_by_role("link", name="Show equal facts too").click()
    expect(page.get_by_role("rowheader", name="parameter epochs")).to_be_visible()
    assert "hush" not in page.content()
    page.get_by_role("link", name="Remove job 491").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare 1 job")


@pytest.mark.proof
def test_a_chart_is_used_by_keyboard_read_as_a_table_and_looked_at_closely(dashboard: Dashboard, page: Page) -> None:
    page.goto(dashboard.url + "/compare?jobs=491,484&key=loss")
    chart = drawn(page, least=2)
    chart.get_by_role("img").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(chart.get_by_role("status")).to_contain_text("step 10 · 491")
    for _ in range(3):
        page.keyboard.press("+")
    whole = chart.get_by_role("button", name="Whole range")
    expect(whole).to_be_visible()
    page.keyboard.press("Escape")
    expect(whole).to_be_hidden()
    chart.get_by_role("button", name="Data table").click()
    cells = chart.locator("tbody tr").first
    expect(cells).to_contain_text(re.compile(r"^0[\d.]+"))
    expect(chart.locator("tbody tr")).to_have_count(40)
    with page.expect_download() as download:
        chart.get_by_role("button", name="Download CSV").click()
    text = Path(download.value.path()).read_text()
    assert text.splitlines()[0] == "curve,step,mean,min,max"
    assert len(text.splitlines()) == 81
    page.get_by_label("Smoothing").focus()
    page.keyboard.press("End")
    page.get_by_label("Log scale").check()
    assert "smooth=0.99" in page.url
    assert "log=1" in page.url
    page.reload()
    expect(page.get_by_label("Log scale")).to_be_checked()
    expect(drawn(page, least=2)).to_have_attribute("smooth", "0.99")


def _is_drawn_in(page: Page, colour: str, colours: str) -> bool:
    return colour in page.evaluate(colours)


@pytest.mark.proof
def test_curves_have_the_colours_of_the_theme_and_change_with_it(dashboard: Dashboard, page: Page) -> None:
    page.goto(dashboard.url + "/compare?jobs=491,484&key=loss")
    drawn(page, least=2)
    colours = """() => {
        const canvas = document.querySelector('ugro-chart canvas');
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        const found = new Map();
        for (let at = 0; at < pixels.length; at += 4) {
            if (pixels[at + 3] !== 255) continue;
            const key = pixels.slice(at, at + 3).join(',');
            found.set(key, (found.get(key) ?? 0) + 1);
        }
        return [...found].sort((one, other) => other[1] - one[1]).map(one => one[0]);
    }"""
    wanted = """() => {
        const probe = document.body.appendChild(document.createElement('i'));
        probe.style.color = 'var(--series-1)';
        return getComputedStyle(probe).color.match(/\\d+/g).join(',');
    }"""
    seen = []
    for theme in ("light", "dark"):
        page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
        colour = page.evaluate(wanted)
        wait_until(partial(_is_drawn_in, page, colour, colours), 20, f"a chart in the colours of {theme}")
        seen.append(colour)
    assert seen[0] != seen[1]


@pytest.mark.proof
def test_a_running_job_is_drawn_on_while_it_records(dashboard: Dashboard, page: Page, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = dashboard.submit("live-curve", sys.executable, "-c", LIVE, str(gate))
    try:
        page.goto(f"{dashboard.url}/jobs/{job}")
        page.evaluate("() => { window.isTheSamePage = true }")
        drawn(page)
        before = longest(page)
        wait_until(lambda: longest(page) > before + 20, 60, "the curve to grow")
        means = page.evaluate("() => document.querySelector('ugro-chart').data.series[0].means")
        assert means.count(None) == 1, "the one that is not a number"
        label = page.locator("ugro-chart").first.get_by_role("img").get_attribute("aria-label") or ""
        assert "is not a number at 1 place" in label
        assert page.evaluate("window.isTheSamePage"), "the page was loaded again"
    finally:
        gate.touch()
    dashboard.client.jobs.wait(job)
    page.goto(dashboard.url + "/experiments?q=live-curve")
    expect(page.locator(f"tr[data-key='{job}']")).to_contain_text("succeeded", timeout=WAIT_MS)


def test_the_code_of_two_runs_is_compared_line_by_line(dashboard: Dashboard, page: Page, tmp_path: Path) -> None:
    jobs = []
    for rate in (1, 2):
        (tmp_path / "train.py").write_text(f"lr = {rate}\nprint('<b>', lr)\n")
        (tmp_path / "job.yaml").write_text("name: coded\ncommand: ['true']\n")
        jobs.append(dashboard.client.jobs.submit(tmp_path / "job.yaml", env={}).id)
    page.goto(f"{dashboard.url}/compare?jobs={jobs[0]},{jobs[1]}")
    page.get_by_role("link", name="line by line").click()
    changed = page.locator("details.file", has_text="train.py")
    expect(changed.locator(".removed")).to_have_text("-lr = 1")
    expect(changed.locator(".added")).to_have_text("+lr = 2")
    expect(changed).to_contain_text("print('<b>', lr)")


def test_curves_come_with_only_the_columns_and_digits_that_were_asked_for(dashboard: Dashboard, page: Page) -> None:
    ask = "path => fetch(path).then(async answer => [answer.status, await answer.json()])"
    status, found = page.evaluate(ask, "/v1/metrics?job=1&key=loss&column=steps&column=means&digits=3")
    [curve] = found["curves"]
    assert status == 200
    assert set(curve) == {"owner", "attempt", "rank", "key", "count", "width", "steps", "means"}
    assert all(len(repr(mean).replace(".", "").lstrip("0")) <= 3 for mean in curve["means"])
    assert curve["means"][-1] == pytest.approx(best_loss(1), rel=0.01)
    assert page.evaluate(ask, "/v1/metrics?job=1&column=nonsense")[0] == 400


@pytest.mark.proof
@pytest.mark.parametrize(
    ("path", "words"),
    [("/compare?jobs=1,x", "is not a job number"), ("/compare?jobs=1,999999", "there is no job 999999"),
     ("/compare/code?old=1&new=2", "has no stored code"), ("/experiments?after=x", "there is no page")],
)  # fmt: skip
def test_a_wrong_address_is_said_in_words(dashboard: Dashboard, page: Page, path: str, words: str) -> None:
    page.goto(dashboard.url + path)
    expect(page.locator("main")).to_contain_text(words)


@pytest.mark.proof
def test_everybody_can_read_these_pages_in_both_themes_on_a_phone_and_a_wide_screen(
    dashboard: Dashboard, browser: Browser
) -> None:
    pages = (
        "/experiments?q=id%3C12", "/experiments?group=config", "/compare", "/compare?jobs=491,484",
        "/compare?q=id%3C30",
    )  # fmt: skip
    for theme, width in (("light", 1360), ("dark", 390)):
        with contexts(browser, viewport={"width": width, "height": 900}, color_scheme=theme) as context:
            page = dashboard.sign_in(context)
            for path in pages:
                page.goto(dashboard.url + path)
                if "?" in path and "compare" in path:
                    drawn(page)
                assert accessibility_problems(page) == [], (theme, path)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is too wide"


def run(dashboard: Dashboard, *args: str, is_json: bool = True) -> Any:
    said = subprocess.run(
        [str(Path(sys.executable).with_name("ugro")), *args],
        env={"UGRO_HOME": str(dashboard.home), "PATH": "/usr/bin:/bin", "UGRO_CLUSTER": str(dashboard.cluster)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout) if is_json else said.stdout

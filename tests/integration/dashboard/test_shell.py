"""The dashboard's frame in a real browser: it lives, acts, is used by keyboard, and anybody can read it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from tests.rig.browser import Dashboard, accessibility_problems, contexts, dashboards, is_live
from tests.rig.ports import free_port
from tests.rig.waiting import wait_until
from ugro.kernel.jobs.operations import CancelJob

PAGES = ("/", "/nodes/here", "/settings", "/about", "/no-such-page")


def test_a_link_lets_a_browser_in_and_shows_the_cluster(dashboard: Dashboard, page: Page) -> None:
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="here"))
    expect(row).to_contain_text("healthy")
    expect(page.get_by_text("ugro health", exact=True)).to_be_visible()
    is_live(page)


def test_a_job_appears_and_ends_on_an_open_page(dashboard: Dashboard, page: Page, tmp_path: Path) -> None:
    is_live(page)
    page.evaluate("window.isTheSamePage = true")
    gate = tmp_path / "gate"
    job = dashboard.submit("seen-live", "sh", "-c", f"until [ -e {gate} ]; do sleep 0.05; done")
    running = page.locator("[data-part=running]").get_by_role("row", name=f"{job} seen-live")
    expect(running).to_contain_text("running")
    expect(page.locator("[data-part=nodes]").get_by_role("link", name=str(job), exact=True)).to_be_visible()
    gate.touch()
    expect(running).to_have_count(0)
    expect(page.locator("[data-part=events]")).to_contain_text("every rank ended with 0")
    assert page.evaluate("window.isTheSamePage"), "the page was loaded again"


@pytest.mark.proof
def test_a_waiting_job_says_why_it_waits(dashboard: Dashboard, page: Page) -> None:
    first = dashboard.submit("first", "sleep", "600")
    second = dashboard.submit("second", after=str(first))
    queue = page.locator("[data-part=queue]")
    expect(queue).to_contain_text(f"{second} second")
    expect(queue).to_contain_text(f"job {first}")
    for job in (second, first):
        dashboard.client.ask(CancelJob(str(job)))
    expect(queue, "a panel with nothing in it is not there").to_be_hidden()


@pytest.mark.proof
def test_a_node_is_drained_and_resumed_by_buttons(dashboard: Dashboard, page: Page) -> None:
    page.goto(f"{dashboard.url}/nodes/here")
    page.get_by_role("button", name="Drain").click()
    question = page.get_by_role("dialog")
    expect(question).to_contain_text("ugro node drain here")
    question.get_by_role("button", name="Leave it").click()
    expect(page.get_by_role("button", name="Drain")).to_be_visible()
    page.get_by_role("button", name="Drain").click()
    page.get_by_role("textbox", name="Reason").fill("new fan")
    page.keyboard.press("Enter")
    expect(page.locator(".head")).to_contain_text("drained new fan")
    assert dashboard.client.health(["here"])[0].drained == "new fan"
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("button", name="Drain")).to_be_visible()
    expect(page.locator(".head")).not_to_contain_text("drained")


@pytest.mark.proof
def test_an_action_that_is_refused_says_so(dashboard: Dashboard, page: Page) -> None:
    button = "Object.assign(document.createElement('button'), {textContent: 'Cancel it'})"
    page.evaluate(f"document.body.append({button}); document.body.lastChild.dataset.post = '/v1/jobs/4711/cancel'")
    page.get_by_role("button", name="Cancel it").click()
    expect(page.get_by_role("alert").filter(has_text="there is no job 4711")).to_be_visible()


def test_a_test_message_says_what_became_of_it(dashboard: Dashboard, page: Page) -> None:
    page.goto(f"{dashboard.url}/settings")
    page.get_by_role("button", name="Test log").click()
    expect(page.locator("#tried")).to_contain_text("log: sent")


@pytest.mark.proof
def test_the_nodes_are_filtered_and_the_address_says_how(dashboard: Dashboard, page: Page) -> None:
    is_live(page)
    nodes = page.locator("[data-part=nodes]")
    page.keyboard.press("/")
    page.keyboard.type("nowhere")
    expect(nodes).to_contain_text("No node matches")
    expect(page).to_have_url(f"{dashboard.url}/?q=nowhere")
    page.reload()
    is_live(page)
    expect(page.get_by_role("searchbox")).to_have_value("nowhere")
    page.get_by_role("searchbox").fill("her")
    expect(nodes.get_by_role("link", name="here")).to_be_visible()


@pytest.mark.proof
def test_what_is_typed_and_focused_survives_an_update(dashboard: Dashboard, page: Page) -> None:
    is_live(page)
    link = page.locator("[data-part=nodes]").get_by_role("link", name="here")
    link.focus()
    job = dashboard.submit("while-focused")
    expect(page.locator("[data-part=events]")).to_contain_text(f"job {job}")
    expect(link).to_be_focused()


@pytest.mark.proof
def test_keys_lead_everywhere(dashboard: Dashboard, page: Page) -> None:
    is_live(page)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Help and keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("j")
    expect(page.locator("[data-part=nodes]").get_by_role("link", name="here")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{dashboard.url}/nodes/here")
    is_live(page)
    page.keyboard.press("g")
    page.keyboard.press("s")
    expect(page).to_have_url(f"{dashboard.url}/settings")
    is_live(page)
    page.keyboard.press("g")
    page.keyboard.press("c")
    expect(page).to_have_url(f"{dashboard.url}/")


@pytest.mark.proof
def test_the_theme_is_kept(dashboard: Dashboard, page: Page) -> None:
    is_live(page)
    root = page.locator("html")
    colour = "getComputedStyle(document.body).backgroundColor"
    page.keyboard.press("t")
    expect(root).to_have_attribute("data-theme", "light")
    light = page.evaluate(colour)
    page.get_by_role("button", name="Theme: light").click()
    expect(root).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(root).to_have_attribute("data-theme", "dark")
    is_live(page)
    assert page.evaluate(colour) != light
    page.keyboard.press("t")
    expect(root).not_to_have_attribute("data-theme", re.compile("."))


@pytest.mark.proof
def test_a_command_is_copied(dashboard: Dashboard, page: Page, context: BrowserContext) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy: ugro health").click()
    expect(page.get_by_role("button", name="Copy: ugro health")).to_have_text("copied")
    assert page.evaluate("navigator.clipboard.readText()") == "ugro health"


def test_signing_out_ends_it(dashboard: Dashboard, page: Page) -> None:
    page.goto(f"{dashboard.url}/settings")
    page.get_by_role("button", name="Sign this browser out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_curves_of_a_node_are_shown(dashboard: Dashboard, page: Page) -> None:
    page.goto(f"{dashboard.url}/nodes/here")
    expect(page.locator("#charts ugro-chart").first).to_be_visible()
    page.get_by_role("link", name="24 h").click()
    expect(page).to_have_url(f"{dashboard.url}/nodes/here?hours=24")
    expect(page.locator("#charts ugro-chart").first).to_be_visible()


@pytest.mark.proof
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1360])
def test_everybody_can_read_every_page(dashboard: Dashboard, browser: Browser, theme: str, width: int) -> None:
    with contexts(browser, color_scheme=theme, viewport={"width": width, "height": 900}) as context:
        page = dashboard.sign_in(context)
        for path in PAGES:
            page.goto(dashboard.url + path)
            if path != "/no-such-page":
                is_live(page)
            assert accessibility_problems(page) == [], path
            too_wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert too_wide <= 0, path


@pytest.mark.proof
def test_twelve_tabs_live_on_one_stream(dashboard: Dashboard, context: BrowserContext) -> None:
    pages = [dashboard.sign_in(context), *(context.new_page() for _ in range(11))]
    for page in pages[1:]:
        page.goto(dashboard.url)
    for page in pages:
        is_live(page)
    job = dashboard.submit("for-twelve")
    for page in pages:
        page.bring_to_front()
        expect(page.locator("[data-part=events]")).to_contain_text(f"job {job}")


@pytest.mark.proof
def test_what_happens_before_a_page_listens_is_not_missed(dashboard: Dashboard, context: BrowserContext) -> None:
    first = dashboard.sign_in(context)
    is_live(first)
    late = context.new_page()
    jobs: list[int] = []

    def hold(route: Route) -> None:
        jobs.append(dashboard.submit("in-between"))
        expect(first.locator("[data-part=events]")).to_contain_text(f"job {jobs[0]}")
        route.continue_()

    listening = "import {live} from '/static/live.js'; live.on(c => c.event && (window.seen ??= []).push(c.event.job));"
    late.route("**/static/live.js", hold)
    late.route("**/static/keys.js", lambda route: route.fulfill(content_type="text/javascript", body=listening))
    late.goto(dashboard.url)
    expect(late.locator("[data-part=events]")).to_contain_text(f"job {jobs[0]}")
    wait_until(lambda: jobs[0] in late.evaluate("window.seen ?? []"), 30, "the event")


@pytest.mark.proof
def test_a_stream_that_is_taken_and_never_answered_is_asked_for_anew(dashboard: Dashboard, browser: Browser) -> None:
    asked: list[str] = []

    def hang_at_first(route: Route) -> None:
        asked.append(route.request.url)
        if len(asked) > 1:
            route.continue_()

    def hurry(route: Route) -> None:
        body = route.fetch().text()
        assert body.count("SILENT_MS = 15000") == 1
        route.fulfill(content_type="text/javascript", body=body.replace("SILENT_MS = 15000", "SILENT_MS = 1000"))

    with contexts(browser) as context:
        context.add_init_script("delete window.SharedWorker")  # what those ask for cannot be held back
        context.route("**/static/live-worker.js", hurry)
        context.route(re.compile(r"/live(\?|$)"), hang_at_first)
        is_live(dashboard.sign_in(context))
        assert len(asked) == 2


@pytest.mark.proof
def test_a_worker_that_never_answers_is_replaced(dashboard: Dashboard, browser: Browser) -> None:
    """As one may be that is being ended, because its last tab has gone."""
    with contexts(browser) as context:
        context.add_init_script("""
            const Real = window.SharedWorker;
            window.made = 0;
            window.SharedWorker = function (...given) {
              return window.made++ ? new Real(...given) : { port: new MessageChannel().port1 };
            };
        """)
        page = dashboard.sign_in(context)
        is_live(page)
        assert page.evaluate("window.made") == 2
        job = dashboard.submit("heard-once")
        expect(page.locator("[data-part=events]")).to_contain_text(f"job {job}")


@pytest.mark.proof
def test_a_browser_without_shared_workers_is_live_all_the_same(dashboard: Dashboard, browser: Browser) -> None:
    with contexts(browser) as context:
        context.add_init_script("delete window.SharedWorker")
        page = dashboard.sign_in(context)
        is_live(page)
        job = dashboard.submit("without-sharing")
        expect(page.locator("[data-part=events]")).to_contain_text(f"job {job}")


@pytest.mark.proof
def test_pages_notice_that_the_agent_is_away_and_go_on_after_it(browser: Browser) -> None:
    port = free_port()
    text = f"nodes: {{here: {{transport: local, remote_root: %(home)s/root}}}}\ndashboard: {{port: {port}}}\n"
    with dashboards(text) as dashboard, contexts(browser) as context:
        page = dashboard.sign_in(context)
        is_live(page)
        dashboard.agent.stop()
        expect(page.locator("#live")).to_have_attribute("data-state", "offline")
        expect(page.get_by_role("alert")).to_contain_text("does not answer")
        dashboard.client.close()
        dashboard.start()
        job = dashboard.submit("after-restart")
        is_live(page)
        expect(page.locator("[data-part=events]")).to_contain_text(f"job {job}")
        expect(page.locator("#offline")).to_be_hidden()


@pytest.mark.proof
def test_the_stream_goes_on_where_it_was_cut_and_loses_nothing(dashboard: Dashboard, page: Page) -> None:
    read = """async (after) => {
        const answer = await fetch('/live', {headers: after === null ? {} : {'last-event-id': String(after)}});
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        let text = '';
        while (!text.includes('"nodes"')) text += (await reader.read()).value;
        await reader.cancel();
        return text;
    }"""
    first = dashboard.submit("before")
    dashboard.client.jobs.wait(first)
    cursor = int(re.findall(r"^id: (\d+)$", page.evaluate(read, None), re.MULTILINE)[-1])
    missed = [dashboard.submit(f"missed-{number}") for number in range(5)]
    for job in missed:
        dashboard.client.jobs.wait(job)
    lines = re.findall(r"^data: (.*)$", page.evaluate(read, cursor), re.MULTILINE)
    seen = [line["event"]["seq"] for line in map(json.loads, lines) if "event" in line]
    told = [event.seq for event in dashboard.client.jobs.events(after=cursor)]
    assert seen == told[: len(seen)]
    assert len(seen) >= 5 * 4, "submitted, given, running, ended"


@pytest.mark.proof
def test_an_edited_file_that_is_broken_is_said_on_every_page(browser: Browser) -> None:
    with dashboards() as dashboard, contexts(browser) as context:
        page = dashboard.sign_in(context)
        good = dashboard.cluster.read_text()
        dashboard.cluster.write_text(good + "nonsense: 1\n")
        wait_until(lambda: dashboard.client.agent().config_error, 20, "the agent to see the broken file")
        page.reload()
        expect(page.get_by_role("alert").filter(has_text="is not used")).to_contain_text("nonsense")

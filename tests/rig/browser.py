"""A real browser on a real agent's dashboard. The fixtures are for whole modules: Playwright's loop lives as long.

def test_something(dashboard: Dashboard, page: Page) -> None:
    page.goto(dashboard.url + "/jobs")
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.rig.agent import AgentProcess
from tests.rig.waiting import end_all_with_variable
from ugro.client.client import Client
from ugro.kernel.agent.operations import CreateDashboardLink

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # No page may leave this machine, whatever is wrong with it.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
_AXE_RULES = ("wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice")
_PAGE_TIMEOUT_MS = 30_000
_VIEWPORT: Any = {"width": 1360, "height": 900}
ONE_NODE = "nodes: {here: {transport: local, remote_root: %(home)s/root}}\n"


class Dashboard:
    """An agent with a home of its own, and the way to its pages."""

    def __init__(self, home: Path, cluster_text: str, descriptors: tuple[int, int] | None = None) -> None:
        self.home = home
        self._descriptors = descriptors
        self.cluster = home / "cluster.yaml"
        self.cluster.write_text(cluster_text % {"home": home})
        self.start()
        self.client = Client(home=home, any_cluster=True)
        self.url = self.link().partition("/login")[0]

    def start(self) -> None:
        self.agent = AgentProcess(self.home, self.cluster, descriptors=self._descriptors)
        assert self.agent.wait_ready(), "the agent died before it was ready"

    def restart(self) -> None:
        self.agent.stop()
        self.client.close()
        self.start()

    def link(self) -> str:
        return self.client.ask(CreateDashboardLink()).url

    def sign_in(self, context: BrowserContext) -> Page:
        page = context.new_page()
        page.goto(self.link())
        page.wait_for_url(self.url + "/")
        return page

    def page(self, context: BrowserContext) -> Page:
        """The cluster page; signs in unless the context is. A tab of a plain file stays open, and with it the process
        that shows pages: starting one costs more than a page."""
        if not context.pages:
            self.sign_in(context).goto(f"{self.url}/static/again.css")
        page = context.new_page()
        answer = page.goto(self.url + "/")
        if answer is None or not answer.ok or page.url != self.url + "/":
            page.goto(self.link())
            page.wait_for_url(self.url + "/")
        return page

    def submit(self, name: str, *argv: str, **fields: Any) -> int:
        """A job's number; of one that does nothing, where nothing is said."""
        given = {"name": name, "command": list(argv) or ["true"], "sync": False} | fields
        return self.client.jobs.submit(fields=given, env={}).id

    def close(self) -> None:
        self.client.close()
        self.agent.stop()


@contextmanager
def dashboards(
    cluster_text: str = ONE_NODE,
    *,
    before: Callable[[Path], None] = lambda home: None,
    descriptors: tuple[int, int] | None = None,
) -> Iterator[Dashboard]:
    """``before`` the agent starts, its home may be filled; ``descriptors`` as for ``AgentProcess``."""
    home = Path(tempfile.mkdtemp(prefix="d"))
    found: Dashboard | None = None
    try:
        before(home)
        found = Dashboard(home, cluster_text, descriptors)
        yield found
    finally:
        if found is not None:
            found.close()
        end_all_with_variable("UGRO_HOME", [str(home)])
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def browsers() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip("chromium is not installed; make setup says how to get it")
    from playwright.sync_api import expect, sync_playwright  # only those who browse pay for it

    expect.set_options(timeout=_PAGE_TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def contexts(browser: Browser, **options: Any) -> Iterator[BrowserContext]:
    """A profile of its own. What a page complains of, or asks of other machines, fails the test."""
    context = browser.new_context(**options)
    context.set_default_timeout(_PAGE_TIMEOUT_MS)
    with _without_problems(context):
        try:
            yield context
        finally:
            context.close()


@contextmanager
def _without_problems(context: BrowserContext) -> Iterator[None]:
    problems: list[str] = []
    heard: dict[str, Callable[[Any], None]] = {
        "weberror": lambda error: problems.append(f"{error.page and error.page.url}: {error.error}"),
        "console": lambda message: problems.append(message.text) if _is_complaint(message) else None,
        "request": lambda request: problems.append(f"asks {request.url}") if _leaves(request.url) else None,
    }
    for event, hear in heard.items():
        context.on(event, hear)  # type: ignore[call-overload]
    yield
    for event, hear in heard.items():
        context.remove_listener(event, hear)
    assert not problems, problems


def is_live(page: Page) -> None:
    """Waits until its scripts run, and hear what happens."""
    from playwright.sync_api import expect

    expect(page.locator("#live")).to_have_attribute("data-state", "live")


def accessibility_problems(page: Page) -> list[str]:
    """What axe-core finds against WCAG 2.2, levels A and AA."""
    import axe_playwright_python

    script = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    page.evaluate(script)
    found = page.evaluate(f"axe.run(document, {{runOnly: {list(_AXE_RULES)}}})")
    return [f"{one['id']}: {one['help']}: {node['html']:.200}" for one in found["violations"] for node in one["nodes"]]


def _is_complaint(message: Any) -> bool:
    # That the agent is away while it restarts is shown to the user; Chromium says it to the console, too.
    return message.type == "error" and "Failed to load resource" not in message.text


def _leaves(url: str) -> bool:
    here = ("http://127.0.0.1:", "https://127.0.0.1:", "http://localhost:", "data:", "blob:", "about:")
    return not url.startswith(here)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsers() as found:
        yield found


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    with dashboards() as found:
        yield found


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with contexts(browser, viewport=_VIEWPORT) as found:
        yield found


@pytest.fixture(scope="module")
def visitor(browser: Browser) -> Iterator[BrowserContext]:
    """The profile of a module's pages: the first page of a new one costs three times as much as any later."""
    context = browser.new_context(viewport=_VIEWPORT)
    context.set_default_timeout(_PAGE_TIMEOUT_MS)
    yield context
    context.close()


@pytest.fixture
def page(dashboard: Dashboard, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Signed in, at the cluster page. A test that has a ``context`` of its own finds it there."""
    if "context" in request.fixturenames:
        yield dashboard.sign_in(request.getfixturevalue("context"))
        return
    shared: BrowserContext = request.getfixturevalue("visitor")
    with _without_problems(shared):
        found = dashboard.page(shared)
        yield found
        found.close()

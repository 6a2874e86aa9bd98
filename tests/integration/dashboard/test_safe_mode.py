"""The banner of safe mode: on every page, with what was seen and the command to type; gone when it was decided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.rig.browser import ONE_NODE, Dashboard, accessibility_problems, browser, context, dashboards
from tests.rig.engine import gated
from tests.rig.older_state import put_back, saved
from tests.rig.waiting import wait_until
from ugro.features.safe_mode.operations import ReconcileAgent

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

__all__ = ["browser", "context"]
_PAGES = ("/", "/jobs", "/experiments", "/settings", "/nodes/here")


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    with dashboards(ONE_NODE) as made:
        yield made


@pytest.mark.proof
def test_every_page_says_that_the_agent_is_in_safe_mode_until_it_was_decided(
    dashboard: Dashboard, context: BrowserContext
) -> None:
    gate = dashboard.home / "gate"
    copy = saved(dashboard.home, dashboard.home / "copy.db")
    job = dashboard.submit("newer", "sh", "-c", gated(gate))
    wait_until(lambda: dashboard.client.jobs.get(job).state == "running", 20)
    put_back(dashboard.home, copy)
    dashboard.agent.kill()
    dashboard.start()
    dashboard.url = dashboard.link().partition("/login")[0]
    wait_until(lambda: "attempt 1 of job" in str(dashboard.client.agent().safe_mode), 20)
    page = dashboard.sign_in(context)
    for path in _PAGES:
        page.goto(dashboard.url + path)
        banner = page.locator("#safe-mode").inner_text()
        assert "Safe mode: nothing is started or ended." in banner, path
        assert f"attempt 1 of job {job}" in banner
        assert "ugro agent reconcile" in banner
    assert accessibility_problems(page) == []
    dashboard.client.ask(ReconcileAgent("adopt"))
    page.goto(dashboard.url + "/jobs")
    assert page.locator("#safe-mode").count() == 0
    gate.touch()
    wait_until(lambda: dashboard.client.jobs.get(job).state == "succeeded", 20)

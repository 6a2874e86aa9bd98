"""Pages of an agent whose state was found to be damaged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.rig.browser import Dashboard, dashboards
from tests.rig.damage import clean_state, ruin_in_use


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    """One of its own: it cannot be used afterwards."""
    with dashboards(before=_fill) as found:
        yield found


def _fill(home: Path) -> None:
    filling = threading.Thread(target=clean_state, args=(home,))  # the browser's loop runs in this thread
    filling.start()
    filling.join()


@pytest.mark.proof
def test_every_page_says_that_the_state_is_damaged_and_how_to_restore_it(dashboard: Dashboard, page: Page) -> None:
    ruin_in_use(dashboard.home / "state.db")
    origin = "/".join(page.url.split("/")[:3])
    page.goto(f"{origin}/jobs/3")
    for path in ("/", "/jobs", "/jobs/3", "/settings"):
        page.goto(origin + path)
        expect(page.locator(".banner.bad").first).to_contain_text("state.db is damaged")
        expect(page.locator(".banner.bad").first).to_contain_text("ugro agent restore")

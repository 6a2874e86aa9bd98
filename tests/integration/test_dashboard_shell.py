"""The dashboard's frame in a real browser: who gets in, what stays out, and that pages live."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.rig.browser import Dashboard


def test_a_link_lets_a_browser_in_and_shows_the_cluster(dashboard: Dashboard, page: Page) -> None:
    expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_be_visible()

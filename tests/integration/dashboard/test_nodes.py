"""The cluster's page with more nodes than a table can show, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.rig.browser import Dashboard, accessibility_problems, contexts, dashboards, is_live

COUNT = 120
HERE = ("gpu7", "gpu70")  # the others never answer


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    names = [f"gpu{number}" for number in range(1, COUNT + 1)]
    reached = {name: f"{{transport: local, remote_root: '%(home)s/{name}'}}" for name in HERE}
    nodes = "".join(f"  {name}: {reached.get(name, '{transport: [/bin/false]}')}\n" for name in names)
    with dashboards("nodes:\n" + nodes) as found:
        found.client.health()
        yield found


def _names(page: Page) -> list[str]:
    return page.locator("tr[data-row] th").all_inner_texts()


def _numbers(names: list[str]) -> list[int]:
    return [int(name.removeprefix("gpu")) for name in names]


def test_many_nodes_are_a_map_and_a_page_of_the_worst(dashboard: Dashboard, page: Page) -> None:
    page.goto(dashboard.url)
    expect(page.locator("[data-part=map]")).to_contain_text(f"{COUNT - 2} unreachable")
    expect(page.locator("[data-part=map]")).to_contain_text("2 healthy")
    expect(page.locator("[data-squares] a")).to_have_count(COUNT)
    expect(page.locator("tr[data-row]")).to_have_count(50)
    away = [number for number in range(1, COUNT + 1) if f"gpu{number}" not in HERE]
    assert _numbers(_names(page)) == away[:50]
    expect(page.get_by_role("navigation", name="Pages of nodes")).to_contain_text(f"1–50 of {COUNT}")
    assert len(page.request.get(dashboard.url).body()) < 100_000


@pytest.mark.proof
def test_the_other_nodes_are_on_other_pages_and_the_healthy_ones_come_last(dashboard: Dashboard, page: Page) -> None:
    page.goto(dashboard.url)
    for beginning in (51, 101):
        page.get_by_role("link", name="next →").click()
        expect(page.locator("[data-part=nodes]")).to_contain_text(re.compile(rf"{beginning}–\d+ of {COUNT}"))
    assert _names(page)[-2:] == list(HERE)
    expect(page).to_have_url(f"{dashboard.url}/?page=3")
    page.reload()
    expect(page.locator("tr[data-row]")).to_have_count(COUNT - 100)
    page.goto(f"{dashboard.url}/?page=999")
    assert _names(page)[-2:] == list(HERE), "a page that is no more is the last one"


@pytest.mark.proof
def test_order_and_filter_stand_in_the_address_and_begin_at_the_first_page(dashboard: Dashboard, page: Page) -> None:
    page.goto(f"{dashboard.url}/?page=2")
    is_live(page)
    page.get_by_label("Order").select_option("by name")
    expect(page).to_have_url(f"{dashboard.url}/?sort=name")
    expect(page.locator("tr[data-row] th").nth(6)).to_have_text(HERE[0])
    page.get_by_label("Status").select_option("healthy")
    expect(page.locator("[data-squares] a")).to_have_count(2)
    expect(page.locator("tr[data-row]")).to_have_count(2)
    expect(page.get_by_role("navigation", name="Pages of nodes")).to_have_count(0)
    page.get_by_label("Order").focus()
    page.keyboard.press("Tab")
    expect(page.locator("[data-squares] a").first).to_be_focused()
    page.reload()
    expect(page.get_by_label("Order")).to_have_value("name")
    expect(page.locator("tr[data-row]")).to_have_count(2)


@pytest.mark.proof
def test_the_map_is_one_stop_of_the_tab_key_and_arrows_lead_to_a_node(dashboard: Dashboard, page: Page) -> None:
    page.goto(dashboard.url)
    is_live(page)
    page.get_by_label("Order").focus()
    page.keyboard.press("Tab")
    square = page.locator("[data-squares] a")
    expect(square.first).to_be_focused()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    expect(square.nth(6)).to_be_focused()
    expect(square.nth(6)).to_have_accessible_name(re.compile(r"^gpu7: healthy, CPU use \d+ %$"))
    expect(page.locator("[data-square-words]")).to_have_text(re.compile("^gpu7: healthy"))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    expect(square.nth(6)).to_be_focused()
    page.keyboard.press("End")
    expect(square.last).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('[data-squares]')") is None, "it holds nobody"
    page.keyboard.press("Shift+Tab")
    expect(square.last).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{dashboard.url}/nodes/gpu{COUNT}")


@pytest.mark.proof
@pytest.mark.parametrize(("theme", "width"), [("light", 1360), ("dark", 390)])
def test_everybody_can_read_the_map(dashboard: Dashboard, browser: Browser, theme: str, width: int) -> None:
    with contexts(browser, color_scheme=theme, viewport={"width": width, "height": 900}) as context:
        page = dashboard.sign_in(context)
        is_live(page)
        assert accessibility_problems(page) == []
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0

"""The pages of services in a real browser: the list, one service with its replicas, and the box to try its model."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.rig.browser import Dashboard, accessibility_problems, dashboards
from tests.rig.ports import free_port
from tests.rig.waiting import wait_until
from ugro.client.services import ServiceWish

pytestmark = pytest.mark.proof
NODES = "nodes:\n  here: {transport: local, remote_root: '%(home)s/here'}\n"
ENGINE = Path(__file__).parents[2] / "rig" / "pretend_engine.py"
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LIMIT_S = 60


def serve(dashboard: Dashboard, name: str, **options: object) -> int:
    """Its port."""
    port = free_port()
    command = [sys.executable, str(ENGINE), "{host}", "{port}"]
    fields = {"name": name, "command": command, "sync": False, "cpus": 0, "env": [f"LEFT={dashboard.home / 'left'}"]}
    wish = ServiceWish(fields=fields, options={"replicas": 2, "port": port, **options})
    dashboard.client.services.start(wish, env={}, key=name)
    dashboard.client.services.wait(name, timeout_s=LIMIT_S)
    return port


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    with dashboards(NODES) as found:
        yield found


@pytest.fixture(scope="module")
def chat(dashboard: Dashboard) -> int:
    return serve(dashboard, "chat")


def answers(page: Page) -> Locator:
    return page.locator(".turn.model .said")


def send(page: Page, text: str, kind: str = "chat") -> None:
    page.locator("select[name=kind]").select_option(kind)
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def test_without_a_service_the_page_says_how_to_start_one(dashboard: Dashboard, page: Page) -> None:
    page.keyboard.press("g")
    page.keyboard.press("v")
    expect(page.get_by_role("heading", level=1)).to_have_text("Services")
    expect(page.locator("main")).to_contain_text("ugro serve JOB")
    assert accessibility_problems(page) == []


def test_a_service_has_its_replicas_and_figures(dashboard: Dashboard, chat: int, page: Page) -> None:
    page.goto(f"{dashboard.url}/services")
    row = page.locator("main tbody tr")
    expect(row).to_contain_text("2 of 2")
    expect(row).to_contain_text(f"http://127.0.0.1:{chat}")
    assert accessibility_problems(page) == []
    row.get_by_role("link", name="chat").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Service chat")
    replicas = page.locator("[data-part=replicas] tbody tr")
    expect(replicas).to_have_count(2)
    expect(replicas.first).to_contain_text("✓ ready")
    ask = urllib.request.Request(f"http://127.0.0.1:{chat}/v1/completions", b'{"prompt": "one two"}')
    for _ in range(5):
        urllib.request.urlopen(ask, timeout=LIMIT_S).read()
    expect(page.locator(".tile").first).to_contain_text(re.compile(r"[5-9] in all"))
    assert accessibility_problems(page) == []
    page.set_viewport_size({"width": 1200, "height": 900})
    cut = page.locator("[data-part=replicas] .scroll").evaluate("table => table.scrollWidth - table.clientWidth")
    assert cut <= 0, "every column of the replicas is seen"
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.evaluate(WIDE) <= 0, "it fits a telephone"
    assert accessibility_problems(page) == []


def test_a_chat_is_answered_word_by_word_and_remembers(dashboard: Dashboard, chat: int, page: Page) -> None:
    page.goto(f"{dashboard.url}/services/chat")
    page.get_by_label("Text", exact=True).fill("hello <b>big</b> world")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("hello <b>big</b> world ")
    figures = page.locator("#try-figures")
    expect(figures).to_contain_text(re.compile(r"first token after .*; 3 tokens, [\d.]+ per second"))
    with page.expect_request("**/try") as asked:
        send(page, "again")
    sent = json.loads(asked.value.post_data or "")
    contents = [message["content"] for message in sent["messages"]]
    assert contents == ["hello <b>big</b> world", "hello <b>big</b> world ", "again"]
    expect(answers(page)).to_have_count(2)
    assert accessibility_problems(page) == []
    page.get_by_role("button", name="Clear").click()
    expect(answers(page)).to_have_count(0)


def test_what_is_stopped_in_the_browser_stops_in_the_service(dashboard: Dashboard, chat: int, page: Page) -> None:
    page.goto(f"{dashboard.url}/services/chat")
    send(page, "wait for ever")
    expect(answers(page)).to_contain_text("more more more")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#try-figures")).to_have_text("stopped")
    left = dashboard.home / "left"
    wait_until(left.exists, LIMIT_S, "the server to learn that the browser has left")


def test_labels_vectors_and_refusals_are_shown(dashboard: Dashboard, chat: int, page: Page) -> None:
    page.goto(f"{dashboard.url}/services/chat")
    send(page, "one\ntwo", "classify")
    expect(page.locator(".turn.model tbody tr")).to_have_count(4)
    expect(page.locator(".turn.model tbody tr").first).to_contain_text("<b>good</b>")
    send(page, "one", "embed")
    expect(page.locator(".turn.model")).to_contain_text("16")
    send(page, "[1, 2]", "predict")
    expect(page.locator("#try-problem")).to_contain_text("the service answered 404: this model has no /predict")
    send(page, "[1, 2", "predict")
    expect(page.locator("#try-problem")).to_contain_text("the input is not JSON")


def test_a_service_with_keys_is_tried_with_one(dashboard: Dashboard, page: Page) -> None:
    serve(dashboard, "closed", keys=True)
    _, key = dashboard.client.services.create_key("closed", "test")
    page.goto(f"{dashboard.url}/services/closed")
    send(page, "hello")
    expect(page.locator("#try-problem")).to_contain_text("the service answered 401")
    expect(page.get_by_label("Text", exact=True)).to_have_value("hello")  # nothing that was typed is lost
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Send").click()
    expect(answers(page)).to_have_text("hello ")


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, {"kind": "chat", "messages": [{"role": "user", "content": "x"}]}, 403),  # no origin
        ({"origin": "http://evil.example"}, {"kind": "chat"}, 403),
        ({"origin": "own"}, {"kind": "exec"}, 400),
        ({"origin": "own"}, {"kind": "chat", "path": "/admin"}, 400),
        ({"origin": "own"}, {"kind": "embed", "text": "x", "key": "a\r\nx-evil: 1"}, 400),
        ({"origin": "own"}, {"kind": "chat"}, 400),
        ({"origin": "own"}, {"kind": "embed", "text": "x"}, 200),
    ],
)
def test_a_browser_can_send_nothing_else(
    dashboard: Dashboard, chat: int, page: Page, headers: dict[str, str], body: dict[str, object], status: int
) -> None:
    cookie = "; ".join(f"{one['name']}={one['value']}" for one in page.context.cookies())
    own = {name: value.replace("own", dashboard.url) for name, value in headers.items()}
    asked = urllib.request.Request(
        f"{dashboard.url}/services/chat/try",
        json.dumps(body).encode(),
        {"content-type": "application/json", "cookie": cookie, **own},
    )
    try:
        found = urllib.request.urlopen(asked, timeout=LIMIT_S).status
    except HTTPError as error:
        found = error.code
    assert found == status

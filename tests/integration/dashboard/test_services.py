"""The pages of services in a real browser: the list, one service with its replicas and figures."""

from __future__ import annotations

import re
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.rig.browser import Dashboard, accessibility_problems, dashboards
from tests.rig.ports import free_port
from ugro.features.services.client import ServiceWish

pytestmark = pytest.mark.proof
NODES = "nodes:\n  here: {transport: local, remote_root: '%(home)s/here'}\n"
ENGINE = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers["content-length"] or 0))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    do_POST = do_GET

ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LIMIT_S = 60


def serve(dashboard: Dashboard, name: str, **options: object) -> int:
    """Its port."""
    port = free_port()
    command = [sys.executable, "-c", ENGINE, "{host}", "{port}"]
    fields = {"name": name, "command": command, "sync": False, "cpus": 0}
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

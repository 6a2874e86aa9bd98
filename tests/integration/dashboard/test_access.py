"""Who gets at the dashboard, asked as a program, another site or a stranger would: over plain HTTP."""

from __future__ import annotations

import json
import os
import pty
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect

from tests.integration.conftest import Ugro
from tests.rig.browser import ONE_NODE, Dashboard, contexts, dashboards
from tests.rig.waiting import wait_until
from tests.rig.web import ask, cookie_of, path_of, sign_in
from ugro.kernel.support.errors import NotAllowed


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    with dashboards() as found:
        yield found


@pytest.fixture(scope="module")
def cookie(dashboard: Dashboard) -> str:
    return cookie_of(sign_in(dashboard, dashboard.link()))


def test_a_link_works_once(dashboard: Dashboard) -> None:
    link = dashboard.link()
    first, second = sign_in(dashboard, link), sign_in(dashboard, link)
    assert (first.status, first.headers["location"], second.status) == (303, "/", 401)
    assert "set-cookie" not in second.headers
    given = first.headers["set-cookie"].lower()
    assert "httponly" in given
    assert "samesite=strict" in given


def test_looking_at_a_link_does_not_use_it_up(dashboard: Dashboard) -> None:
    link = dashboard.link()
    page = ask(dashboard, "GET", path_of(link))
    assert page.status == 200
    assert "set-cookie" not in page.headers
    assert sign_in(dashboard, link).status == 303


def test_another_site_cannot_sign_a_browser_in(dashboard: Dashboard) -> None:
    answer = sign_in(dashboard, dashboard.link(), origin="http://evil.example")
    assert (answer.status, "set-cookie" in answer.headers) == (403, False)


@pytest.mark.parametrize("place", ["//evil.example", "/%5Cevil.example", "http://evil.example", "/%0d%0ax:evil"])
def test_a_link_leads_nowhere_else(dashboard: Dashboard, place: str) -> None:
    answer = sign_in(dashboard, f"{dashboard.link()}&to={place}")
    assert answer.headers["location"] == "/"
    assert sign_in(dashboard, f"{dashboard.link()}&to=/jobs?q=a%26b").headers["location"] == "/jobs?q=a&b"


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
def test_there_are_no_pages_of_the_framework(dashboard: Dashboard, cookie: str, path: str) -> None:
    assert ask(dashboard, "GET", path, {"cookie": cookie}).status == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8099", "127.0.0.1.evil.example", "[::1", ""])
def test_a_name_that_points_here_is_not_enough(dashboard: Dashboard, cookie: str, host: str) -> None:
    assert ask(dashboard, "GET", "/", {"cookie": cookie, "host": host}).status == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1234", "[::1]:8099"])
def test_loopback_has_its_names_also_behind_a_tunnel(dashboard: Dashboard, cookie: str, host: str) -> None:
    assert ask(dashboard, "GET", "/", {"cookie": cookie, "host": host}).status == 200


FOREIGN: tuple[dict[str, str], ...] = (
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "none"},
    {},
)


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_an_order_from_elsewhere_is_refused(
    dashboard: Dashboard, cookie: str, headers: dict[str, str], method: str
) -> None:
    assert ask(dashboard, method, "/v1/nodes/here/drain", {"cookie": cookie, **headers}).status == 403
    assert ask(dashboard, "GET", "/v1/nodes/here/drain", {"cookie": cookie}).status == 403
    assert dashboard.client.health(["here"])[0].drained is None


@pytest.mark.parametrize("headers", [{"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}], ids=str)
def test_the_stream_is_not_for_other_sites(dashboard: Dashboard, cookie: str, headers: dict[str, str]) -> None:
    assert ask(dashboard, "GET", "/live", {"cookie": cookie, **headers}).status == 403
    assert ask(dashboard, "GET", "/live", {"cookie": cookie}).status == 200


def test_an_order_of_the_page_itself_is_taken(dashboard: Dashboard, cookie: str) -> None:
    own = {"cookie": cookie, "origin": dashboard.url, "content-type": "application/json"}
    assert ask(dashboard, "POST", "/v1/nodes/here/drain", own).status == 204
    assert ask(dashboard, "POST", "/v1/nodes/here/resume", own).status == 204


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/jobs"), ("POST", "/v1/exec"), ("POST", "/v1/agent/stop"), ("POST", "/v1/dashboard")],
)
def test_what_the_dashboard_does_not_do_cannot_be_had_through_it(
    dashboard: Dashboard, cookie: str, method: str, path: str
) -> None:
    answer = ask(dashboard, method, path, {"cookie": cookie, "origin": dashboard.url})
    assert answer.status == 403
    assert json.loads(answer.text)["error"]["kind"] == "not_allowed"
    assert dashboard.client.agent().pid == dashboard.agent.process.pid


def test_a_program_comes_in_with_the_token(dashboard: Dashboard) -> None:
    token = (dashboard.home / "dashboard.token").read_text().strip()
    right, wrong = {"authorization": f"Bearer {token}"}, {"authorization": f"Bearer {token[:-1]}"}
    assert json.loads(ask(dashboard, "GET", "/v1/nodes", right).text)["nodes"]
    assert ask(dashboard, "POST", "/v1/nodes/here/resume", right).status == 204
    assert ask(dashboard, "GET", "/v1/nodes", wrong).status == 401


def test_prometheus_comes_in_with_the_token_and_only_reads(dashboard: Dashboard) -> None:
    token = (dashboard.home / "dashboard.token").read_text().strip()
    right, wrong = {"authorization": f"Bearer {token}"}, {"authorization": f"Bearer {token[:-1]}"}
    page = ask(dashboard, "GET", "/metrics", right)
    assert (page.status, page.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "# TYPE ugro_nodes gauge\n" in page.text
    refused = ask(dashboard, "GET", "/metrics", wrong)
    assert refused.status == 401
    assert "ugro_nodes" not in refused.text
    assert ask(dashboard, "POST", "/metrics", right).status == 405


@pytest.mark.parametrize("path", ["/", "/static/ugro.css", "/v1/nodes", "/no-such-page"])
def test_every_answer_carries_the_rules_for_browsers(dashboard: Dashboard, cookie: str, path: str) -> None:
    headers = ask(dashboard, "GET", path, {"cookie": cookie}).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == ("no-cache" if path.startswith("/static") else "no-store")


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py"])
def test_only_static_files_are_static(dashboard: Dashboard, cookie: str, path: str) -> None:
    answer = ask(dashboard, "GET", path, {"cookie": cookie})
    assert answer.status == 404
    assert "create_web" not in answer.text


@pytest.mark.proof
def test_two_agents_have_two_dashboards(dashboard: Dashboard) -> None:
    port = urlsplit(dashboard.url).port
    with dashboards(f"{ONE_NODE}dashboard: {{port: {port}}}\n") as other:
        assert other.url != dashboard.url
        assert sign_in(other, other.link()).status == 303


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate, and is not installed")
def test_with_a_certificate_the_dashboard_is_https(tmp_path: Path, browser: Browser) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    making = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=127.0.0.1", "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*making, *names], check=True, capture_output=True)
    text = f"{ONE_NODE}dashboard: {{certificate_file: {certificate}, key_file: {key}}}\n"
    with dashboards(text) as dashboard, contexts(browser, ignore_https_errors=True) as context:
        page = dashboard.sign_in(context)
        assert page.url.startswith("https://127.0.0.1")
        assert all(cookie.get("secure") for cookie in context.cookies())
        expect(page.locator("#live")).to_have_attribute("data-state", "live")


@pytest.mark.proof
def test_an_edit_of_the_file_moves_the_dashboard(tmp_path: Path) -> None:
    with dashboards() as dashboard:
        text = dashboard.cluster.read_text()
        dashboard.cluster.write_text(text + "dashboard: {enabled: false}\n")
        wait_until(lambda: _refusal(dashboard), 30, "the dashboard to close")
        dashboard.cluster.write_text(text + "dashboard: {certificate_file: /no/such.pem}\n")
        wait_until(lambda: "no such file" in _refusal(dashboard), 30, "the missing certificate to be said")
        dashboard.cluster.write_text(text + "dashboard: {host: localhost}\n")
        wait_until(lambda: not _refusal(dashboard), 30, "the dashboard to open again")
        assert "//localhost:" in dashboard.link()


def _refusal(dashboard: Dashboard) -> str:
    try:
        dashboard.link()
    except NotAllowed as error:
        return error.message
    return ""


def test_the_command_prints_a_link_and_says_when_there_is_no_dashboard(ugro: Ugro) -> None:
    done = ugro("--json", "dashboard")
    assert json.loads(done.stdout)["dashboard"]["url"].startswith("http://127.0.0.1:")
    assert ugro("dashboard", "--no-open").stdout.startswith("http://127.0.0.1:")
    ugro.cluster = ugro.home / "cwd" / "off.yaml"
    ugro.cluster.write_text("nodes: {here: {transport: local}}\ndashboard: {enabled: false}\n")
    ugro("agent", "stop")
    refused = ugro("dashboard")
    assert refused.returncode == 6
    assert "the dashboard is disabled" in refused.stderr


@pytest.mark.proof
def test_a_browser_is_opened_and_the_link_is_in_nobodys_list_of_processes(ugro: Ugro, tmp_path: Path) -> None:
    told, browser = tmp_path / "told", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {told}.new && mv {told}.new {told}\n')
    browser.chmod(0o755)
    terminal, theirs = pty.openpty()
    env = ugro.environment({"DISPLAY": ":7", "BROWSER": str(browser)})
    with os.fdopen(terminal, "rb", buffering=0):
        subprocess.run(ugro.argv("dashboard"), env=env, cwd=ugro.home / "cwd", stdout=theirs, timeout=60, check=True)
        os.close(theirs)
        url = wait_until(lambda: told.read_text() if told.exists() else "", 30, "the browser to be started")
    page = Path(urlsplit(url.strip()).path)
    assert page.parent == ugro.home
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert "/login?once=" in page.read_text()

"""Strangers learn nothing from the dashboard, whatever they ask; a browser that signed out is one; a GET only looks."""

from __future__ import annotations

import getpass
import http.client
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

import ugro
from tests.rig.browser import ONE_NODE, Dashboard, contexts, dashboards, is_live
from tests.rig.waiting import wait_until
from tests.rig.web import Answer, ask, connect, cookie_of, own, sign_in
from ugro.kernel.access.operations import ListAuditEntries
from ugro.kernel.files.operations import GetJobResults
from ugro.kernel.operations.access_rules import PAGES
from ugro.kernel.support.state_dir import StateDir


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    with dashboards(ONE_NODE + "cluster: {name: hidden-lab}\n") as found:
        found.cluster.write_text(found.cluster.read_text() + "hidden_mistake: 1\n")
        wait_until(lambda: found.client.agent().config_error, 30, "the mistake in the file to be seen")
        yield found


@pytest.fixture
def cookie(dashboard: Dashboard) -> str:
    return cookie_of(sign_in(dashboard, dashboard.link()))


LOOKED_AT = (
    *("/", "/login", "/login?once=x", "/loginx", "/login/", "/LOGIN", "//login", "/%6cogin", "/logout", "/nope"),
    *("/static/", "/static/nope", "/static/shell.js", "/static/../login", "/settings", "/nodes/here", "/jobs/1"),
    *("/live", "/metrics", "/docs", "/openapi.json", "/v1/agent", "/v1/nodes", "/v1/nope", "/jobs/1/again"),
    *("/jobs/1/file?name=x", "/jobs/1/file/raw?name=x", "/jobs/1/file/image?name=x", "/jobs/1/outputs.tar"),
)
PLACES = {"{name}": "here", "{word}": "1", "{number}": "1"}  # what stands in the gaps of routes
ORDERS = ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "NONSENSE")
ASKED = [
    *(("GET", path) for path in LOOKED_AT),
    *(("HEAD", path) for path in ("/", "/login", "/static/ugro.css", "/static/nope")),
    *((method, path) for method in ORDERS for path in ("/", "/login")),
    *(("POST", path) for path in ("/logout", "/static/ugro.css", "/v1/nodes/here/drain", "/loginx")),
]


def filled(path: str) -> str:
    for gap, value in PLACES.items():
        path = path.replace(gap, value)
    assert "{" not in path, "say above what stands there"
    return path


def every_page() -> list[tuple[str, str]]:
    routes = (route.partition(" ") for route in PAGES)
    return [(method, filled(path)) for method, _, path in routes]


ALL_ASKED = list(dict.fromkeys([*ASKED, *every_page()]))
HOSTS = ("evil.example", "\"bad'\\")


@pytest.mark.parametrize(("method", "path"), ALL_ASKED)
def test_a_stranger_learns_nothing(dashboard: Dashboard, method: str, path: str) -> None:
    for headers in ({}, {"origin": dashboard.url}, *({"host": host} for host in HOSTS)):
        assert_bare(dashboard, ask(dashboard, method, path, headers, "once=x&to=/jobs"))


def test_a_strangers_large_body_and_strange_range_are_refused_without_a_word(dashboard: Dashboard) -> None:
    large = ask(dashboard, "POST", "/login", {"origin": dashboard.url}, "x" * 10_000)
    assert large.status == 413
    assert_bare(dashboard, large)
    assert_bare(dashboard, ask(dashboard, "GET", "/static/ugro.css", {"range": "bytes=900000000-"}))
    assert_bare(dashboard, ask(dashboard, "GET", "/login?once=%ff&to=%00"))


def test_a_stranger_leaves_no_failure_in_the_log(dashboard: Dashboard) -> None:
    """Their lines would push those about jobs out of it."""
    mine = {"origin": dashboard.url}
    leaves = connect(dashboard)
    leaves.request("POST", "/login", body="once", headers={**mine, "content-length": "50"})
    leaves.close()
    broken = ask(dashboard, "POST", "/login", {"origin": "http://[::1"})
    endless = connect(dashboard)
    endless.request("POST", "/login", body=iter([b"x" * 10_000]), headers=mine, encode_chunked=True)
    assert (broken.status, endless.getresponse().status) == (403, 413)
    endless.close()
    assert "Traceback" not in StateDir(dashboard.home).log.read_text()


def test_the_answer_is_the_same_whether_a_page_exists_or_not(dashboard: Dashboard) -> None:
    answers = {(one.status, one.text) for one in (ask(dashboard, "GET", path) for path in ("/", "/jobs/1", "/nope"))}
    assert len(answers) == 1


def assert_bare(dashboard: Dashboard, answer: Answer) -> None:
    shown = f"{answer.text} {dict(answer.headers)}"
    words = ("hidden-lab", "hidden_mistake", "ugro-cursor", str(dashboard.home), ugro.__version__, "Traceback")
    assert not [word for word in (*words, f">{getpass.getuser()}<") if word in shown], shown
    assert answer.status in (200, 400, 401, 403, 405, 413, 416)
    assert "set-cookie" not in answer.headers
    assert "server" not in answer.headers
    if answer.status != 400:  # the server's own: not HTTP
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"


# --- signing out ---------------------------------------------------------------------------------------------------


def test_a_copied_cookie_is_worth_nothing_after_signing_out(dashboard: Dashboard, cookie: str) -> None:
    other = cookie_of(sign_in(dashboard, dashboard.link()))
    stream = connect(dashboard)
    stream.request("GET", "/live", headers={"cookie": cookie})
    live = stream.getresponse()
    assert live.status == 200
    assert ask(dashboard, "POST", "/logout", own(dashboard, cookie)).status == 303
    _read_to_its_end(live)
    stream.close()
    assert ask(dashboard, "GET", "/", {"cookie": cookie}).status == 401
    assert ask(dashboard, "GET", "/", {"cookie": other}).status == 200, "other browsers stay signed in"


def _read_to_its_end(live: http.client.HTTPResponse) -> None:
    """A stream that goes on has a heartbeat every few seconds."""
    deadline = time.monotonic() + 30
    while live.read1(4096):
        assert time.monotonic() < deadline, "the stream goes on"


def test_another_site_cannot_sign_a_browser_out(dashboard: Dashboard, cookie: str) -> None:
    assert ask(dashboard, "POST", "/logout", {"cookie": cookie, "origin": "http://evil.example"}).status == 403
    assert ask(dashboard, "GET", "/logout", {"cookie": cookie}).status == 405
    assert ask(dashboard, "GET", "/", {"cookie": cookie}).status == 200


@pytest.mark.proof
def test_all_tabs_know_when_one_signs_out(dashboard: Dashboard, browser: Browser) -> None:
    with contexts(browser) as context:
        page, other = dashboard.sign_in(context), context.new_page()
        other.goto(dashboard.url + "/jobs")
        is_live(other)
        page.goto(dashboard.url + "/settings")
        page.get_by_role("button", name="Sign this browser out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        expect(other.locator("#live")).to_have_attribute("data-state", "signed-out")


# --- a GET only looks ----------------------------------------------------------------------------------------------


def test_no_get_changes_anything(dashboard: Dashboard, cookie: str) -> None:
    number = dashboard.submit("a", "sh", "-c", "echo hello; echo there > $UGRO_OUTPUT/result.txt")
    assert number == 1
    dashboard.client.jobs.wait(1)
    # Of a small job, files of what the database holds are made when somebody looks; here a command was first.
    list(dashboard.client.jobs.logs(1))
    dashboard.client.ask(GetJobResults("1"))
    wait_until(lambda: _state(dashboard.home)["attempt_environments"], 30, "the packages of the node to be recorded")
    wait_until(lambda: dict(_meta(dashboard.home))["told_jobs"] != "0", 30, "the job's end to be told")
    extra = ["/v1/nodes", "/v1/agent", "/v1/nodes/here/drain", "/v1/jobs/1/cancel", "/v1/jobs/1/notes", "/metrics"]
    queries = ["/login?once=x", "/jobs/1/file?name=result.txt", "/jobs/1/log?rank=0", "/compare?jobs=1"]
    paths = [*(path for method, path in every_page() if method == "GET"), *extra, *queries]
    assert len(paths) > 25
    link = dashboard.link()
    dashboard.client.ask(ListAuditEntries())  # what was done before is written down by now
    before = _state(dashboard.home)
    for path in paths:
        for method in ("GET", "HEAD"):
            if path == "/live" and method == "HEAD":
                continue
            ask(dashboard, method, path, {"cookie": cookie, "ugro-ssh-auth-sock": "/tmp/evil"}, "")
            assert _state(dashboard.home) == before, f"{method} {path}"
    assert sign_in(dashboard, link).status == 303, "the link was not used up"


def _meta(home: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(f"file:{home / 'state.db'}?mode=ro", uri=True)) as database:
        return database.execute("SELECT key, value FROM meta").fetchall()


def _state(home: Path) -> dict[str, object]:
    """Rows of the database, and the user's files; not what the agent measures and logs all the time."""
    with closing(sqlite3.connect(f"file:{home / 'state.db'}?mode=ro", uri=True)) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows: dict[str, object] = {name: database.execute(f"SELECT * FROM {name}").fetchall() for name in names}
        # What is refused is written down, a moment later; what is done would be, too.
        rows["audit"] = database.execute("SELECT * FROM audit WHERE outcome NOT LIKE 'refused%'").fetchall()
        rows["sqlite_sequence"] = database.execute("SELECT * FROM sqlite_sequence WHERE name != 'audit'").fetchall()
    passing = ("agent.log", "agent.said", "metrics", "state.db", "root/")
    found = (str(path.relative_to(home)) for path in home.rglob("*"))
    kept = [name for name in found if not name.startswith(passing)]
    return rows | {name: (home / name).stat().st_size for name in kept if (home / name).is_file()}

"""The dashboard's pure parts: who is let in, what passes to the API, and how figures are written."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from ugro.kernel.jobs.service import Change
from ugro.kernel.links.model import Disk, Facts, Gpu, NodeReport, Status, by_name
from ugro.web import site as formatting
from ugro.web.access import COOKIE_LIFETIME_S, LINK_LIFETIME_S, MOST_LINKS, MOST_SESSIONS, Tokens, may_launch
from ugro.web.api_allowlist import AllowedApi, is_allowed
from ugro.web.config import Dashboard
from ugro.web.dashboard import Endpoint
from ugro.web.pages import overview as nodes
from ugro.web.pages.jobs import submit_key
from ugro.web.pages.overview import NodeRow, NodesQuery, _without_small_gaps, chosen, node_table, totals

NOW = 1_800_000_000.0


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path / "dashboard.token")


def test_a_link_works_once(tokens: Tokens) -> None:
    word = tokens.link(NOW)
    assert tokens.take(word, NOW + 1) == ""
    assert tokens.take(word, NOW + 1) is None


def test_a_link_that_is_too_old_does_not_work(tokens: Tokens) -> None:
    word = tokens.link(NOW)
    assert tokens.take(word, NOW + LINK_LIFETIME_S) is None


def test_of_too_many_links_the_oldest_stop_working(tokens: Tokens) -> None:
    links = [tokens.link(NOW) for _ in range(150)]
    assert tokens.take(links[0], NOW) is None
    assert tokens.take(links[-1], NOW) is not None


def test_a_session_is_known_to_the_next_agent_of_the_same_home(tokens: Tokens, tmp_path: Path) -> None:
    cookie = tokens.sessions.begin(NOW)
    assert Tokens(tmp_path / "dashboard.token").sessions.find(cookie, NOW + 1)
    (tmp_path / "dashboard.token").unlink()
    assert not Tokens(tmp_path / "dashboard.token").sessions.find(cookie, NOW + 1), "a new token signs everybody out"


def test_a_session_runs_out(tokens: Tokens) -> None:
    cookie = tokens.sessions.begin(NOW)
    assert not tokens.sessions.find(cookie, NOW + COOKIE_LIFETIME_S)
    assert tokens.sessions.find(cookie, NOW - 7200), "a clock that was set back by hours signs nobody out"
    assert not tokens.sessions.find(cookie, NOW - 10 * 365 * 86400), "one of a clock that was years ahead ends with it"


def test_a_session_that_has_ended_stays_ended(tokens: Tokens, tmp_path: Path) -> None:
    cookie, other = tokens.sessions.begin(NOW), tokens.sessions.begin(NOW)
    name = tokens.sessions.find(cookie, NOW)
    assert name is not None
    tokens.sessions.end(name)
    for sessions in (tokens.sessions, Tokens(tmp_path / "dashboard.token").sessions):
        assert sessions.find(cookie, NOW) is None
        assert sessions.find(other, NOW) is not None


def test_a_session_ends_also_where_its_file_cannot_be_written(tokens: Tokens, tmp_path: Path) -> None:
    cookie = tokens.sessions.begin(NOW)
    (tmp_path / "dashboard.new").mkdir()
    tokens.sessions.end(tokens.sessions.find(cookie, NOW) or "")
    assert Tokens(tmp_path / "dashboard.token").sessions.find(cookie, NOW) is None


def test_the_file_of_sessions_is_its_users_alone_and_has_no_cookie(tokens: Tokens, tmp_path: Path) -> None:
    cookie, path = tokens.sessions.begin(NOW), tmp_path / "dashboard.sessions"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert cookie not in path.read_text()


def test_of_too_many_sessions_the_oldest_end(tokens: Tokens) -> None:
    cookies = [tokens.sessions.begin(NOW) for _ in range(MOST_SESSIONS + 1)]
    assert tokens.sessions.find(cookies[0], NOW) is None
    assert all(tokens.sessions.find(one, NOW) for one in cookies[1:])


def test_nobody_signs_others_out_by_signing_in_often(tokens: Tokens) -> None:
    cookie, link = tokens.sessions.begin(NOW, "ann"), tokens.link(NOW, "ann")
    for _ in range(300):
        tokens.sessions.begin(NOW, "eve")
    links = [tokens.link(NOW, "eve") for _ in range(300)]
    assert tokens.sessions.find(cookie, NOW) is not None
    assert tokens.take(link, NOW) == "ann"
    assert [tokens.take(one, NOW) for one in links[-MOST_LINKS - 1 :]] == [None, *["eve"] * MOST_LINKS]


@pytest.mark.parametrize("text", ["", "[]", '{"a": "b"}', "no json", "\xff"])
def test_a_broken_file_of_sessions_lets_nobody_in(tokens: Tokens, tmp_path: Path, text: str) -> None:
    cookie = tokens.sessions.begin(NOW)
    (tmp_path / "dashboard.sessions").write_text(text)
    assert Tokens(tmp_path / "dashboard.token").sessions.find(cookie, NOW) is None


@given(st.text())
def test_no_made_up_cookie_and_no_made_up_token_is_taken(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokens = Tokens(tmp_path_factory.getbasetemp() / "made-up.token")
    assert tokens.sessions.find(text, NOW) is None
    assert not tokens.is_bearer(text)
    assert not tokens.is_bearer(f"Bearer {text}")


def test_the_token_is_its_users_alone_and_lets_programs_in(tokens: Tokens, tmp_path: Path) -> None:
    path = tmp_path / "dashboard.token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert tokens.is_bearer(f"Bearer {path.read_text().strip()}")
    assert not tokens.is_bearer(f"Basic {path.read_text().strip()}")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/nodes"),
        ("GET", "/v1/metrics"),
        ("POST", "/v1/jobs/17/cancel"),
        ("POST", "/v1/nodes/gpu1/drain"),
        ("PUT", "/v1/jobs/17/notes"),
    ],
)
def test_what_pages_need_passes_to_the_api(method: str, path: str) -> None:
    assert is_allowed(method, path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/jobs"),
        ("POST", "/v1/jobs/batch"),
        ("POST", "/v1/jobs/plan"),
        ("POST", "/v1/exec"),
        ("POST", "/v1/tunnel"),
        ("DELETE", "/v1/exec/1"),
        ("POST", "/v1/agent/stop"),
        ("POST", "/v1/dashboard"),
        ("PUT", "/v1/cluster"),
        ("POST", "/v1/nodes"),
        ("DELETE", "/v1/nodes/gpu1"),
        ("POST", "/v1/nodes/gpu1/hostkey"),
        ("POST", "/v1/sync"),
        ("POST", "/v1/examine"),
        ("GET", "/v1/ssh-hosts"),
        ("DELETE", "/v1/jobs/1/results"),
        ("GET", "/v1/jobs/1/cancel"),
        ("GET", "/v1/jobs/1"),
        ("GET", "/v1/jobs"),
        ("POST", "/v1/jobs/1/../../exec/cancel"),
        ("POST", "/v1/jobs/1/cancel/"),
        ("POST", "/v1/jobs/1/cancel\n"),
        ("OPTIONS", "/v1/nodes"),
    ],
)
def test_nothing_else_passes(method: str, path: str) -> None:
    assert not is_allowed(method, path)


def test_a_browser_does_not_tell_the_agent_what_only_commands_do() -> None:
    seen: list[bytes] = []

    async def api(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(name for name, _ in scope["headers"])

    headers = [(b"accept", b"*/*"), (b"ugro-ssh-auth-sock", b"/tmp/evil"), (b"ugro-settings", b"{}")]
    scope: Scope = {"type": "http", "method": "GET", "path": "/v1/agent", "headers": headers}
    unused: Any = None
    asyncio.run(AllowedApi(api)(scope, unused, unused))
    assert seen == [b"accept"]


async def nobody(user: str, via: str) -> None:
    """Who has signed in is not looked at here."""


def test_only_a_dashboard_for_others_without_tls_warns(tokens: Tokens) -> None:
    assert Endpoint(Dashboard(), 8099, tokens, nobody).link("").warning is None
    assert Endpoint(Dashboard(host="0.0.0.0"), 8099, tokens, nobody).link("").warning is not None
    assert Endpoint(Dashboard(host="0.0.0.0", certificate_file="/c.pem"), 8099, tokens, nobody).link("").warning is None


@pytest.mark.parametrize(
    ("settings", "may"),
    [
        (Dashboard(), True),
        (Dashboard(host="localhost"), True),
        (Dashboard(launch=False), False),
        (Dashboard(host="0.0.0.0"), False),
        (Dashboard(host="gpu.lan", certificate_file="/c.pem"), False),
        (Dashboard(host="0.0.0.0", launch=True), True),
    ],
)
def test_browsers_launch_jobs_on_loopback_or_where_the_owner_said_so(settings: Dashboard, may: bool) -> None:
    assert may_launch(settings) is may


def test_the_same_content_of_one_page_is_one_job_and_an_edit_is_another() -> None:
    once = submit_key(7, "page", Change("name: a", {"b": "1", "c": "2"}))
    assert once == submit_key(7, "page", Change("name: a", {"c": "2", "b": "1"}))
    others = [Change("name: b", {}), Change("name: a", {}), Change("name: a", {"b": "1", "c": "3"})]
    assert len({once, submit_key(7, "next", others[0]), *(submit_key(7, "page", one) for one in others)}) == 5


def test_a_dashboard_on_all_addresses_is_called_by_its_name(tokens: Tokens) -> None:
    place = Endpoint(Dashboard(host="0.0.0.0", names=("GPU.lan",), certificate_file="/c.pem"), 443, tokens, nobody)
    assert place.link("").url.startswith("https://GPU.lan:443/login?once=")
    assert "gpu.lan" in place.access.names
    assert place.access.is_encrypted


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "now"), (59.9, "59 s ago"), (60, "1 min ago"), (7200, "2 h ago"), (200_000, "2 d ago"), (-90, "in 1 min")],
)
def test_an_age_is_said_in_one_unit(seconds: float, said: str) -> None:
    assert formatting.age(NOW - seconds, NOW) == said
    assert formatting.age(formatting.iso(NOW - seconds), NOW) == said


def test_what_is_not_known_is_a_dash() -> None:
    assert {
        formatting.age(None),
        formatting.size(None),
        formatting.duration(None),
        formatting.percent(None),
        formatting.number(None),
    } == {"–"}


def test_a_name_in_a_command_means_that_file_only() -> None:
    assert formatting.pattern("a/b.pt") == "a/b.pt"
    assert formatting.pattern("it's [1]*.pt") == "'it'\"'\"'s [[]1][*].pt'"


def test_code_in_texts_is_marked_and_the_rest_cannot_be_markup() -> None:
    assert formatting.codes("use `a<b` & see") == "use <code>a&lt;b</code> &amp; see"


def _row(name: str, status: Status = Status.HEALTHY, gpus: tuple[Gpu, ...] = (), drained: str | None = None) -> NodeRow:
    facts = Facts(NOW, 1.0, (0.0, 0.0, 0.0), 0.5, 100, 50, (Disk("/", 10, 5),), gpus)
    report = NodeReport(name, status, 100, facts=None if status is Status.UNREACHABLE else facts, labels=("fast",))
    return NodeRow(name, report, drained, (), False, None, "")


def _gpu(index: int, use: float | None, model: str = "NVIDIA GeForce RTX 4070") -> Gpu:
    return Gpu(index, f"GPU-{index}", model, memory_total_bytes=8, memory_used_bytes=2, use_ratio=use, power_w=50.0)


def test_totals_leave_out_what_is_not_known() -> None:
    away = _row("c", Status.UNREACHABLE)
    found = totals([_row("a", gpus=(_gpu(0, 1.0), _gpu(1, None))), _row("b", gpus=(_gpu(0, 0.5),)), away])
    assert (found.nodes, found.nodes_up, found.gpus) == (3, 2, 3)
    assert found.use == 0.75
    assert found.memory == (6, 24)
    assert found.power == 150.0


def test_a_row_counts_equal_gpus_together() -> None:
    row = _row("a", gpus=(_gpu(0, 0), _gpu(1, 0), _gpu(2, 0, "NVIDIA GeForce GTX 1070")))
    assert row.gpu_words == "2 × RTX 4070, GTX 1070"


def test_nodes_are_found_by_words_and_by_status() -> None:
    rows = [_row("gpu1", gpus=(_gpu(0, 0),)), _row("gpu2", Status.UNREACHABLE), _row("gpu3", drained="fan")]
    assert [row.name for row in chosen(rows, "4070 FAST", "")] == ["gpu1"]
    assert [row.name for row in chosen(rows, "", "unreachable")] == ["gpu2"]
    assert [row.name for row in chosen(rows, "", "drained")] == ["gpu3"]
    assert chosen(rows, "nothing", "") == []


def test_gpu2_stands_before_gpu10() -> None:
    assert sorted(["gpu10", "gpu2", "a"], key=by_name) == ["a", "gpu2", "gpu10"]


def test_a_curve_has_gaps_only_where_nothing_was_heard_for_long() -> None:
    assert _without_small_gaps([None, 1, None, 2, None, None, 3, None]) == [None, 1, 1, 2, None, None, 3, None]


def test_few_nodes_are_one_table_by_name_without_a_map() -> None:
    rows = [_row("a"), _row("b", Status.UNREACHABLE)]
    found = node_table(rows, NodesQuery())
    assert (found.rows, found.squares, found.before, found.after) == (rows, [], None, None)


def test_of_many_nodes_the_worst_come_first_and_the_map_keeps_its_order() -> None:
    statuses = {3: Status.DEGRADED, 9: Status.UNREACHABLE, 20: Status.UNHEALTHY, 30: Status.UNREACHABLE}
    drained = {11: "fan"}
    rows = [_row(f"gpu{at}", statuses.get(at, Status.HEALTHY), drained=drained.get(at)) for at in range(60)]
    found = node_table(rows, NodesQuery())
    assert [row.name for row in found.rows[:6]] == ["gpu9", "gpu30", "gpu20", "gpu3", "gpu11", "gpu0"]
    assert found.squares == rows
    assert found.counts == {"unreachable": 2, "unhealthy": 1, "degraded": 1, "drained": 1, "healthy": 55}
    assert (len(found.rows), found.after) == (50, "/?page=2")
    rest = node_table(rows, NodesQuery(page=2, q="gpu"))
    assert (rest.first, len(rest.rows), rest.before) == (51, 10, "/?q=gpu")


def test_nodes_are_sorted_by_use_and_those_of_which_it_is_not_known_come_last() -> None:
    rows = [_row("a", gpus=(_gpu(0, 0.2),)), _row("b", Status.UNREACHABLE), _row("c", gpus=(_gpu(0, 0.9),))]
    assert [row.name for row in node_table(rows, NodesQuery(sort="use")).rows] == ["c", "a", "b"]


@pytest.mark.parametrize(("use", "level"), [(None, 0), (0.0, 0), (0.1, 1), (0.5, 3), (0.99, 5), (1.0, 5)])
def test_a_square_is_darker_the_more_is_in_use(use: float | None, level: int) -> None:
    assert nodes.level(_row("a", gpus=(_gpu(0, use),))) == level

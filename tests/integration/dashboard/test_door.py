"""A crowd at the dashboard's port: it gets little room, the agent keeps what its jobs need, and browsers get in."""

from __future__ import annotations

import http.client
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.rig.browser import Dashboard, contexts, dashboards, is_live
from tests.rig.crowd import Crowd, crowds, may_have
from tests.rig.waiting import wait_until
from tests.rig.web import ask, connect, cookie_of, own, sign_in
from ugro.client.client import Client

GIVEN, MOST = 256, 1024  # descriptors: few enough for 1,200 connections to take them all
CROWD = 1200
BODY_BYTES = 300_000_000


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    if not may_have(CROWD):
        pytest.skip(f"this process may not have {CROWD} connections")
    with dashboards(descriptors=(GIVEN, MOST)) as found:
        yield found


@pytest.fixture(scope="module")
def cookie(dashboard: Dashboard) -> str:
    return cookie_of(sign_in(dashboard, dashboard.link()))


def test_a_crowd_does_not_starve_the_agent(dashboard: Dashboard, cookie: str) -> None:
    pid = dashboard.agent.process.pid
    with crowds(dashboard.url) as crowd:
        assert most_open(pid, crowd, CROWD) < MOST / 2
        with Client(home=dashboard.home, any_cluster=True) as client:
            job = client.jobs.submit(fields={"command": ["sh", "-c", "ulimit -n"], "sync": False}, env={})
            assert client.jobs.wait(job.id).exit_code == 0
        assert ask(dashboard, "GET", "/", {"cookie": cookie}).status == 200
    assert re.search(rf"Max open files\s+{MOST}", Path(f"/proc/{pid}/limits").read_text()), "raised as far as it goes"
    assert b"".join(piece.content for piece in dashboard.client.jobs.logs(job.id)).split() == [str(GIVEN).encode()]


@pytest.mark.proof
def test_the_last_descriptors_are_for_commands() -> None:
    """Here there is not even room for all strangers that may come in."""
    few = 110
    with dashboards(descriptors=(few, few)) as other, crowds(other.url) as crowd:
        cookie = cookie_of(sign_in(other, other.link()))
        assert most_open(other.agent.process.pid, crowd, 300) < few - 50
        assert other.client.jobs.wait(other.submit("a")).exit_code == 0
        assert ask(other, "GET", "/", {"cookie": cookie}).status == 200


@pytest.mark.proof
def test_browsers_get_in_through_a_crowd_that_comes_again(dashboard: Dashboard, browser: Browser) -> None:
    with contexts(browser) as context, crowds(dashboard.url) as crowd:
        first = dashboard.sign_in(context)
        for _ in range(3):
            crowd.leave()
            crowd.join(CROWD)
            tabs = [context.new_page() for _ in range(4)]
            for page in tabs:
                page.goto(dashboard.url + "/jobs")
            for page in (first, *tabs):
                is_live(page)


HALF_A_HEAD = "GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: "
HALF_A_BODY = (
    "POST {path} HTTP/1.1\r\nhost: {host}\r\norigin: http://{host}\r\ncookie: {cookie}\r\n"
    "content-length: 90000\r\n\r\n"
)


@pytest.mark.proof
def test_who_says_too_little_is_shown_out(dashboard: Dashboard, cookie: str) -> None:
    host = dashboard.url.removeprefix("http://")
    said = [
        "",
        HALF_A_HEAD,
        HALF_A_BODY.format(path="/login", host=host, cookie="none"),
        HALF_A_BODY.format(path="/jobs", host=host, cookie="none"),
        HALF_A_BODY.format(path="/v1/nodes/here/resume", host=host, cookie=cookie),  # which is answered without it
        HALF_A_BODY.format(path="/v1/nodes/here/drain", host=host, cookie=cookie),
    ]
    with ExitStack() as stack:
        groups = [(stack.enter_context(crowds(dashboard.url)), text) for text in said]
        for crowd, text in groups:
            crowd.join(3)
            wait_until(lambda crowd=crowd: crowd.are_connected(), 10, "connections")  # type: ignore[misc]
            crowd.say(text.encode())

        def are_out() -> list[int]:
            for crowd, text in groups:
                crowd.say(b" " if text else b"")  # a letter now and then is not enough
            return [crowd.shown_out() for crowd, _ in groups]

        wait_until(lambda: are_out() == [3] * len(said), 90, "all to be shown out")
    assert dashboard.client.health(["here"])[0].drained is None


def test_an_endless_head_is_refused(dashboard: Dashboard) -> None:
    connection = connect(dashboard)
    connection.putrequest("GET", "/")
    connection.putheader("x-long", "y" * 200_000)
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "in pieces"])
def test_a_large_body_is_refused_before_it_is_in_memory(dashboard: Dashboard, cookie: str, is_declared: bool) -> None:
    pid = dashboard.agent.process.pid
    before = _memory(pid)
    connection = connect(dashboard)
    headers = own(dashboard, cookie) | ({"content-length": str(BODY_BYTES)} if is_declared else {})
    piece = b" " * 1_000_000
    try:
        pieces = (piece for _ in range(BODY_BYTES // len(piece)))
        connection.request("POST", "/v1/nodes/here/drain", pieces, headers, encode_chunked=not is_declared)
        answer = connection.getresponse()
        assert answer.status == 413
        assert "too large (limit 2.0 MiB)" in answer.read().decode()
    except (BrokenPipeError, ConnectionResetError):
        pass  # refused before all was sent
    finally:
        connection.close()
    assert _memory(pid) - before < BODY_BYTES / 10
    assert dashboard.client.health(["here"])[0].drained is None


def test_the_agents_own_socket_takes_no_endless_body_either(dashboard: Dashboard) -> None:
    with socket.socket(socket.AF_UNIX) as talk:
        talk.settimeout(30)
        talk.connect(str(dashboard.home / "agent.sock"))
        talk.sendall(b"POST /v1/jobs HTTP/1.1\r\nhost: agent\r\ncontent-length: 100000000000\r\n\r\n")
        answer = http.client.HTTPResponse(talk)
        answer.begin()
        assert answer.status == 413
        assert "submit fewer jobs at once" in answer.read().decode()


def test_a_session_has_a_bounded_number_of_streams(dashboard: Dashboard, cookie: str) -> None:
    streams = [connect(dashboard) for _ in range(13)]
    try:
        statuses = []
        for one in streams:
            one.request("GET", "/live", headers={"cookie": cookie})
            statuses.append(one.getresponse().status)
        assert statuses == [200] * 12 + [429]
        other = cookie_of(sign_in(dashboard, dashboard.link()))
        assert ask(dashboard, "GET", "/live", {"cookie": other}).status == 200
    finally:
        for one in streams:
            one.close()


def most_open(pid: int, crowd: Crowd, count: int) -> int:
    """The most descriptors that the agent had open until half of the crowd was shown out."""
    seen = []
    crowd.join(count)

    def is_shown_out() -> bool:
        seen.append(len(os.listdir(f"/proc/{pid}/fd")))
        return crowd.shown_out() > count / 2

    wait_until(is_shown_out, 30, "the crowd to be shown out")
    return max(seen)


def _memory(pid: int) -> int:
    """The most that it ever had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024

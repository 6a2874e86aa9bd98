"""The dashboard as a program, another site or a stranger asks it: over plain HTTP."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.rig.browser import Dashboard


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str


def ask(
    dashboard: Dashboard, method: str, path: str, headers: Mapping[str, str] | None = None, body: str = "{}"
) -> Answer:
    connection = connect(dashboard)
    try:
        connection.request(method, path, body=body if method != "GET" else None, headers=dict(headers or {}))
        found = connection.getresponse()
        # A stream has no end: its head says enough.
        text = "" if found.headers.get("content-type", "").startswith("text/event-stream") else found.read().decode()
        return Answer(found.status, {name.lower(): value for name, value in found.headers.items()}, text)
    finally:
        connection.close()


def connect(dashboard: Dashboard, timeout_s: float = 30) -> http.client.HTTPConnection:
    where = urlsplit(dashboard.url)
    return http.client.HTTPConnection(where.hostname or "", where.port, timeout=timeout_s)


def sign_in(dashboard: Dashboard, link: str, *, origin: str | None = None) -> Answer:
    """As the page behind the link does."""
    headers = {"origin": origin or dashboard.url, "content-type": "application/x-www-form-urlencoded"}
    return ask(dashboard, "POST", "/login", headers, urlsplit(link).query)


def cookie_of(answer: Answer) -> str:
    return answer.headers["set-cookie"].partition(";")[0]


def own(dashboard: Dashboard, cookie: str) -> dict[str, str]:
    """The headers of a change that the dashboard's own page asks for."""
    return {"cookie": cookie, "origin": dashboard.url, "content-type": "application/json"}


def path_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}"

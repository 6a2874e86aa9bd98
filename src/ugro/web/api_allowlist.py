"""The routes of the agent's API that a browser may use. No submit, no exec, no stop, no new nodes.

A job can be launched again with changes by a page of its own (``web/pages/jobs.py``) which keeps to the job's code.
"""

from __future__ import annotations

import json
import re

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ugro.kernel.operations.registry import request_for
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotAllowed

_JOB = r"/v1/jobs/[^/]+"
_NODE = r"/v1/nodes/[^/]+"
_ALLOWED = {
    # No job specifications: their environment may contain secrets.
    "GET": (
        r"/v1/nodes",
        rf"{_NODE}/history",
        rf"{_JOB}/notes",
        r"/v1/metrics",
        r"/v1/metrics/keys",
    ),
    "POST": (rf"{_JOB}/(cancel|retry)",),
    "PUT": (rf"{_JOB}/notes",),
}
_PATTERNS = {method: re.compile("|".join(f"(?:{one})" for one in paths)) for method, paths in _ALLOWED.items()}
_GIVES_JOB = re.compile(rf"{_JOB}/(cancel|retry)")


def is_allowed(method: str, path: str) -> bool:
    declared, pattern = request_for(method, path), _PATTERNS.get(method)
    if declared is not None and declared.operation.in_browser:
        return True
    return pattern is not None and pattern.fullmatch(path) is not None


class AllowedApi:
    """Mounted at /v1; answers everything else with 403."""

    def __init__(self, api: ASGIApp) -> None:
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_allowed(scope["method"], scope["path"]):
            # What commands tell the agent about themselves (their environment) is not for browsers to tell.
            headers = [(name, value) for name, value in scope["headers"] if not name.startswith(b"ugro-")]
            answering = send if _GIVES_JOB.fullmatch(scope["path"]) is None else _NumberOnly(send).send
            await self._api({**scope, "root_path": "", "headers": headers}, receive, answering)
            return
        error = NotAllowed("not available in the dashboard", hint="use the command line: ugro --help")
        await Response(dumps({"error": error.to_wire()}), 403, media_type="application/json")(scope, receive, send)


class _NumberOnly:
    """Of a job in an answer, a browser gets the number: ``{"id": 7}``."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        if self._start["status"] == 200:
            self._body = dumps({"id": json.loads(self._body)["id"]}).encode()
        MutableHeaders(scope=self._start)["content-length"] = str(len(self._body))
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": self._body})

"""The routes of the agent's API that a browser may use. No submit, no exec, no stop, no new nodes.

A job can be launched again with changes by a page of its own, ``pages/launch.py``, which keeps to the job's code.
"""

from __future__ import annotations

import re

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ugro.core.errors import NotAllowed
from ugro.core.support.codec import dumps

_JOB = r"/v1/jobs/[^/]+"
_NODE = r"/v1/nodes/[^/]+"
_ALLOWED = {
    # No job specifications: their environment may contain secrets.
    "GET": (
        r"/v1/agent",
        r"/v1/nodes",
        rf"{_NODE}/history",
        rf"{_JOB}/notes",
        r"/v1/metrics",
        r"/v1/metrics/keys",
    ),
    "POST": (rf"{_JOB}/(cancel|retry)", rf"{_NODE}/(drain|resume)", r"/v1/alerts/test"),
    "PUT": (rf"{_JOB}/notes",),
}
_PATTERNS = {method: re.compile("|".join(f"(?:{one})" for one in paths)) for method, paths in _ALLOWED.items()}


def is_allowed(method: str, path: str) -> bool:
    pattern = _PATTERNS.get(method)
    return pattern is not None and pattern.fullmatch(path) is not None


class AllowedApi:
    """Mounted at /v1; answers everything else with 403."""

    def __init__(self, api: ASGIApp) -> None:
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_allowed(scope["method"], scope["path"]):
            await self._api({**scope, "root_path": ""}, receive, send)
            return
        error = NotAllowed("not available in the dashboard", hint="use the command line: ugro --help")
        await Response(dumps({"error": error.to_wire()}), 403, media_type="application/json")(scope, receive, send)

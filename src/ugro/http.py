"""HTTP over the agent's unix socket, with the standard library: importing a full client would cost more than the call."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ugro.core.errors import UgroError, Unreachable, error_from_wire

_READ = 256 * 1024


class AgentGone(Unreachable):
    """Nobody listens on the socket: there is no agent, or it just ended."""


class Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float | None = None) -> None:
        super().__init__("ugro", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        # Through the folder's descriptor: a socket's address is limited to 108 bytes, a path is not.
        try:
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise AgentGone("no agent is running") from error
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")
        except OSError as error:
            self.close()
            raise AgentGone("no agent is running") from error
        finally:
            os.close(folder)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """One request, one JSON answer; None for an empty one."""
        response = self.start(method, path, body, headers)
        content = response.read()
        return json.loads(content) if content else None

    def start(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        payload = None if body is None else json.dumps(body).encode()
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        try:
            self.request(method, path, payload, all_headers)
            response = self.getresponse()
        except TimeoutError as error:
            raise Unreachable("the agent does not answer", cause="hung", hint="ugro agent stop; ugro agent logs") from error
        except (OSError, http.client.HTTPException) as error:
            raise AgentGone("the agent ended before it answered") from error
        if response.status >= 400:
            raise _error(response)
        return response


def lines(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The documents of an NDJSON answer as they come; an error among them is raised."""
    rest = b""
    for chunk in chunks(response):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            document = json.loads(line)
            if "error" in document and len(document) == 1:
                raise error_from_wire(document["error"])
            yield document


def chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        while chunk := response.read1(_READ):
            yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise AgentGone("the agent ended in the middle of its answer") from error


def _error(response: http.client.HTTPResponse) -> UgroError:
    content = response.read()
    try:
        return error_from_wire(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return UgroError(f"the agent failed (HTTP {response.status})", hint="see: ugro agent logs")

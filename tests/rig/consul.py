"""A server that answers Consul's health API as its documentation says: blocking queries by index, tags and tokens.

https://developer.hashicorp.com/consul/api-docs/health and .../features/blocking
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_PREFIX = "/v1/health/service/"


@dataclass(slots=True)
class ConsulServer:
    port: int = 0
    token: str | None = None
    index: int = 1
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)  # by node
    critical: set[str] = field(default_factory=set)  # nodes whose checks do not pass
    has_leader: bool = True
    is_chunked: bool = False
    asked: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def register(self, node: str, address: str, port: int, *tags: str, service: str = "ssh") -> None:
        with self.changed:
            self.instances[node] = {
                "Node": {"Node": node, "Address": address, "Datacenter": "dc1", "Meta": {}},
                "Service": {"ID": service, "Service": service, "Tags": list(tags), "Address": "", "Port": port},
                "Checks": [],
            }
            self._advance()

    def deregister(self, node: str) -> None:
        with self.changed:
            del self.instances[node]
            self._advance()

    def set_critical(self, node: str) -> None:
        with self.changed:
            self.critical.add(node)
            self._advance()

    def restart_index(self) -> None:
        """As after a restore from a snapshot: the index goes back."""
        with self.changed:
            self.index = 1
            self.changed.notify_all()

    def _advance(self) -> None:
        self.index += 1
        self.changed.notify_all()

    def passing(self, service: str, tag: str | None) -> list[dict[str, Any]]:
        found = [one for one in self.instances.values() if one["Service"]["Service"] == service]
        tagged = [one for one in found if tag is None or tag in one["Service"]["Tags"]]
        return [one for one in tagged if one["Node"]["Node"] not in self.critical]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    @property
    def state(self) -> ConsulServer:
        return self.server.state

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        state = self.state
        state.asked.append(self.path)
        if state.token is not None and self.headers.get("X-Consul-Token") != state.token:
            self._answer(403, b"Permission denied: token with AccessorID 'anonymous' lacks permission")
        elif not state.has_leader:
            self._answer(500, b"No cluster leader")
        elif not parts.path.startswith(_PREFIX):
            self._answer(404, b"Invalid URL path")
        else:
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            self._list(unquote(parts.path.removeprefix(_PREFIX)), query)

    def _list(self, service: str, query: dict[str, str]) -> None:
        state = self.state
        with state.changed:
            asked = int(query.get("index", "0"))
            if asked:
                wait_s = float(query.get("wait", "300s").removesuffix("s"))
                state.changed.wait_for(lambda: state.index != asked or not state.has_leader, wait_s)
            body = json.dumps(state.passing(service, query.get("tag"))).encode()
            index = state.index
        self._answer(200, body, {"X-Consul-Index": str(index), "X-Consul-KnownLeader": "true"})

    def _answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.state.is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, state: ConsulServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.state = state
        state.port = self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves during a blocking query is nothing to print."""


@contextmanager
def consul_server() -> Iterator[ConsulServer]:
    state = ConsulServer()
    server = _Server(state)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        with state.changed:
            state.has_leader = False
            state.changed.notify_all()
        server.shutdown()
        server.server_close()
        thread.join(10)

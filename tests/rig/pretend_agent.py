"""An agent's socket with somebody else behind it: a test says what is answered."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

Answer = Callable[[str, str], bytes]  # of a path and a body; what begins with {"error" is one


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        content = self.server.answer(self.path, body)
        self.send_response(400 if content.startswith(b'{"error"') else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *words: Any) -> None:
        """Nobody reads it."""


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    answer: Answer

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, _ = super().get_request()
        return connection, ("client", 0)


@contextmanager
def pretend_agent(path: Path, answer: Answer) -> Iterator[None]:
    with _Server(str(path), _Handler) as server:
        server.answer = answer
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(5)

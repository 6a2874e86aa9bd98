"""Real servers that take messages and remember them: HTTP, and a mail server that speaks as much SMTP as it must."""

from __future__ import annotations

import base64
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True, slots=True)
class Posted:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class HttpReceiver:
    port: int = 0
    posted: list[Posted] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)  # the codes of the next answers; then what ``judge`` says
    judge: Callable[[Posted], int] = lambda posted: 200
    text: bytes = b""  # of every answer
    before_answer: Callable[[], object] = lambda: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def http_receiver() -> Iterator[HttpReceiver]:
    receiver = HttpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            posted = Posted(self.path, dict(self.headers.items()), body)
            receiver.posted.append(posted)
            receiver.before_answer()
            code = receiver.answers.pop(0) if receiver.answers else receiver.judge(posted)
            self.send_response(code)
            if code in (301, 302):
                self.send_header("Location", f"{receiver.url}/elsewhere")
            self.send_header("Content-Length", str(len(receiver.text)))
            self.end_headers()
            self.wfile.write(receiver.text)

        do_GET = do_POST  # noqa: N815  # the name is the library's

        def log_message(self, format: str, *args: object) -> None:
            pass

    with _serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        receiver.port = server.server_address[1]
        yield receiver


@dataclass(slots=True)
class MailReceiver:
    port: int = 0
    mails: list[EmailMessage] = field(default_factory=list)
    logins: list[tuple[str, str]] = field(default_factory=list)
    refusals: list[bytes] = field(default_factory=list)  # what the next MAIL commands are answered with


@contextmanager
def mail_receiver() -> Iterator[MailReceiver]:
    receiver = MailReceiver()
    server = _MailServer(("127.0.0.1", 0), _MailHandler)
    server.receiver = receiver
    with _serving(server):
        receiver.port = server.server_address[1]
        yield receiver


class _MailServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    receiver: MailReceiver


class _MailHandler(socketserver.StreamRequestHandler):
    server: _MailServer

    def handle(self) -> None:
        self._say(b"220 receiver")
        while line := self.rfile.readline():
            word = line.split()[0].upper() if line.split() else b""
            if word == b"QUIT":
                self._say(b"221 bye")
                return
            self._say(self._answer(word, line))

    def _answer(self, word: bytes, line: bytes) -> bytes:
        receiver = self.server.receiver
        if word == b"EHLO":
            return b"250-receiver\r\n250 AUTH PLAIN"
        if word == b"AUTH":
            _, user, password = base64.b64decode(line.split()[2]).decode().split("\0")
            receiver.logins.append((user, password))
            return b"235 welcome"
        if word == b"MAIL" and receiver.refusals:
            return receiver.refusals.pop(0)
        if word == b"DATA":
            self._say(b"354 go on")
            receiver.mails.append(self._mail())
        return b"250 ok"

    def _mail(self) -> EmailMessage:
        lines = []
        while (line := self.rfile.readline()) not in (b".\r\n", b""):
            lines.append(line)
        found = message_from_bytes(b"".join(lines), policy=policy.default)
        assert isinstance(found, EmailMessage)
        return found

    def _say(self, text: bytes) -> None:
        self.wfile.write(text + b"\r\n")


@contextmanager
def _serving(server: socketserver.TCPServer) -> Iterator[socketserver.TCPServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)

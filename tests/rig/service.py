"""Services of tests: a tiny HTTP server as the command of replicas, and clients that count what fails."""

from __future__ import annotations

import http.client
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import yaml

from tests.proof.place import Place
from tests.rig.ports import free_port
from tests.rig.waiting import end_all_with_variable, processes_with_variable, wait_until
from ugro.features.services.client import ServiceWish, is_settled
from ugro.features.services.model import ServiceReport

# Says which replica and version it is. Bad words: it exits at once, or never gets ready.
SERVER = """
import os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status = 200
        if self.path == "/health":
            status = 503 if word == "never-ready" or os.path.exists(f"unready-{os.environ['UGRO_REPLICA']}") else 200
        else:
            time.sleep(float(os.environ.get("DELAY", "0.01")))
        body = f"{os.environ['UGRO_REPLICA']} {word}".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *words):
        pass

class Server(ThreadingHTTPServer):
    request_queue_size = 128

word = sys.argv[2]
if word == "exits":
    sys.exit("cannot load the model")
if word == "lasting":
    sys.exit(64)
Server((os.environ["UGRO_HOST"], int(sys.argv[1])), Handler).serve_forever()
"""
LIMIT_S = 60.0


class ServicePlace(Place):
    """A cluster of unequal nodes of this machine."""

    def __init__(self, delays_s: Sequence[float] = (0.01, 0.02, 0.04)) -> None:
        super().__init__(len(delays_s))
        described: dict[str, Any] = yaml.safe_load(self.cluster.read_text())
        for root, delay_s in zip(self.roots, delays_s, strict=True):
            described["nodes"][root.name]["env"] = {"DELAY": str(delay_s), "TEST_SERVICE": str(self.folder)}
            described["nodes"][root.name]["python"] = sys.executable
        self.cluster.write_text(yaml.safe_dump(described))
        self.code = self.folder / "code"
        self.code.mkdir()
        (self.code / "server.py").write_text(SERVER)
        self.port = free_port()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        end_all_with_variable("TEST_SERVICE", [str(self.folder)])

    def wish(self, word: str = "one", options: Mapping[str, Any] | None = None) -> ServiceWish:
        command = ["{python}", "server.py", "{port}", word]
        fields = {"command": command, "cwd": str(self.code), "name": "echo"}
        quick = {"probes.ready.path": "/health", "probes.start.path": "/health", "drain": "5s"}
        return ServiceWish(fields=fields, options={"port": self.port, **quick, **(options or {})})

    def start(self, replicas: int | dict[str, Any], options: Mapping[str, Any] | None = None) -> ServiceReport:
        wish = self.wish(options={"replicas": replicas, **(options or {})})
        self.ask(lambda client: client.services.start(wish, env={}, key="one"))
        return self.settled()

    def update(self, word: str, canary: float | None = None) -> None:
        wish = ServiceWish(fields={**self.wish(word).fields})
        self.ask(lambda client: client.services.update("echo", wish, canary=canary, env={}))

    def report(self) -> ServiceReport:
        return self.ask(lambda client: client.services.get("echo"))

    def settled(self) -> ServiceReport:
        return self.until(is_settled)

    def until(self, condition: Callable[[ServiceReport], bool], what: str = "the service") -> ServiceReport:
        last: list[ServiceReport] = []

        def look() -> bool:
            last[:] = [self.report()]
            return condition(last[0])

        try:
            wait_until(look, LIMIT_S, what)
        except AssertionError as error:
            raise AssertionError(self.seen(f"{error}: {last}")) from error
        return last[0]

    def ask_once(self, method: str = "GET") -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, "/", body=b"x" if method == "POST" else None)
            answer = connection.getresponse()
            text = answer.read().decode()
            return text if answer.status == 200 else f"status {answer.status}: {text}"
        finally:
            connection.close()

    def servers_of(self, number: int) -> list[int]:
        """The processes of a replica's own server."""
        mine = set(processes_with_variable("TEST_SERVICE", [str(self.folder)]))
        return sorted(mine & set(processes_with_variable("UGRO_REPLICA", [str(number)])))

    def kill_replica(self, number: int) -> None:
        found = self.servers_of(number)
        assert found, f"replica {number} has no process"
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextmanager
    def load(self, clients: int = 4) -> Iterator[Clients]:
        made = Clients(self, clients)
        try:
            yield made
        finally:
            made.stop()


class Clients:
    """GET and POST in turn, each with a connection of its own, until they are stopped."""

    def __init__(self, place: ServicePlace, count: int) -> None:
        self._place = place
        self._is_over = threading.Event()
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def total(self) -> int:
        return sum(self.answers.values())

    def more(self, count: int) -> None:
        """Waits for so many further answers."""
        wanted = self.total + count
        wait_until(lambda: self.total >= wanted or self.failures, LIMIT_S, "more answers")

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def _run(self) -> None:
        number = 0
        while not self._is_over.is_set():
            number += 1
            began = time.time()
            try:
                text = self._place.ask_once("POST" if number % 2 else "GET")
            except (OSError, http.client.HTTPException) as error:
                text = f"status {error!r}"
            with self._lock:
                if text.startswith("status"):
                    self.failures.append(f"{text} after {time.time() - began:.3f} s")
                else:
                    self.answers[text] += 1


def words(answers: Mapping[str, int]) -> set[str]:
    return {text.split()[1] for text in answers}

#!/usr/bin/env python3
"""An autoscaler for UGRO: adds machines of a pool while the queue is long, and removes them when they are idle.

It receives the hooks `queue_longer_than` and `idle`, checks their signatures, and calls `ugro node add` and
`ugro node rm --if-idle`. The latter refuses to remove a node on which a job runs, so no job is ever stopped. To start
and stop machines of a cloud, put the calls of its API where this script says so.

    hooks:
      queue_longer_than: {jobs: 4, for: 2m, call: "http://127.0.0.1:9099/", secret_file: ~/.ugro/hook_secret}
      idle: {label: pool, for: 10m, call: "http://127.0.0.1:9099/", secret_file: ~/.ugro/hook_secret}

    openssl rand -hex 32 > ~/.ugro/hook_secret && chmod 600 ~/.ugro/hook_secret
    python3 examples/autoscale.py --secret-file ~/.ugro/hook_secret --pool pool.json

`pool.json` names the machines: {"cloud1": {"host": "10.0.0.21", "user": "ann"}, "cloud2": {"host": "10.0.0.22"}}.
It needs nothing but Python's standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LABEL = "pool"  # marks the nodes that this script has added
MOST_BYTES = 1024 * 1024
OLDEST_S = 300  # a call that was signed longer ago may be a copy that somebody has kept
REMEMBERED = 10_000


class Scaler:
    def __init__(self, pool: Path, ugro: list[str]) -> None:
        self._pool = pool
        self._ugro = ugro
        self._one_at_a_time = threading.Lock()
        self._seen: dict[str, None] = {}  # ids of deliveries, the oldest first: each may arrive more than once

    def receive(self, call: dict[str, object]) -> None:
        with self._one_at_a_time:
            if call["id"] in self._seen:
                return
            if call["hook"] == "queue_longer_than":
                self._grow()
            elif call["hook"] == "idle":
                self._shrink([str(one["node"]) for one in call["nodes"]])  # type: ignore[attr-defined]
            self._seen[str(call["id"])] = None
            while len(self._seen) > REMEMBERED:
                self._seen.pop(next(iter(self._seen)))

    def _grow(self) -> None:
        """Adds the first machine that is not a node yet."""
        known = {node["name"] for node in self._json("node", "ls")["nodes"]}
        for name, machine in json.loads(self._pool.read_text()).items():
            if name not in known:
                # Start the machine here, and wait until it answers.
                options = [word for key, value in machine.items() for word in (f"--{key}", str(value))]
                self._run("node", "add", name, "--label", LABEL, *options)
                return
        say("the queue is long, and all machines of the pool are nodes already")

    def _shrink(self, idle: list[str]) -> None:
        for name in idle:
            if name not in json.loads(self._pool.read_text()):
                continue
            if self._run("node", "rm", "--if-idle", name) == 0:
                # Stop the machine here.
                say(f"{name} is removed")
            else:
                say(f"{name} has got a job again, and stays")

    def _json(self, *words: str) -> dict[str, list[dict[str, object]]]:
        done = subprocess.run([*self._ugro, *words, "--json"], capture_output=True, text=True, check=True, timeout=120)
        found: dict[str, list[dict[str, object]]] = json.loads(done.stdout)
        return found

    def _run(self, *words: str) -> int:
        say(f"ugro {' '.join(words)}")
        return subprocess.run([*self._ugro, *words], check=False, timeout=120).returncode


def is_signed(headers: dict[str, str], body: bytes, secret: bytes) -> bool:
    """Compares in a time that tells nothing about the right signature."""
    timestamp, given = headers.get("ugro-timestamp", ""), headers.get("ugro-signature", "")
    wanted = "sha256=" + hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(wanted.encode(), given.encode()):
        return False
    return timestamp.isdigit() and abs(time.time() - int(timestamp)) < OLDEST_S


def handler(scaler: Scaler, secret: bytes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(min(size, MOST_BYTES))
            if not is_signed({name.lower(): value for name, value in self.headers.items()}, body, secret):
                self._answer(401)
                return
            call = json.loads(body)
            try:
                if not call.get("test"):
                    scaler.receive(call)
            except (subprocess.SubprocessError, OSError) as error:
                say(f"failed: {error}")
                self._answer(500)  # it is delivered again
                return
            self._answer(204)

        def _answer(self, code: int) -> None:
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=9099)
    parser.add_argument("--secret-file", type=Path, required=True)
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument("--ugro", default="ugro", help="the command, if it is not on the PATH")
    given = parser.parse_args()
    secret = given.secret_file.read_text().strip().encode()
    server = ThreadingHTTPServer(("127.0.0.1", given.port), handler(Scaler(given.pool, [given.ugro]), secret))
    say(f"listening on port {server.server_address[1]}")
    server.serve_forever()


if __name__ == "__main__":
    main()

"""The inference server as a process of its own, and plain requests to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.rig.waiting import wait_until

_START_S = 120  # torch takes long to import on a busy machine
_END_S = 60


class InferenceServer:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        self.port = wait_until(self._listens, _START_S, "the server to listen")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_ready(self) -> None:
        wait_until(lambda: self.ended() or self.get("/health")[0] == 200, _START_S, "the model")
        assert not self.ended(), self.log()

    def ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_END_S)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, content, {"Content-Type": "application/json", **(headers or {})})

    def ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None) -> tuple[int, Any]:
        """The status, and the answer as JSON if it is."""
        with self.open(method, path, body, headers) as (_, answer):
            content = answer.read()
            is_json = answer.headers.get_content_type() == "application/json"
            return answer.status, json.loads(content) if is_json else content.decode()

    @contextmanager
    def open(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[tuple[http.client.HTTPConnection, http.client.HTTPResponse]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_START_S)
        try:
            connection.request(method, path, body, dict(headers or {}))
            yield connection, connection.getresponse()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        text = self.get("/metrics")[1]
        return sum(
            float(value) for value in re.findall(rf"^ugro_inference_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        )

    def _listens(self) -> int:
        """Its port; 0 while it has none."""
        assert not self.ended(), self.log()
        found = re.search(r"listening on \S+:(\d+)", self.log())
        return int(found[1]) if found else 0


@contextmanager
def inference_server(*options: str, cwd: Path, env: Mapping[str, str] | None = None) -> Iterator[InferenceServer]:
    """It listens; it need not be ready. It is killed in the end if it still runs."""
    with (
        tempfile.NamedTemporaryFile(prefix="inference", suffix=".log") as log,
        started(*options, cwd=cwd, env=env, stderr=log) as process,
    ):
        yield InferenceServer(process, Path(log.name))


@contextmanager
def started(
    *options: str, cwd: Path, env: Mapping[str, str] | None = None, stderr: Any = subprocess.PIPE
) -> Iterator[subprocess.Popen[bytes]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UGRO_")}
    argv = [sys.executable, "-m", "ugro.features.services.inference", "--port", "0", *options]
    process = subprocess.Popen(argv, cwd=cwd, env={**clean, **(env or {})}, stderr=stderr)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def refusal(*options: str, cwd: Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The exit code and the text of a server that does not come up."""
    with started(*options, cwd=cwd, env=env) as process:
        _, text = process.communicate(timeout=_START_S)
        return process.returncode, text.decode()

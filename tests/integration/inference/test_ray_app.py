"""A Ray Serve application as a replica, on a real Ray of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from tests.rig.ports import free_port
from tests.rig.waiting import wait_until

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(importlib.util.find_spec("grpc_reflection") is None, reason="ray[serve] is not installed"),
]
APPLICATION = """
from ray import serve
from starlette.requests import Request

@serve.deployment
class Turned:
    async def __call__(self, request: Request):
        return {"said": (await request.json())["text"][::-1]}

app = Turned.bind()
"""
_START_S = 200


def test_an_application_answers_at_the_replicas_port_and_ends_with_sigterm(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APPLICATION, encoding="utf-8")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="r") as short, open(tmp_path / "log", "wb") as log:
        env = {**os.environ, "UGRO_PORT": str(port), "RAY_TMPDIR": short, "HOME": str(tmp_path)}
        argv = [sys.executable, "-m", "ugro.inference.ray_app", "app:app"]
        process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=log, stderr=log)
        try:
            said = wait_until(lambda: process.poll() is not None or _said(port), _START_S, "an answer")
            assert said == "olleh", (tmp_path / "log").read_text(errors="replace")
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()


def _said(port: int) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", json.dumps({"text": "hello"}).encode(), 20) as answer:
            return str(json.load(answer)["said"])
    except (OSError, ValueError, KeyError):
        return None

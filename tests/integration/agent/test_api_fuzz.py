"""Schemathesis reads the API's description and sends what it can think of: nothing may fail inside the agent."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.agent import AgentProcess, environment, log_tail
from tests.rig.waiting import wait_until
from ugro import Client

_STREAMS = ("/api/v1/changes", "/api/v1/events")  # they end when their client leaves


@pytest.mark.proof
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_no_request_of_a_user_makes_the_agent_fail(tmp_path: Path) -> None:
    home, file = tmp_path / "home", tmp_path / "cluster.yaml"
    home.mkdir(mode=0o700)
    file.write_text("nodes: {here: {transport: local}}\ndashboard: {enabled: false}\napi: {bind: '127.0.0.1:0'}\n")
    agent = AgentProcess(home, file)
    try:
        assert agent.wait_ready(), log_tail(home)
        with Client(home=home, cluster=file) as client:
            _, secret = client.identity.create_token("user", 3600, "fuzz")
            url = str(wait_until(lambda: (status := client.running_agent()) and status.api_url, 30, "the API"))
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--no-color"]
        command += ["--url", url.removesuffix("/api/v1"), "--checks", "not_a_server_error", "--max-examples", "4"]
        command += ["--phases", "fuzzing", "--request-timeout", "20", "-H", f"Authorization: Bearer {secret}"]
        for path in _STREAMS:
            command += ["--exclude-path", path]
        env = environment(home)
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path, env=env)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{log_tail(home)}"
    finally:
        agent.stop()

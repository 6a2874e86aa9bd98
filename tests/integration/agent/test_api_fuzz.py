"""Schemathesis reads the API's description and sends what it can think of: nothing may fail inside the agent, and all
that it answers is as described.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.rig.agent import AgentProcess, environment, log_tail
from tests.rig.api_tools import api_tools
from tests.rig.waiting import wait_until
from ugro import Client
from ugro.kernel.access.model import Role
from ugro.kernel.access.operations import CreateToken
from ugro.kernel.operations.access_rules import RULES

_CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
)  # fmt: skip
_STREAMS = ("/api/v1/changes", "/api/v1/events")  # they end when their client leaves


# What random words would never name: a job that has ended, and the node.
_THINGS = """
[parameters]
"path.word" = "last"
"path.name" = "here"
"query.job" = "last"
"""


# Of an operator and an admin, what must not be sent by chance.
_LEFT_OUT = {
    "POST /v1/agent/stop": "ends the agent that is asked",
    "POST /v1/nodes": "makes the agent log in to machines whose names are made up, and others wait for them",
    "DELETE /v1/nodes/{name:path}": "takes the only node away from all requests after it",
    "POST /v1/nodes/{name:path}/sleep": "would suspend this machine if it could be",
    "POST /v1/exec": "runs words that are made up as this account, on this machine",
    "POST /v1/bench": "measures for minutes at each call",
}


def _of_operators_and_admins() -> list[str]:
    """Operations as the description names them. Tokens cannot use those that need files of the agent's machine."""
    roles = (Role.OPERATOR, Role.ADMIN)
    routes = [route for route, rule in RULES.items() if rule.role in roles and not rule.needs_files]
    named = [route.replace(":path", "").replace(" ", " /api", 1) for route in routes if route not in _LEFT_OUT]
    assert len(named) == len(routes) - len(_LEFT_OUT), "a route that is left out is one of these"
    return named


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("phases", "things"), [("coverage,fuzzing", ""), ("fuzzing", _THINGS)], ids=["any", "a job"])
@pytest.mark.parametrize("role", ["user", "admin"])
def test_no_request_makes_the_agent_fail_or_answer_otherwise_than_described(
    tmp_path: Path, role: str, phases: str, things: str
) -> None:
    """A user tries all routes; an admin those that refuse a user."""
    home, file = tmp_path / "home", tmp_path / "cluster.yaml"
    home.mkdir(mode=0o700)
    file.write_text("nodes: {here: {transport: local}}\ndashboard: {enabled: false}\napi: {bind: '127.0.0.1:0'}\n")
    (tmp_path / "schemathesis.toml").write_text(things)
    agent = AgentProcess(home, file)
    try:
        assert agent.wait_ready(), log_tail(home)
        with Client(home=home, cluster=file) as client:
            secret = client.ask(CreateToken(Role(role), 3600, "fuzz")).secret
            url = str(wait_until(lambda: (status := client.running_agent()) and status.api_url, 30, "the API"))
            client.jobs.wait(client.jobs.submit(fields={"command": ["echo", "hello"], "sync": False, "cwd": "/"}).id)
        command = [str(api_tools() / "schemathesis"), "run", f"{url}/openapi.json", "--no-color"]
        command += ["--url", url.removesuffix("/api/v1"), "--checks", ",".join(_CHECKS), "--max-examples", "4"]
        command += ["--phases", phases, "--request-timeout", "20", "-H", f"Authorization: Bearer {secret}"]
        if role == "user":
            command += [word for path in _STREAMS for word in ("--exclude-path", path)]
        else:
            command += [word for name in _of_operators_and_admins() for word in ("--include-name", name)]
        env = environment(home)
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=tmp_path, env=env)
        assert done.returncode == 0, f"{done.stdout[-8000:]}\n{log_tail(home)}"
    finally:
        agent.stop()

"""The HTTPS API on a real port, with a real certificate."""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.rig.agent import AgentProcess, log_tail
from tests.rig.certificates import make_certificate
from tests.rig.waiting import wait_until
from ugro import Client
from ugro.kernel.access.model import Role
from ugro.kernel.access.operations import CreateToken, GetWhoami, ListAuditEntries, ListTokens, RevokeToken
from ugro.kernel.agent.model import AgentStatus

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="not installed: openssl")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return make_certificate(tmp_path)


@pytest.fixture
def client(tmp_path: Path, certificate: Path) -> Iterator[Client]:
    home, file = tmp_path / "home", tmp_path / "cluster.yaml"
    home.mkdir(mode=0o700)
    file.write_text(
        "nodes: {here: {transport: local}}\ndashboard: {enabled: false}\n"
        f"api: {{bind: '0.0.0.0:0', tls: {{cert: {certificate}, key: {tmp_path / 'key.pem'}}}}}\n"
    )
    with ExitStack() as ending:
        agent = AgentProcess(home, file)
        ending.callback(agent.stop)
        assert agent.wait_ready(), log_tail(home)
        yield ending.enter_context(Client(home=home, cluster=file))


def status(client: Client) -> AgentStatus:
    found = client.running_agent()
    assert found is not None
    return found


class Program:
    """That uses the API with a token, and trusts its certificate."""

    def __init__(self, url: str, certificate: Path) -> None:
        self.url = url.replace("0.0.0.0", "127.0.0.1")
        self._trusting = ssl.create_default_context(cafile=str(certificate))

    def ask(
        self, path: str, secret: str | None, method: str = "GET", body: Any = None, kind: str = "application/json"
    ) -> tuple[int, Any]:
        headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {secret}"} if secret else {})
        content = json.dumps(body).encode() if body is not None else None
        asked = urllib.request.Request(f"{self.url}{path}", content, headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=30, context=self._trusting) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def announce(self, path: str, secret: str, length: int) -> int:
        """Only the head of a request, which says how long the body is: a refusal need not wait for it."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPSConnection(parts.netloc, timeout=30, context=self._trusting)
        try:
            connection.putrequest("POST", f"{parts.path}{path}")
            for name, value in (("Authorization", f"Bearer {secret}"), ("Content-Length", str(length))):
                connection.putheader(name, value)
            connection.endheaders()
            with connection.getresponse() as answer:
                return answer.status
        finally:
            connection.close()


def submit_as_documented(program: Program, secret: str) -> None:
    as_documented = {"key": "nightly-1", "user": "ann", "fields": {"command": ["hostname"], "sync": False}}
    code, error = program.ask("/jobs", secret, "POST", as_documented, "application/x-www-form-urlencoded")
    assert (code, error["error"]["hint"]) == (400, "send it with the header Content-Type: application/json")
    code, other = program.ask("/jobs", secret, "POST", as_documented)
    assert code == 200, other


def test_it_opens_with_a_token_serves_by_tls_and_closes_with_the_last_one(client: Client, certificate: Path) -> None:
    problem = wait_until(lambda: status(client).api_problem, 30, "why it is closed")
    assert "while there is no valid token" in str(problem)
    assert status(client).api_url is None
    created = client.ask(CreateToken(Role.USER, 3600, "ci"))
    token, secret = created.token, created.secret
    url = str(wait_until(lambda: status(client).api_url, 30, "the API"))
    assert url.startswith("https://0.0.0.0:")
    assert secret not in client.home.database.read_bytes().decode("latin-1"), "only its hash is kept"
    program = Program(url, certificate)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(f"{program.url.replace('https', 'http')}/jobs", timeout=30)

    run = {"command": ["true"], "sync": False, "cwd": "/"}
    code, made = program.ask("/jobs", secret, "POST", {"user": "somebody", "key": "k", "fields": run})
    assert code == 200, made
    assert made["job"]["user"] == client.ask(GetWhoami()).user
    submit_as_documented(program, secret)
    assert program.ask("/jobs", None)[0] == 401
    assert program.ask("/jobs", "ugro_wrong")[0] == 401
    assert program.ask("/exec", secret, "POST", {"key": "k", "nodes": [], "argv": ["id"]})[0] == 403
    assert program.ask("/tunnel?node=here&port=1", secret, "POST")[0] == 403
    assert program.announce("/jobs", secret, 3 << 20) == 413
    used = client.ask(ListTokens()).tokens[0]
    assert (used.id, used.last_used_by) == (token.id, "127.0.0.1")
    done = [one.via for one in client.ask(ListAuditEntries()).audit if (one.action, one.outcome) == ("submit", "done")]
    assert done == ["token ci, 127.0.0.1"] * 2
    client.jobs.wait(made["job"]["id"])

    client.ask(RevokeToken("ci"))
    wait_until(lambda: status(client).api_url is None, 30, "the API to close")


def test_a_certificate_that_cannot_be_used_is_named(client: Client, certificate: Path, tmp_path: Path) -> None:
    client.ask(CreateToken(Role.USER, 3600, "ci"))
    wait_until(lambda: status(client).api_url, 30, "the API")
    file = tmp_path / "cluster.yaml"
    file.write_text(file.read_text().replace(f"cert: {certificate}", f"cert: {tmp_path / 'key.pem'}"))
    problem = wait_until(lambda: status(client).api_problem, 30, "why it is closed")
    assert "its certificate cannot be used" in str(problem)
    assert str(tmp_path / "key.pem") in str(problem)

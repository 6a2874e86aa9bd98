"""An agent whose state is in PostgreSQL: moved there and back, backed up, and without its server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.conftest import InProcess, Ugro
from tests.rig import postgres
from tests.rig.agent import holder
from tests.rig.postgres import PostgresServer
from tests.rig.waiting import wait_until
from ugro.kernel.store.address import write_address
from ugro.kernel.support.state_dir import StateDir

pytestmark = pytest.mark.proof
PATIENCE_S = 60
API = "api: {bind: '127.0.0.1:0'}\n"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    postgres.needed()
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def ugro(ugro: Ugro) -> Ugro:
    return InProcess(ugro.home)


def document(ugro: Ugro, *words: str) -> Any:
    done = ugro(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def job_ids(ugro: Ugro) -> list[int]:
    return sorted(job["id"] for job in document(ugro, "status")["jobs"])


def refusal(ugro: Ugro, *words: str) -> str:
    done = ugro(*words)
    assert done.returncode not in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def asked(link: str, token: str, path: str = "/jobs") -> tuple[int, str]:
    where = urlsplit(link)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_state_goes_to_postgresql_and_back(ugro: Ugro, server: PostgresServer, tmp_path: Path) -> None:
    url = server.address_of(tmp_path).url
    assert "there is no state" in refusal(ugro, "store", "migrate", "--to", url)
    assert ugro("run", "--no-sync", "--", "true").returncode == 0
    assert ugro("note", "1", "zwei\nZeilen 風扇").returncode == 0
    secret = refusal(ugro, "store", "migrate", "--to", "postgresql://ugro:hunter2@/x")
    assert "has a password" in secret
    assert "hunter2" not in secret
    assert "not a URL of PostgreSQL" in refusal(ugro, "store", "migrate", "--to", "mysql://x/y")
    assert "an agent runs" in refusal(ugro, "store", "migrate", "--to", url)

    moved = document(ugro, "store", "migrate", "--to", url, "--yes")["moved"]
    assert (moved["where"], Path(moved["before"]).exists()) == (url, True)
    assert moved["rows"] > 5
    assert not (ugro.home / "state.db").exists()
    assert job_ids(ugro) == [1]
    assert ugro("run", "--no-sync", "--", "true").returncode == 0
    status = document(ugro, "store", "status")["store"]
    assert (status["kind"], status["where"], status["problem"]) == ("postgresql", url, None)
    assert "ugro agent" in status["used_by"]
    assert document(ugro, "agent", "status")["agent"]["store"] == url
    assert "already" in refusal(ugro, "store", "migrate", "--to", url, "--yes")
    assert job_ids(ugro) == [1, 2]

    assert document(ugro, "store", "migrate", "--to", "sqlite", "--yes")["moved"]["rows"] > moved["rows"]
    assert not (ugro.home / "store.yaml").exists()
    assert job_ids(ugro) == [1, 2]
    assert "Zeilen 風扇" in ugro("note", "1").stdout
    assert ugro("run", "--no-sync", "--", "true").returncode == 0
    assert job_ids(ugro) == [1, 2, 3], "ids go on where they were"
    assert "is not empty" in refusal(ugro, "store", "migrate", "--to", url, "--yes")


def test_a_move_to_sqlite_that_was_interrupted_is_finished_when_it_is_run_again(
    ugro: Ugro, server: PostgresServer, tmp_path: Path
) -> None:
    store = ugro.home / "store.yaml"
    write_address(StateDir(ugro.home), server.address_of(tmp_path))
    assert ugro("run", "--no-sync", "--", "true").returncode == 0
    before = store.read_text()
    moved = document(ugro, "store", "migrate", "--to", "sqlite", "--yes")["moved"]
    store.write_text(before)  # as if it had been killed before its last step
    done = ugro("status")
    assert done.returncode != 0
    assert "was moved to" in done.stderr
    assert "ugro store migrate --to sqlite" in done.stderr
    assert document(ugro, "store", "migrate", "--to", "sqlite")["moved"] == moved
    assert not store.exists()
    assert job_ids(ugro) == [1]


def test_a_state_in_postgresql_is_backed_up_and_restored_into_either(
    ugro: Ugro, server: PostgresServer, tmp_path: Path
) -> None:
    assert ugro("run", "--no-sync", "--", "true").returncode == 0
    url = server.address_of(tmp_path).url
    document(ugro, "store", "migrate", "--to", url, "--yes")
    file = ugro.home / "cwd" / "mine.db"
    made = document(ugro, "agent", "backup", str(file))["backup"]  # without an agent
    assert (made["jobs"], made["newest_job"], made["problem"]) == (1, 1, None)
    assert ugro("run", "--no-sync", "--", "true").returncode == 0
    assert document(ugro, "agent", "backup")["backup"]["jobs"] == 2  # while it runs
    assert ugro("agent", "stop").returncode == 0
    restored = document(ugro, "agent", "restore", str(file))["restored"]
    assert restored["backup"]["jobs"] == 1
    assert document(ugro, "agent", "restore", restored["aside"][0])["restored"]["backup"]["jobs"] == 2
    assert job_ids(ugro) == [1, 2]
    document(ugro, "store", "migrate", "--to", "sqlite", "--yes")
    assert job_ids(ugro) == [1, 2]


def test_an_agent_without_its_server_stands_still_says_so_and_goes_on(
    ugro: Ugro, server: PostgresServer, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    assert ugro("run", "--no-sync", "--", "true").returncode == 0
    document(ugro, "store", "migrate", "--to", server.address_of(tmp_path).url, "--yes")
    script = f"while [ ! -e {gate} ]; do sleep 0.05; done; echo through"
    started = ugro("run", "--no-sync", "--detach", "--json", "--", "sh", "-c", script)
    job = json.loads(started.stdout)["job"]["id"]
    wait_until(lambda: document(ugro, "status", str(job))["job"]["state"] == "running", PATIENCE_S)
    agent = holder(ugro.home)
    link = document(ugro, "dashboard", "--no-open")["dashboard"]["url"]
    token = (ugro.home / "dashboard.token").read_text().strip()
    server.kill()
    try:
        status = wait_until(lambda: document(ugro, "agent", "status")["agent"]["state_error"], PATIENCE_S)
        assert "does not answer" in status
        for words in (("status",), ("run", "--no-sync", "--", "true"), ("cancel", str(job))):
            done = ugro(*words)
            assert done.returncode == 5, done.stderr
            assert "does not answer" in done.stderr
        assert "does not answer" in ugro("doctor").stdout
        code, page = asked(link, token)
        assert (code, "does not answer" in page) == (503, True), page
        gate.touch()  # it ends while nobody can record it
    finally:
        server.start()
    wait_until(lambda: ugro("status", str(job)).returncode == 0, PATIENCE_S)
    wait_until(lambda: document(ugro, "status", str(job))["job"]["state"] == "succeeded", PATIENCE_S)
    assert "through" in ugro("logs", str(job)).stdout
    assert document(ugro, "status", str(job))["job"]["attempt"] == 1
    assert holder(ugro.home) == agent, "it was the same agent all the time"


def test_a_program_with_a_token_is_answered_while_the_server_is_away(
    ugro: Ugro, server: PostgresServer, tmp_path: Path
) -> None:
    ugro.cluster = ugro.home / "cluster.yaml"
    ugro.cluster.write_text(f"nodes: {{here: {{transport: local, remote_root: {ugro.home}/root}}}}\n{API}")
    write_address(StateDir(ugro.home), server.address_of(tmp_path))
    secret = document(ugro, "token", "create", "--role", "viewer", "--name", "ci")["secret"]
    url = wait_until(lambda: document(ugro, "agent", "status")["agent"]["api_url"], PATIENCE_S, "the API")
    server.kill()
    try:
        wait_until(lambda: document(ugro, "agent", "status")["agent"]["state_error"], PATIENCE_S)
        code, text = asked(url, secret, "/api/v1/jobs")  # its first use, which is to be noted
        assert (code, "does not answer" in text) == (503, True), text
        code, text = asked(url, secret, "/api/v1/agent")
        assert (code, "does not answer" in text) == (200, True), text
    finally:
        server.start()
    wait_until(lambda: asked(url, secret, "/api/v1/jobs")[0] == 200, PATIENCE_S, "the list of jobs")
    noted = "SELECT last_used_by FROM tokens"
    database = server.database_of(tmp_path)
    wait_until(lambda: server.sql(noted, database=database) == [("127.0.0.1",)], PATIENCE_S, "its use to be noted")


def test_an_agent_that_is_stopped_without_its_server_ends(
    ugro: Ugro, server: PostgresServer, tmp_path: Path
) -> None:
    assert ugro("run", "--no-sync", "--", "true").returncode == 0
    document(ugro, "store", "migrate", "--to", server.address_of(tmp_path).url, "--yes")
    assert job_ids(ugro) == [1]
    server.kill()
    try:
        wait_until(lambda: document(ugro, "agent", "status")["agent"]["state_error"], PATIENCE_S)
        assert ugro("agent", "stop").returncode == 0
        assert holder(ugro.home) is None
        done = ugro("status")
        assert (done.returncode, "cannot be used" in done.stderr) == (1, True)
        assert "Traceback" not in done.stderr
    finally:
        server.start()
    assert job_ids(ugro) == [1]

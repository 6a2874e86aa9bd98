"""``ugro serve`` as a user types it: a real server behind a real HAProxy on this machine."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from tests.rig.ports import free_port
from tests.rig.service import SERVER

HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin")
COMMAND = ("--", "{python}", "server.py", "{port}", "one")


@pytest.fixture(scope="module")
def ugro() -> Iterator[Ugro]:
    with commands() as made:
        (Path(made.home) / "cwd" / "server.py").write_text(SERVER)
        yield made


def document(ugro: Ugro, *words: str) -> Any:
    done = ugro(*words, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(HAPROXY is None, reason="not installed: haproxy")
@pytest.mark.timeout(400)
def test_a_command_is_served_shown_loaded_and_stopped(ugro: Ugro) -> None:
    port = free_port()
    started = ugro("serve", "--name", "echo", "--port", str(port), "--health", "/health", "--json", *COMMAND)
    assert started.returncode == 0, started.stdout + started.stderr
    found = json.loads(started.stdout)["service"]
    assert (found["state"], found["ready"], found["url"]) == ("ready", 1, f"http://127.0.0.1:{port}")
    with urllib.request.urlopen(f"{found['url']}/", timeout=20) as answer:
        assert answer.read() == b"1 one"

    measured = document(ugro, "serve", "bench", "echo", "-n", "20", "-c", "2")["bench"]
    assert (measured["requests"], measured["failed"]) == (20, 0)
    assert measured["replicas"]["1"] >= 20
    assert "echo" in ugro("serve", "ls").stdout
    assert "ready" in ugro("serve", "logs", "echo").stdout
    taken = ugro("serve", "--name", "echo", "--port", str(free_port()), *COMMAND)
    assert (taken.returncode, "already" in taken.stderr) == (6, True)

    stopped = document(ugro, "serve", "stop", "echo")["service"]
    assert (stopped["state"], stopped["replicas"]) == ("stopped", [])
    assert document(ugro, "serve", "ls")["services"] == []


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("status", "nobody"), 4, "there is no service"),
        (("--port", "0", *COMMAND), 2, "port"),
        (("--bind", "0.0.0.0", *COMMAND), 2, "tls"),
        (("--replicas", "some", *COMMAND), 2, "replicas"),
        (("--", "serve", "{prot}"), 2, "{port}"),
        (("--name", "17", *COMMAND), 2, "name"),
        (("./nothing",), 4, "no such file"),
        (("--detach",), 2, "nothing to serve"),
        (("-f", "missing.yaml"), 2, "missing.yaml"),
    ],
)
def test_a_mistake_gets_one_clear_error(ugro: Ugro, words: tuple[str, ...], code: int, text: str) -> None:
    done = ugro("serve", *words)
    assert (done.returncode, text in done.stderr) == (code, True), done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr

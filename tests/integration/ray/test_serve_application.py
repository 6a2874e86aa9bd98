"""Applications of Ray Serve as services: on a real Ray cluster, behind a real HAProxy."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.integration.ray.conftest import Clusters, Nodes
from tests.rig import needs
from tests.rig.agent import end_agent
from tests.rig.ports import free_port
from tests.rig.ray import LIMIT_S, document, leftovers, process_of, run_driver
from tests.rig.waiting import processes_with_variable, wait_until

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("grpc_reflection") is None, reason="ray[serve] is not installed"),
    needs.programs("haproxy"),
]
START_S = 400
APPLICATION = """
import words
from ray import serve
from starlette.requests import Request

@serve.deployment(num_replicas={count}, ray_actor_options={{"num_cpus": 0.4}}, max_ongoing_requests=4)
class Turned:
    async def __call__(self, request: Request):
        return {{"said": words.turned((await request.json())["text"]), "version": "{version}",
                "bearer": request.headers.get("authorization")}}

app = Turned.bind()
"""
WORDS = "def turned(text):\n    return text[::-1]\n"
APPLICATIONS = """
import ray
from ray import serve
ray.init(namespace="serve", logging_level="error", log_to_driver=False)
print(sorted(serve.status().applications))
"""


class Echo:
    """The service of a test."""

    def __init__(self, ugro: Ugro, cluster: str | None) -> None:
        self.ugro, self.port = ugro, free_port()
        self.folder = Path(ugro.home) / "cwd"
        (self.folder / "words.py").write_text(WORDS)
        self.write("one")
        named = f"cluster: {cluster}" if cluster else "resources: {cpus: 1, memory: 600MB}"
        head = f"name: echo\nengine: ray-serve\napplication: app:app\nport: {self.port}\n"
        (self.folder / "service.yaml").write_text(f"{head}update: {{timeout: 3m}}\n{named}\n")

    def write(self, version: str, count: int = 2) -> None:
        (self.folder / "app.py").write_text(APPLICATION.format(version=version, count=count))

    def start(self) -> dict[str, Any]:
        done = self.ugro("serve", "-f", "service.yaml", timeout=START_S)
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return self.shown()

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = document(self.ugro("serve", "status", "echo", "--json"))["service"]
        return found

    def logs(self) -> str:
        return self.ugro("serve", "logs", "echo").stdout

    def ask(self, port: int | None = None) -> Any:
        body = json.dumps({"text": "hello"}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port or self.port}/any/path", body, LIMIT_S) as answer:
            return json.load(answer)

    def answers_again(self, version: str) -> None:
        """Ten times in a row."""

        def good() -> bool:
            try:
                return all(self.ask()["version"] == version for _ in range(10))
            except (OSError, ValueError):
                return False

        wait_until(good, LIMIT_S, f"ten answers of version {version}")


@pytest.fixture
def stopped(ugro: Ugro, clusters: Clusters) -> Iterator[None]:
    """Before the clusters: nothing of a test that failed is left."""
    yield
    ugro("serve", "stop", "echo", timeout=LIMIT_S)


@pytest.mark.usefixtures("stopped")
def test_an_application_on_a_cluster_survives_a_worker_and_the_agent_is_updated_and_leaves_nothing(
    ugro: Ugro, nodes: Nodes, clusters: Clusters
) -> None:
    nodes(2)
    key = clusters.start()
    echo = Echo(ugro, "ray")
    found = echo.start()
    assert echo.ask() == {"said": "olleh", "version": "one", "bearer": None}
    assert found["source"] == "application app:app on the Ray cluster ray"
    with pytest.raises(urllib.error.HTTPError, match="401"):  # past the door
        echo.ask(int(found["replicas"][0]["address"].rpartition(":")[2]))
    token = Path(clusters.env()["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
    assert token not in echo.logs()
    assert not _with_argument(token)

    os.kill(process_of(key, 2, "raylet"), signal.SIGKILL)
    echo.answers_again("one")
    end_agent(ugro.home)
    assert echo.ask()["version"] == "one", "nobody needs the agent for a request"
    assert [one["job"] for one in echo.shown()["replicas"]] == [one["job"] for one in found["replicas"]]
    wait_until(lambda: echo.shown()["state"] == "ready", LIMIT_S, "the service to be ready")

    echo.write("two", count=1)
    updated = ugro("serve", "update", "echo", "--application", "app:app", timeout=START_S)
    assert updated.returncode == 0, updated.stdout + updated.stderr + echo.logs()
    echo.answers_again("two")
    (echo.folder / "app.py").write_text("import nothing_like_it\n")
    failed = ugro("serve", "update", "echo", "--application", "app:app", timeout=START_S)
    assert failed.returncode == 1
    assert "No module named 'nothing_like_it'" in failed.stdout + failed.stderr
    echo.answers_again("two")

    assert ugro("serve", "stop", "echo", timeout=LIMIT_S).returncode == 0
    assert run_driver(clusters.env(), APPLICATIONS).stdout.strip() == "[]"
    assert document(ugro("cluster", "status", "ray", "--json"))["cluster"]["state"] == "running"


@pytest.mark.usefixtures("stopped")
def test_an_application_is_back_with_the_head_and_its_program_finds_it_again(
    ugro: Ugro, nodes: Nodes, clusters: Clusters
) -> None:
    nodes(1)
    key = clusters.start()
    echo = Echo(ugro, "ray")
    found = echo.start()
    os.kill(process_of(key, 0, "gcs_server"), signal.SIGKILL)
    wait_until(lambda: document(ugro("cluster", "status", "ray", "--json"))["cluster"]["head"]["restarts"], LIMIT_S)
    echo.answers_again("one")
    [program] = [pid for pid in processes_with_variable("UGRO_SERVICE", ["echo"]) if _is_program(pid)]
    os.kill(program, signal.SIGKILL)
    wait_until(lambda: echo.shown()["replicas"][0]["restarts"], LIMIT_S, "the program's next start")
    echo.answers_again("one")
    assert [one["job"] for one in echo.shown()["replicas"]] == [one["job"] for one in found["replicas"]]


def _is_program(pid: int) -> bool:
    return b"ugro.inference.ray_serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.usefixtures("stopped")
def test_a_service_without_a_cluster_starts_one_and_ends_it(ugro: Ugro, nodes: Nodes) -> None:
    nodes(1)
    echo = Echo(ugro, None)
    echo.start()
    assert echo.ask()["said"] == "olleh"
    key = document(ugro("cluster", "status", "echo-ray", "--json"))["cluster"]["id"]
    assert ugro("serve", "stop", "echo", timeout=START_S).returncode == 0
    assert document(ugro("cluster", "status", "echo-ray", "--json"))["cluster"]["state"] == "stopped"
    wait_until(lambda: not leftovers(key), 20, f"nothing of it: {leftovers(key)}")


def test_mistakes_are_refused_with_a_hint(ugro: Ugro, nodes: Nodes, clusters: Clusters) -> None:
    nodes(1)
    clusters.start()
    echo = Echo(ugro, "rya")

    def refused(*words: str) -> str:
        done = ugro("serve", *words, timeout=LIMIT_S)
        assert done.returncode != 0
        return done.stderr

    assert "did you mean ray?" in refused("-f", "service.yaml")
    of_ray = ("--engine", "ray-serve", "--application", "app:app", "--port", str(echo.port))
    assert "scales in its cluster" in refused(*of_ray, "--replicas", "2", "--ray-cluster", "ray")
    assert "has its devices" in refused(*of_ray, "--cpus", "1", "--ray-cluster", "ray")
    assert "need engine: ray-serve" in refused("--application", "app:app")
    (echo.folder / "app.py").write_text("import nothing_like_it\n")
    said = refused(*of_ray, "--name", "bad", "--ray-cluster", "ray")
    assert "app:app cannot be imported: ModuleNotFoundError: No module named 'nothing_like_it'" in said
    assert ugro("serve", "stop", "bad", timeout=LIMIT_S).returncode == 0


def _with_argument(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found

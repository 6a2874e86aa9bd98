"""deploy/compose.yaml, brought up as docs/deployment.md says: the agent, Prometheus and PostgreSQL in containers.

Its host is a network namespace, where an sshd is the node. Prometheus and PostgreSQL are Debian's, in images that have
the names of the official ones and behave like them; for Grafana there is none.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from tests.rig import netns
from tests.rig import podman as rig
from tests.rig.netns import NetnsFarm, NetnsNode
from tests.rig.podman import ROOT, Offline, Podman
from tests.rig.waiting import wait_until

COMPOSE = Path(sys.executable).with_name("podman-compose")
_WHY_NOT = rig.missing() or (None if COMPOSE.exists() else "podman-compose is not installed")
pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(1800),  # images are built
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
]
PORTS = {"agent": 8099, "prometheus": 9090, "postgres": 5432}
LIMIT_S = 120
URL = "postgresql://ugro@127.0.0.1/ugro"
_PROMETHEUS = """
FROM localhost/ugro-test-services
RUN mkdir /prometheus && chown nobody:nogroup /prometheus
USER nobody
VOLUME /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
"""
_POSTGRES = """
FROM localhost/ugro-test-services
COPY begin /begin
ENV PGDATA=/var/lib/postgresql/data
VOLUME /var/lib/postgresql/data
ENTRYPOINT ["sh", "/begin"]
"""
# As the official one: the folder is given to the user postgres, who reads the password and makes the database once.
_BEGIN = """
set -eu
PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
if [ "$(id -u)" = 0 ]; then
  chown -R postgres:postgres "$PGDATA" && chmod 0700 "$PGDATA"
  exec setpriv --reuid=postgres --regid=postgres --clear-groups sh "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb -U "$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" -E UTF8 --locale=C.UTF-8 --auth-host=scram-sha-256
  echo "CREATE DATABASE $POSTGRES_DB" | postgres --single postgres
fi
exec "$@"
"""


class Stack:
    def __init__(self, folder: Path, podman: Podman, node: NetnsNode) -> None:
        self.deploy = folder / "deploy"
        self.node = node
        self._podman = podman

    def compose(self, *words: str) -> str:
        argv = [str(COMPOSE), "-f", str(self.deploy / "compose.yaml"), "--profile", "postgres", *words]
        env = {**os.environ, "PATH": self._podman.path}
        done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout

    def up(self, *services: str) -> None:
        self.compose("up", "-d", *services)
        if "agent" in services:
            wait_until(self.is_healthy, LIMIT_S, "the agent to be healthy")

    def is_healthy(self) -> bool:
        argv = [str(self._podman.bin / "podman"), "healthcheck", "run", "ugro_agent_1"]
        return subprocess.run(argv, capture_output=True, timeout=60, check=False).returncode == 0

    def ugro(self, *words: str) -> str:
        return self.compose("exec", "-T", "agent", "ugro", *words)

    def jobs(self) -> dict[str, str]:
        return {job["name"]: job["state"] for job in json.loads(self.ugro("status", "--all", "--json"))["jobs"]}

    def query(self, text: str, **more: float) -> list[Any]:
        address = f"http://127.0.0.1:9090/api/v1/query?{urlencode({'query': text, **more})}"
        done = self.inside("curl", "--silent", "--max-time", "10", address)
        return list(json.loads(done)["data"]["result"]) if done else []

    def inside(self, *argv: str) -> str:
        """In the namespace that is the containers' host."""
        words = ["nsenter", f"--net=/run/netns/{self.node.cable.namespace}", *argv]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout

    def listening(self) -> dict[int, str]:
        rows = [row.split()[3].rpartition(":") for row in self.inside("ss", "-Hltn").splitlines()]
        return {int(port): address for address, _, port in rows}


@pytest.fixture
def stack(podman: Podman, image: str, tmp_path: Path) -> Iterator[Stack]:
    if (reason := netns.available()) is not None:
        pytest.skip(reason)
    try:
        _stand_ins(podman, tmp_path / "images")
    except Offline as error:
        pytest.skip(f"Debian's packages cannot be reached: {error}"[:500])
    with NetnsFarm(tmp_path / "farm", 1) as farm:
        [node] = farm.nodes
        one = Stack(tmp_path, podman.within(node.cable.namespace), node)
        _prepare(one.deploy, farm)
        try:
            yield one
        finally:
            one.compose("down", "--volumes")


def _stand_ins(podman: Podman, folder: Path) -> None:
    podman.take("services")
    names = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    folder.mkdir()
    (folder / "begin").write_text(_BEGIN)
    for service, text in (("prometheus", _PROMETHEUS), ("postgres", _POSTGRES)):
        (folder / service).write_text(text)
        podman.build(folder / service, folder, names[service]["image"].partition(":-")[2].rstrip("}"))


def _prepare(deploy: Path, farm: NetnsFarm) -> None:
    """What the documentation tells people to do first."""
    shutil.copytree(ROOT / "deploy", deploy, ignore=shutil.ignore_patterns("home"))
    home, [node] = deploy / "home", farm.nodes
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    nodes = {"gpu1": {"host": node.host, "user": farm.user, "remote_root": str(node.home / "ugro")}}
    (home / "cluster.yaml").write_text(yaml.safe_dump({"nodes": nodes}))
    shutil.copy(farm.client_key, home / ".ssh/id_ed25519")
    shutil.copy(farm.known_hosts, home / ".ssh/known_hosts")
    home.chmod(0o700)
    for path in (home, *home.rglob("*")):
        os.chown(path, 1000, 1000)


def test_the_compose_file_brings_up_what_it_promises_and_keeps_it(stack: Stack, tmp_path: Path) -> None:
    stack.up("agent")
    assert stack.compose("exec", "-T", "agent", "cat", "/etc/machine-id") == Path("/etc/machine-id").read_text()
    assert stack.ugro("run", "--name", "early", "--", "echo", "from a container").strip() == "from a container"
    gate = tmp_path / "gate"
    script = f"echo begins; while ! test -e {gate}; do sleep 0.1; done; echo ends"
    stack.ugro("run", "--detach", "--name", "long", "--", "sh", "-c", script)
    wait_until(lambda: stack.jobs() == {"early": "succeeded", "long": "running"}, LIMIT_S, "the job to run")

    secret = stack.deploy / "secrets"
    shutil.copy(stack.deploy / "home/state/dashboard.token", secret / "dashboard.token")
    (secret / "dashboard.token").chmod(0o444)
    stack.up("agent", "prometheus")
    wait_until(lambda: stack.query('up{job="ugro"} == 1'), LIMIT_S, "Prometheus to reach the agent")
    wait_until(lambda: stack.query('ugro_node_health_score{node="gpu1"}'), LIMIT_S, "the node's metrics")
    scraped_at = time.time()

    _move_to_postgres(stack)
    assert stack.jobs() == {"early": "succeeded", "long": "running"}
    stack.compose("restart", "agent")
    wait_until(stack.is_healthy, LIMIT_S, "the agent to be healthy again")
    gate.touch()
    stack.ugro("wait", "2")
    assert stack.ugro("logs", "2") == "begins\nends\n"
    _expect_only_loopback(stack)

    stack.compose("down")
    assert set(stack.listening()) == {stack.node.port}
    stack.up("postgres", "agent", "prometheus")
    assert stack.jobs() == {"early": "succeeded", "long": "succeeded"}
    wait_until(lambda: stack.query('up{job="ugro"} == 1', time=scraped_at), LIMIT_S, "what Prometheus knew before")


def _move_to_postgres(stack: Stack) -> None:
    password = stack.deploy / "secrets/postgres.password"
    password.write_text(f"{secrets.token_hex(16)}\n")
    password.chmod(0o444)
    own = stack.deploy / "home/postgres.password"
    shutil.copy(password, own)
    own.chmod(0o400)
    os.chown(own, 1000, 1000)
    stack.up("postgres")
    wait_until(lambda: PORTS["postgres"] in stack.listening(), LIMIT_S, "PostgreSQL to listen")
    stack.compose("stop", "agent")
    file = f"/var/lib/ugro/{own.name}"
    stack.compose(
        "run", "--rm", "-T", "--entrypoint", "ugro", "agent", "store", "migrate", "--to", URL, "--password-file", file
    )
    stack.up("agent")
    assert "PostgreSQL" in stack.ugro("store", "status")


def _expect_only_loopback(stack: Stack) -> None:
    listening = stack.listening()
    others = {port: address for port, address in listening.items() if port != stack.node.port}
    assert others == dict.fromkeys(PORTS.values(), "127.0.0.1")
    for port in PORTS.values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((stack.node.host, port), timeout=10)
    socket.create_connection((stack.node.host, stack.node.port), timeout=10).close()

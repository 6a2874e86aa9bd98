"""The agent in a container that is built from deploy/Containerfile, and containers as nodes: with podman, for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.integration.conftest import Ugro
from tests.rig import podman as rig
from tests.rig.agent import holder
from tests.rig.podman import BASE, Podman
from tests.rig.waiting import wait_until

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(1800),  # an image is built
    pytest.mark.skipif(rig.missing() is not None, reason=str(rig.missing())),
]


def test_the_image_runs_the_agent_as_nobody_special_and_keeps_its_state(
    podman: Podman, image: str, tmp_path: Path
) -> None:
    [about] = json.loads(podman("image", "inspect", image))
    assert about["Config"]["User"] == "1000:1000"
    health = about.get("HealthCheck") or about.get("Healthcheck") or about["Config"]["Healthcheck"]
    assert health["Test"] == ["CMD", "ugro", "agent", "status"]
    home = tmp_path / "home"
    home.mkdir()
    (home / "cluster.yaml").write_text("nodes: {here: {transport: local, remote_root: /var/lib/ugro/work}}\n")
    for path in (home, home / "cluster.yaml"):
        os.chown(path, 1000, 1000)
    options = ("--volume", f"{home}:/var/lib/ugro", "--cap-drop=all", "--security-opt=no-new-privileges")
    podman.start("agent", image, options=options)

    def is_healthy() -> bool:
        with suppress(AssertionError):
            podman("healthcheck", "run", "agent")
            return True
        return False

    wait_until(is_healthy, 120, "the container to be healthy")
    assert podman("exec", "agent", "id", "-u").strip() == "1000"
    assert podman("exec", "agent", "ugro", "run", "--", "echo", "from inside").strip().endswith("from inside")
    podman("kill", "--signal", "KILL", "agent")
    wait_until(lambda: not is_healthy(), 60, "the container to be unhealthy")
    podman("start", "agent")
    wait_until(is_healthy, 120, "the container to be healthy again")
    jobs = json.loads(podman("exec", "agent", "ugro", "status", "--json"))["jobs"]
    assert [job["state"] for job in jobs] == ["succeeded"]
    podman("stop", "--time", "60", "agent")
    [ended] = json.loads(podman("inspect", "agent"))
    assert ended["State"]["ExitCode"] == 0


def test_a_copy_of_the_whole_home_on_another_machine_is_recognized(podman: Podman, image: str, tmp_path: Path) -> None:
    """By the machine's id, which compose.yaml mounts. An agent that takes over is many generations ahead."""
    home, copy = tmp_path / "home", tmp_path / "copy"
    home.mkdir()
    (home / "cluster.yaml").write_text("nodes: {here: {transport: local, remote_root: /var/lib/ugro/work}}\n")
    for path in (home, home / "cluster.yaml"):
        os.chown(path, 1000, 1000)

    def generation(name: str, folder: Path, machine: str) -> int:
        file = tmp_path / machine
        file.write_text(f"{machine}\n")
        podman.start(name, image, options=("-v", f"{folder}:/var/lib/ugro", "-v", f"{file}:/etc/machine-id:ro"))

        def found() -> int:
            said = podman("exec", name, "ugro", "agent", "status", "--json", is_checked=False)
            agent = json.loads(said)["agent"] if said else None
            return agent["generation"] if agent and not agent["safe_mode"] else 0

        try:
            return wait_until(found, 120, f"the agent on {machine}")
        finally:
            podman("stop", "--time", "60", name)

    assert generation("first", home, "a" * 32) < 10
    assert generation("again", home, "a" * 32) < 10
    subprocess.run(["cp", "-a", str(home), str(copy)], check=True)
    assert generation("other", copy, "b" * 32) > 500


def test_a_container_is_a_node_whose_jobs_outlive_link_and_agent(podman: Podman, ugro: Ugro) -> None:
    podman.start("gpu1", BASE, "sleep", "infinity", options=("--hostname", "in-a-container", "--uts=private"))
    ugro.cluster = ugro.home / "cwd/cluster.yaml"
    ugro.cluster.write_text(yaml.safe_dump({"nodes": {"gpu1": {"transport": "podman", "remote_root": "/root/ugro"}}}))
    env = {"PATH": podman.path}
    done = ugro("run", "--", "cat", "/etc/hostname", env=env)
    assert (done.returncode, done.stdout.strip()) == (0, "in-a-container"), done.stderr
    script = "echo begins; while ! test -e /tmp/gate; do sleep 0.1; done; echo ends"
    done = ugro("run", "--detach", "--json", "--", "sh", "-c", script, env=env)
    job = json.loads(done.stdout)["job"]["id"]
    wait_until(lambda: ugro("logs", str(job), env=env).stdout == "begins\n", 60, "the job to begin")
    agent = holder(ugro.home)
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    podman("exec", "gpu1", "sh", "-c", "echo >/tmp/gate")
    assert ugro("wait", str(job), env=env).returncode == 0
    assert ugro("logs", str(job), env=env).stdout == "begins\nends\n"
    done = ugro("health", "--json", env=env)
    assert json.loads(done.stdout)["nodes"][0]["name"] == "gpu1"
    podman("rm", "--force", "--time", "0", "gpu1")
    wait_until(lambda: "unreachable" in ugro("health", env=env).stdout, 60, "the node to be gone")


def test_a_container_that_is_not_there_is_an_unreachable_node(podman: Podman, ugro: Ugro) -> None:
    ugro.cluster = ugro.home / "cwd/cluster.yaml"
    ugro.cluster.write_text("nodes: {gpu1: {transport: podman, container: nobody}}\n")
    done = ugro("health", env={"PATH": podman.path})
    assert done.returncode == 5
    assert "no such container" in done.stdout

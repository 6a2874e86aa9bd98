"""The agent as a service of a real systemd, which is the first process of a container: installed, restarted, removed.

The container has no network but its loopback, where an sshd is the node.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from tests.rig import podman as rig
from tests.rig.podman import Offline, Podman
from tests.rig.waiting import wait_until

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(1800),  # an image is built
    pytest.mark.skipif(rig.missing() is not None, reason=str(rig.missing())),
]
LIMIT_S = 120
SOCKET = "/run/ugro-ann/agent.sock"
UNIT = "ugro-agent-ann.service"
_PEOPLE = """
set -eu
groupadd gpu
for name in ann bob; do useradd --create-home --shell /bin/bash --groups gpu $name; done
useradd --create-home --shell /bin/bash eve
loginctl enable-linger eve
"""
_KEYS = """
set -eu
mkdir -p -m 700 ~/.ssh ~/.ugro
ssh-keygen -q -t ed25519 -N "" -f ~/.ssh/id_ed25519
cp ~/.ssh/id_ed25519.pub ~/.ssh/authorized_keys
ssh-keyscan -t ed25519 127.0.0.1 >~/.ssh/known_hosts
echo "{nodes: {gpu1: {host: 127.0.0.1}}, team: {group: gpu}}" >~/.ugro/cluster.yaml
"""
_GATED = "echo begins; while ! test -e ~/gate; do sleep 0.1; done; echo ends"


class Machine:
    def __init__(self, enter: Sequence[str]) -> None:
        self._enter = enter

    def run(self, script: str, user: str = "root") -> subprocess.CompletedProcess[str]:
        """As after a login of this user."""
        argv = [*self._enter, "runuser", "-l", user, "-c", script]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)

    def __call__(self, script: str, user: str = "root") -> str:
        done = self.run(script, user)
        assert done.returncode == 0, f"{user}: {script}: {done.stdout[-2000:]}{done.stderr[-2000:]}{self._journal()}"
        return done.stdout

    def state(self, unit: str) -> str:
        return self.run(f"systemctl is-active {unit}").stdout.strip()

    def jobs(self, user: str, before: str = "") -> dict[str, str]:
        found = json.loads(self(f"{before} ugro status --all --json", user))["jobs"]
        return {job["name"]: job["state"] for job in found}

    def _journal(self) -> str:
        return self.run("journalctl --no-pager --lines 40").stdout


@pytest.fixture(scope="module")
def machine(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    try:
        base = podman.take("systemd")
        image = podman.build_agent(tmp_path_factory.mktemp("systemd"), base, "ugro-systemd")
    except Offline as error:
        pytest.skip(f"packages cannot be reached: {error}"[:500])
    with podman.systemd("machine", image) as enter:
        one = Machine(enter)
        wait_until(lambda: one.run("systemctl is-system-running").stdout.strip() in ("running", "degraded"), LIMIT_S)
        one(_PEOPLE)
        yield one


def test_a_unit_of_the_whole_system_serves_a_team_from_its_sandbox(machine: Machine) -> None:
    wait_until(lambda: machine.state("ssh.service") == "active", LIMIT_S, "the sshd to run")
    machine(_KEYS, "ann")
    machine("ugro agent install --system --user ann")
    assert "ProtectSystem=strict" in machine(f"systemctl cat {UNIT}")
    assert machine.state(UNIT) == "active"
    assert machine("ugro run -- echo by ssh", "ann").splitlines()[-1] == "by ssh"
    machine(f"ugro run --detach --name long -- sh -c {shlex.quote(_GATED)}", "ann")
    team = f"UGRO_SOCKET={SOCKET}"
    wait_until(lambda: machine.jobs("bob", team).get("long") == "running", LIMIT_S, "a member to see the job run")
    assert f"UGRO_SOCKET={SOCKET}" in machine("ugro agent status", "ann")
    assert machine.run(f"{team} ugro status", "eve").returncode != 0

    machine(f"systemctl restart {UNIT}")
    assert machine.jobs("bob", team)["long"] == "running"
    refused = machine.run("ugro agent restart", "ann")
    assert (refused.returncode, machine.state(UNIT)) == (6, "active"), refused.stderr
    assert f"sudo systemctl restart {UNIT}" in refused.stderr
    machine("ugro agent stop", "ann")
    refused = machine.run("ugro status", "ann")
    assert refused.returncode == 6, refused.stderr
    assert f"hint:  sudo systemctl start {UNIT}" in refused.stderr
    assert machine.run("pgrep -f '[u]gro.agent --home'").stdout == ""

    machine(f"systemctl start {UNIT}")
    machine("touch ~/gate", "ann")
    machine("ugro wait long", "ann")
    assert machine("ugro logs long", "ann") == "begins\nends\n"
    machine("ugro agent uninstall --system --user ann")
    assert machine.run(f"systemctl cat {UNIT}").returncode != 0
    assert machine.jobs("ann")["long"] == "succeeded"  # by an agent without a service
    machine("ugro agent stop", "ann")


def test_a_unit_of_a_users_own_systemd_leaves_jobs_on_this_machine_alone(machine: Machine) -> None:
    bus = "export XDG_RUNTIME_DIR=/run/user/$(id -u);"
    wait_until(lambda: machine.run(f"{bus} systemctl --user is-system-running", "eve").returncode == 0, LIMIT_S)
    machine(f"{bus} ugro agent install", "eve")
    active = f"{bus} systemctl --user is-active ugro-agent.service"
    assert machine(active, "eve") == "active\n"
    machine(f"{bus} ugro run --detach --name long -- sh -c {shlex.quote(_GATED)}", "eve")
    wait_until(lambda: machine.jobs("eve", bus)["long"] == "running", LIMIT_S, "the job to run")
    for words in ("systemctl --user restart ugro-agent", "ugro agent restart", "systemctl --user stop ugro-agent"):
        machine(f"{bus} {words}", "eve")
        assert machine.jobs("eve", bus)["long"] == "running", words
        assert machine(active, "eve") == "active\n", words
    pid = machine(f"{bus} systemctl --user show --property=MainPID --value ugro-agent.service", "eve").strip()
    machine(f"kill -KILL {pid}")
    machine("touch ~/gate", "eve")
    machine(f"{bus} ugro wait long", "eve")
    assert machine(f"{bus} ugro logs long", "eve") == "begins\nends\n"
    machine(f"{bus} ugro agent uninstall", "eve")
    assert machine.run(active, "eve").returncode != 0

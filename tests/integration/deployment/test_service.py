"""`ugro agent install`: what it writes and asks of systemd, and that commands then start the service."""

from __future__ import annotations

import json
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.conftest import InProcess, Ugro
from tests.rig.agent import holder
from tests.rig.machines import can_lay_over
from tests.rig.systemd import FakeSystemd

NAME = "ugro-agent.service"


@pytest.fixture
def systemd(ugro: Ugro, tmp_path: Path) -> Iterator[FakeSystemd]:
    fake = FakeSystemd(tmp_path / "systemd")
    yield fake
    InProcess(ugro.home)("agent", "stop")
    fake.stop_all()


def unit_file(ugro: Ugro) -> Path:
    return ugro.home / "user/.config/systemd/user" / NAME


def test_it_is_installed_once_and_removed_with_its_state_left(ugro: Ugro, systemd: FakeSystemd) -> None:
    ugro = InProcess(ugro.home)
    done = ugro("agent", "install", env=systemd.env)
    assert done.returncode == 0, done.stderr
    assert f"installed: {unit_file(ugro)}" in done.stderr
    text = unit_file(ugro).read_text()
    assert f"--home {ugro.home}" in text
    assert "KillMode=process" in text
    verbs = [[word for word in call if word != "--no-ask-password"][1] for call in systemd.calls()]
    assert verbs == ["show", "daemon-reload", "enable", "start"]
    assert all(call[0] == "--user" for call in systemd.calls())
    assert holder(ugro.home) == systemd.pids()[-1]

    done = ugro("agent", "install", "--json", env=systemd.env)
    assert json.loads(done.stdout)["service"]["unit"] == NAME
    assert unit_file(ugro).read_text() == text

    done = ugro("agent", "uninstall", env=systemd.env)
    assert done.returncode == 0, done.stderr
    assert f"the state in {ugro.home} is as it was" in done.stderr
    assert not unit_file(ugro).exists()
    assert (ugro.home / "state.db").exists()
    done = ugro("agent", "uninstall", "--json", env=systemd.env)
    assert json.loads(done.stdout) == {"uninstalled": False}


class WithUnits(Ugro):
    """Commands for which the units of the whole system are in a folder of the test."""

    def __init__(self, home: Path, units: Path) -> None:
        super().__init__(home)
        self._units = units

    def argv(self, *args: str) -> Sequence[str]:
        enter = 'mount --bind "$0" /etc/systemd/system && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", enter, str(self._units), *super().argv(*args)]


@pytest.mark.proof
def test_a_unit_of_the_whole_system_is_installed_enabled_started_and_removed(
    ugro: Ugro, systemd: FakeSystemd, tmp_path: Path
) -> None:
    if not can_lay_over():
        pytest.skip("a folder of the test's own at /etc/systemd/system needs root")
    units, user = tmp_path / "units", pwd.getpwuid(os.getuid()).pw_name
    units.mkdir()
    root, whose = WithUnits(ugro.home, units), ("--system", "--user", user)
    assert ugro("agent", "start").returncode == 0
    refused = root("agent", "install", *whose, env=systemd.env)
    assert (refused.returncode, f"an agent of {user} runs already" in refused.stderr) == (6, True), refused.stderr
    assert (list(units.iterdir()), systemd.calls()) == ([], [])
    assert ugro("agent", "stop").returncode == 0

    done = root("agent", "install", *whose, env=systemd.env)
    assert done.returncode == 0, done.stderr
    [file] = units.iterdir()
    name, text = f"ugro-agent-{user}.service", file.read_text()
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == (name, 0o644)
    assert f"\nUser={user}\n" in text
    assert "\nWantedBy=multi-user.target\n" in text
    ask, reload = ["show", "--property=Version"], ["daemon-reload"]
    assert asked(systemd) == [ask, reload, ["enable", name], ["start", name]]
    assert holder(ugro.home) == systemd.pids()[-1]

    again = json.loads(root("agent", "install", "--json", *whose, env=systemd.env).stdout)["service"]
    assert again == {"unit": name, "path": f"/etc/systemd/system/{name}", "lingers": True}
    assert (file.read_text(), len(systemd.pids())) == (text, 1)
    done = root("agent", "uninstall", *whose, env=systemd.env)
    assert done.returncode == 0, done.stderr
    assert asked(systemd)[-2:] == [["disable", "--now", name], reload]
    assert (list(units.iterdir()), holder(ugro.home)) == ([], None)
    assert (ugro.home / "state.db").exists()


@pytest.mark.proof
def test_a_unit_of_the_whole_system_is_not_bypassed(ugro: Ugro, systemd: FakeSystemd, tmp_path: Path) -> None:
    """Its sandbox would be, and the service could not start beside such an agent."""
    if not can_lay_over():
        pytest.skip("a folder of the test's own at /etc/systemd/system needs root")
    units, user = tmp_path / "units", pwd.getpwuid(os.getuid()).pw_name
    units.mkdir()
    root = WithUnits(ugro.home, units)
    assert root("agent", "install", "--system", "--user", user, env=systemd.env).returncode == 0
    assert root("agent", "stop", env=systemd.env).returncode == 0
    systemd.fail_at("start", "Interactive authentication required.")
    refused = root("status", env=systemd.env)
    assert (refused.returncode, holder(ugro.home)) == (6, None), refused.stderr
    assert f"the agent is ugro-agent-{user}.service, which does not start: " in refused.stderr
    assert "Interactive authentication required." in refused.stderr
    assert f"hint:  sudo systemctl start ugro-agent-{user}.service" in refused.stderr


def asked(systemd: FakeSystemd) -> list[list[str]]:
    """Of the systemd of the whole system."""
    assert not [call for call in systemd.calls() if "--user" in call]
    return [[word for word in call if word != "--no-ask-password"] for call in systemd.calls()]


@pytest.mark.proof
def test_any_command_starts_the_service_and_not_an_agent_of_its_own(ugro: Ugro, systemd: FakeSystemd) -> None:
    assert ugro("agent", "install", env=systemd.env).returncode == 0
    assert ugro("agent", "stop", env=systemd.env).returncode == 0
    assert holder(ugro.home) is None
    assert ugro("status", env=systemd.env).returncode == 0
    assert len(systemd.pids()) == 2
    assert holder(ugro.home) == systemd.pids()[-1]


@pytest.mark.proof
def test_a_service_that_does_not_start_leaves_commands_working(ugro: Ugro, systemd: FakeSystemd) -> None:
    assert ugro("agent", "install", env=systemd.env).returncode == 0
    assert ugro("agent", "stop", env=systemd.env).returncode == 0
    systemd.fail_at("start", "Failed to connect to bus: No medium found")
    assert ugro("status", env=systemd.env).returncode == 0
    assert holder(ugro.home) not in (None, systemd.pids()[-1])


@pytest.mark.proof
def test_the_running_agent_becomes_the_service(ugro: Ugro, systemd: FakeSystemd) -> None:
    assert ugro("agent", "start").returncode == 0
    before = holder(ugro.home)
    assert ugro("agent", "install", env=systemd.env).returncode == 0
    assert before != holder(ugro.home) == systemd.pids()[-1]


@pytest.mark.proof
def test_without_linger_the_exact_command_is_said(ugro: Ugro, systemd: FakeSystemd) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    if Path("/var/lib/systemd/linger", user).exists():
        pytest.skip(f"{user} lingers on this machine")
    done = ugro("agent", "install", env=systemd.env)
    assert f"sudo loginctl enable-linger {user}" in done.stderr


def test_without_systemd_nothing_is_written(ugro: Ugro, systemd: FakeSystemd) -> None:
    systemd.fail_at("show", "System has not been booted with systemd as init system (PID 1). Can't operate.")
    done = ugro("agent", "install", env=systemd.env)
    assert done.returncode == 6
    assert "System has not been booted with systemd" in done.stderr
    assert "ugro agent install --print" in done.stderr
    assert not unit_file(ugro).exists()


def test_a_unit_of_somebody_else_is_left_alone(ugro: Ugro, systemd: FakeSystemd) -> None:
    ugro = InProcess(ugro.home)
    unit_file(ugro).parent.mkdir(parents=True)
    unit_file(ugro).write_text("[Service]\nExecStart=/bin/true\n")
    for verb in ("install", "uninstall"):
        done = ugro("agent", verb, env=systemd.env)
        assert done.returncode == 6
        assert "was not written by UGRO" in done.stderr
    assert unit_file(ugro).read_text() == "[Service]\nExecStart=/bin/true\n"


def test_the_unit_of_another_state_directory_is_left_alone(ugro: Ugro, systemd: FakeSystemd, tmp_path: Path) -> None:
    first, second = InProcess(ugro.home), InProcess(ugro.home)
    assert first("agent", "install", env=systemd.env).returncode == 0
    text, pids = unit_file(ugro).read_text(), systemd.pids()
    for verb in ("install", "uninstall"):
        done = second("agent", verb, env={**systemd.env, "UGRO_HOME": str(tmp_path / "other")})
        assert done.returncode == 6, done.stderr
        assert f"is the service of another state directory, '{ugro.home}', not of '{tmp_path}/other'" in done.stderr
        assert f"UGRO_HOME='{ugro.home}' ugro agent uninstall" in done.stderr
    assert (unit_file(ugro).read_text(), systemd.pids()) == (text, pids)
    assert holder(ugro.home) == pids[-1]


def test_the_sandbox_is_used_where_all_nodes_are_reached_by_ssh(ugro: Ugro) -> None:
    ugro = InProcess(ugro.home)
    file = ugro.home / "cluster.yaml"
    file.write_text("nodes: [gpu1, gpu2]\n")
    user = pwd.getpwuid(os.getuid()).pw_name
    printed = ugro("agent", "install", "--print", "--system", "--user", user).stdout
    assert "ProtectSystem=strict" in printed
    assert f"User={user}" in printed
    assert f"--cluster {file}" in printed
    file.write_text("nodes: {gpu1: {}, here: {transport: local}}\n")
    assert "ProtectSystem" not in ugro("agent", "install", "--print", "--system", "--user", user).stdout
    assert "ProtectSystem" in ugro("agent", "install", "--print", "--system", "--user", user, "--sandbox").stdout
    assert holder(ugro.home) is None


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--user", "ann"], 2, "--user belongs to --system"),
        (["--system", "--user", "no-such-user"], 4, "there is no user no-such-user"),
    ],
)
def test_mistakes_get_a_hint(ugro: Ugro, words: list[str], code: int, said: str) -> None:
    done = InProcess(ugro.home)("agent", "install", "--print", *words)
    assert done.returncode == code
    assert said in done.stderr
    assert "hint:" in done.stderr

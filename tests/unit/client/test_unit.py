"""The agent's systemd unit, as systemd itself reads and judges it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ugro.client.service import Service, Unit, command, quoted
from ugro.kernel.support.errors import NotAllowed
from ugro.kernel.support.state_dir import team_socket

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian: systemd)"
)
HOME = Path("/home/ann/.ugro")
WORST_EXPOSURE = 30  # of 100; systemd calls it OK, and a unit without a sandbox gets more than 90


def unit_of(*, user: str | None = None, runs_jobs: bool = False, home: Path = HOME) -> Unit:
    argv = tuple(command(sys.executable, home, home / "cluster.yaml"))
    return Unit(home, argv, user, runs_jobs, (Path("/home/ann/.ssh"),))


def analyze(name: str, text: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    file = folder / name
    file.write_text(text)
    argv = ["systemd-analyze", *words, str(file)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin"})


def complaints(name: str, text: str, folder: Path) -> list[str]:
    """Of systemd about this unit, not about those of the machine that it names."""
    checked = analyze(name, text, folder, "verify", "--man=no", "--recursive-errors=no")
    found = [line for line in checked.stderr.splitlines() if "ugro-agent" in line]
    return found or [f"exit code {checked.returncode}: {checked.stderr}"] * (checked.returncode != 0)


@needs_systemd
@pytest.mark.parametrize("runs_jobs", [True, False])
@pytest.mark.parametrize("user", [None, "root"])
def test_systemd_takes_the_unit_without_a_complaint(tmp_path: Path, user: str | None, runs_jobs: bool) -> None:
    home = tmp_path / "odd %h $HOME 'q' \"d\" \\ ü"
    home.mkdir()
    unit = unit_of(user=user, runs_jobs=runs_jobs, home=home)
    assert complaints(unit.name, unit.text(), tmp_path) == []


@needs_systemd
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("KillMode=process", "KillMode=proces"),
        ("UMask=", "UMsk="),
        ("[Service]", "[Servce]"),
        (f"ExecStart={sys.executable}", "ExecStart=/no/such/python"),
        ("ExecStart=", "# ExecStart="),
    ],
)
def test_a_mistake_in_the_unit_would_be_seen(tmp_path: Path, right: str, wrong: str) -> None:
    unit = unit_of(user="root")
    assert right in unit.text()
    assert complaints(unit.name, unit.text().replace(right, wrong), tmp_path) != []


@needs_systemd
def test_a_check_that_cannot_run_is_no_check(tmp_path: Path) -> None:
    [said] = complaints("no-unit", "[Service]\n", tmp_path)
    assert said.startswith("exit code ")


@needs_systemd
def test_the_sandbox_of_a_system_unit_is_judged_well(tmp_path: Path) -> None:
    unit = unit_of(user="root")
    words = ("security", "--offline=true", f"--threshold={WORST_EXPOSURE}", "--no-pager")
    judged = analyze(unit.name, unit.text(), tmp_path, *words)
    assert judged.returncode == 0, judged.stdout[-2000:] + judged.stderr


@pytest.mark.parametrize("user", [None, "ann"])
@pytest.mark.parametrize("runs_jobs", [True, False])
def test_a_restart_of_the_unit_never_ends_a_job(user: str | None, runs_jobs: bool) -> None:
    lines = unit_of(user=user, runs_jobs=runs_jobs).text().splitlines()
    assert "KillMode=process" in lines
    assert "OOMPolicy=continue" in lines


def test_jobs_on_this_machine_are_not_in_a_sandbox() -> None:
    """It would hold for them: no sudo, no GPU, a /tmp that goes with the unit."""
    text = unit_of(user="ann", runs_jobs=True).text()
    for word in ("NoNewPrivileges", "PrivateTmp", "PrivateDevices", "Protect", "Restrict", "SystemCall"):
        assert f"{word}" not in text
    assert "Delegate=yes" in text
    assert "NoNewPrivileges=yes" in unit_of(user="ann").text()


def test_only_the_state_and_what_was_named_can_be_written_in_the_sandbox() -> None:
    lines = unit_of(user="ann").text().splitlines()
    assert "ReadWritePaths=/home/ann/.ugro -/home/ann/.ssh" in lines
    assert "ProtectSystem=strict" in lines


@pytest.mark.parametrize("runs_jobs", [True, False])
def test_the_socket_of_a_team_is_in_a_folder_that_its_members_see(runs_jobs: bool) -> None:
    """Not in a /tmp of the unit's own, and not where the sandbox forbids to write."""
    lines = unit_of(user="ann", runs_jobs=runs_jobs).text().splitlines()
    assert "RuntimeDirectory=ugro-ann" in lines
    env = {"RUNTIME_DIRECTORY": "/run/ugro-ann"}  # as systemd sets it
    for is_root in (True, False):
        assert str(team_socket(env, owner="ann", is_root=is_root)) == "/run/ugro-ann/agent.sock"
    assert "RuntimeDirectory" not in unit_of(runs_jobs=runs_jobs).text()


def test_only_root_restarts_a_unit_of_the_whole_system() -> None:
    """Asked first: an agent that was stopped and cannot be started again would be missed by everybody."""
    service = Service.of_system("ann")
    with pytest.raises(NotAllowed, match="only root starts") as refused:
        service.expect_startable(1000)
    assert refused.value.hint == "sudo systemctl restart ugro-agent-ann.service"
    service.expect_startable(0)
    Service.of_user({"HOME": "/home/ann"}).expect_startable(1000)


def test_a_unit_is_of_one_state_directory(tmp_path: Path) -> None:
    unit = unit_of(user="ann")
    service = Service(tmp_path / unit.name, is_system=True)
    service.expect_ours(HOME)
    service.path.write_text(unit.text())
    service.expect_ours(HOME)
    with pytest.raises(NotAllowed, match=r"of another state directory, '/home/ann/\.ugro', not of '/srv/u'") as refused:
        service.expect_ours(Path("/srv/u"))
    assert refused.value.hint is not None
    assert "sudo UGRO_HOME='/home/ann/.ugro' ugro agent uninstall --system --user ann" in refused.value.hint


def test_a_word_is_one_word_for_systemd() -> None:
    assert quoted("/usr/bin/python3.11") == "/usr/bin/python3.11"
    assert quoted("50% of $X") == '"50%% of $$X"'
    assert quoted('a"b\\c') == '"a\\"b\\\\c"'
    assert quoted("") == '""'

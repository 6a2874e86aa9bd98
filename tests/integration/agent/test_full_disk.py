"""The disk of the agent's state is full: jobs are submitted and end all the same, it is said, and nothing is lost."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import InProcess, Ugro
from tests.rig import disk
from tests.rig.disk import SmallDisk
from tests.rig.waiting import end_all_with_variable, wait_until
from ugro.kernel.store.engine import LEAST_BYTES, PIECES

SOON_S = 60
pytestmark = pytest.mark.skipif(disk.available() is not None, reason=str(disk.available()))


@pytest.fixture
def small() -> Iterator[SmallDisk]:
    top = Path(tempfile.mkdtemp(prefix="u"))
    made = SmallDisk(top / "disk", 3 * LEAST_BYTES)
    made.mount()
    yield made
    made.unmount()
    shutil.rmtree(top, ignore_errors=True)


@pytest.fixture
def ugro(small: SmallDisk, tmp_path: Path) -> Iterator[Ugro]:
    """Its state is on the small disk; its node's folder is on another."""
    home = small.folder / "home"
    for folder in ("cwd", "user"):
        (home / folder).mkdir(parents=True)
    ugro = InProcess(home)
    ugro.cluster = tmp_path / "cluster.yaml"
    ugro.cluster.write_text(f"nodes:\n  n1: {{transport: local, remote_root: {tmp_path}/n1}}\n")
    (home / "cwd" / "train.py").write_text("print('a line')\n")
    try:
        yield ugro
        assert ugro("agent", "stop").returncode == 0
        wait_until(lambda: not ugro.processes(), 20, "everything the agent started to end")
    finally:
        end_all_with_variable("UGRO_HOME", [str(home)])


def document(ugro: Ugro, *words: str) -> Any:
    return json.loads(ugro(*words, "--json").stdout)


def state(ugro: Ugro, name: str) -> str:
    return str(document(ugro, "status", name)["job"]["state"])


def until_succeeded(ugro: Ugro, *names: str) -> None:
    for name in names:
        wait_until(lambda name=name: state(ugro, name) == "succeeded", SOON_S, f"job {name} to succeed")  # type: ignore[misc]


def pieces(ugro: Ugro) -> int:
    return len(list((ugro.home / "reserve").iterdir()))


def problem(ugro: Ugro) -> str:
    return str(document(ugro, "agent", "status")["agent"]["disk_problem"])


@pytest.mark.proof
def test_jobs_are_taken_and_end_it_is_said_and_all_goes_on_when_there_is_room(ugro: Ugro, small: SmallDisk) -> None:
    assert ugro("launch", "train.py", "--name", "before").stdout == "a line\n"
    assert pieces(ugro) == PIECES
    small.fill()
    names = [f"job{number}" for number in range(5)]
    for name in names:
        done = ugro("run", "-d", "--name", name, "--", "echo", name)
        assert done.returncode == 0, done.stderr
        small.fill()  # somebody else takes what is left of what was given
    until_succeeded(ugro, *names)
    assert ugro("node", "drain", "n1", "--reason", "x" * 20_000).returncode == 0
    assert ugro("node", "resume", "n1").returncode == 0
    assert 0 < pieces(ugro) < PIECES

    said = f"the disk of {ugro.home} is full: "
    health, doctor = ugro("health"), ugro("doctor")
    assert f"warning: {said}" in health.stderr
    assert "hint:  make room there: ugro results JOB --rm" in health.stderr
    assert doctor.returncode == 1
    [line] = [line.split("\t") for line in doctor.stdout.splitlines() if said in line]
    assert line[:3] == ["failed", "this machine", "disk"]
    assert said in problem(ugro)
    wait_until(lambda: said in ugro("alerts", "ls").stdout, SOON_S, "an alert")

    # Its log is not collected, so its node keeps it, and it has not ended.
    assert ugro("launch", "-d", "--name", "waits", "train.py").returncode == 0
    wait_until(lambda: state(ugro, "waits") == "stopping", SOON_S, "its ranks to end")
    small.fill()
    assert ugro("agent", "restart").returncode == 0
    assert state(ugro, "waits") == "stopping"
    small.free()
    until_succeeded(ugro, "waits")
    assert ugro("logs", "waits").stdout == "a line\n"
    assert [ugro("logs", name).stdout for name in names] == [f"{name}\n" for name in names]
    assert said not in ugro("doctor").stdout
    assert pieces(ugro) == PIECES
    assert said not in ugro("health").stderr

"""The program that runs a replica on a node, as a process of its own: ports, probes, restarts, its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rig.service import SERVER
from tests.rig.waiting import descendants, is_alive, wait_until
from ugro.features.services.model import (
    EXHAUSTED,
    DoorPlace,
    Probe,
    Probes,
    Replica,
    Restarts,
    Revision,
    Service,
    ServiceSpec,
)
from ugro.features.services.service.replicas import STATUS_SOCKET, replica_job
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.jobs.records import NODE_PYTHON

pytestmark = [pytest.mark.proof, pytest.mark.timeout(120)]
LIMIT_S = 30
HEALTH = Probe(path="/health", interval_s=0.1, timeout_s=2.0, failures=2)
PROBES = Probes(replace(HEALTH, timeout_s=20.0), HEALTH, HEALTH)


class Running:
    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.log = log

    def report(self) -> dict[str, Any]:
        """What it says now."""
        with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as lines:
            connection.connect(str(self.run_dir / STATUS_SOCKET))
            found: dict[str, Any] = json.loads(lines.readline())
            return found

    def until(self, **wanted: Any) -> dict[str, Any]:
        last: dict[str, Any] = {}

        def look() -> bool:
            with suppress(OSError, ValueError):
                last.update(self.report())
            return all(last.get(name) == value for name, value in wanted.items())

        try:
            wait_until(look, LIMIT_S, str(wanted))
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}, {self.log.read_text()}") from error
        return last


@contextmanager
def running(
    folder: Path,
    word: str = "one",
    restarts: Restarts | None = None,
    secret: str = "",
    probes: Probes = PROBES,
) -> Iterator[Running]:
    (folder / "server.py").write_text(SERVER)
    spec = ServiceSpec("echo", probes=probes, restarts=restarts or Restarts())
    job = JobSpec("echo", ("{python}", "server.py", "{port}", word))
    door = DoorPlace("n1", sys.executable, "127.0.0.1")
    service = Service(1, os.urandom(4).hex(), "ann", spec, door, 1, 1, (Revision(1, job, ""),), secret)
    made = replica_job(service, Replica(1, 1))
    run_dir, log = folder / "run", folder / "log"
    run_dir.mkdir(exist_ok=True)
    env = {**os.environ, **dict(made.env), "UGRO_RUN_DIR": str(run_dir)}
    argv = [sys.executable if one == NODE_PYTHON else one for one in made.argv]
    with log.open("ab") as said:
        process = subprocess.Popen(argv, env=env, cwd=folder, stdout=said, stderr=said)
    try:
        yield Running(process, run_dir, log)
    finally:
        below = descendants([process.pid])
        process.kill()
        process.wait(LIMIT_S)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_it_gets_ready_and_ends_with_all_that_it_started(tmp_path: Path) -> None:
    with running(tmp_path) as replica:
        found = replica.until(state="ready")
        assert 8700 <= found["port"] < 9999
        below = descendants([replica.process.pid])
        assert found["pid"] in below
        replica.process.terminate()
        assert replica.process.wait(LIMIT_S) == 0
        assert not any(is_alive(pid) for pid in below)


def test_it_comes_back_on_the_same_port_and_on_another_if_that_was_taken(tmp_path: Path) -> None:
    with running(tmp_path) as replica:
        first = replica.until(state="ready")
        os.kill(first["pid"], signal.SIGKILL)
        again = replica.until(state="ready", restarts=1)
        assert again["port"] == first["port"]
        assert again["pid"] != first["pid"]
        with taken_after(again["pid"], again["port"]):
            moved = replica.until(state="ready", restarts=1)
            wait_until(lambda: replica.report()["port"] != again["port"], LIMIT_S, "another port")
            moved = replica.until(state="ready")
        assert moved["port"] != again["port"]
        assert moved["restarts"] == 1  # that was not its fault


@contextmanager
def taken_after(pid: int, port: int) -> Iterator[None]:
    """Kills the server, and listens where it did."""
    os.kill(pid, signal.SIGSTOP)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    os.kill(pid, signal.SIGKILL)

    def is_bound() -> bool:
        with suppress(OSError):
            listener.bind(("127.0.0.1", port))
            listener.listen(1)
            return True
        return False

    wait_until(is_bound, 5, "the port")
    try:
        yield
    finally:
        listener.close()


def test_a_program_that_ends_too_often_is_given_up_with_a_reason(tmp_path: Path) -> None:
    with running(tmp_path, "exits", Restarts(2, 60)) as replica:
        assert replica.process.wait(LIMIT_S) == EXHAUSTED
        assert replica.log.read_text().count("cannot load the model") == 3
        assert "it ended 3 times within 60 s, the last time: ended with exit code 1" in replica.log.read_text()


def test_a_program_that_says_that_another_start_is_of_no_use_gets_none(tmp_path: Path) -> None:
    with running(tmp_path, "lasting") as replica:
        assert replica.process.wait(LIMIT_S) == EXHAUSTED
        assert replica.log.read_text().count("pid") == 1


def test_a_server_that_hangs_is_started_again(tmp_path: Path) -> None:
    with running(tmp_path) as replica:
        first = replica.until(state="ready")
        os.kill(first["pid"], signal.SIGSTOP)
        again = replica.until(state="ready", restarts=1)
        assert again["pid"] != first["pid"]
        assert "not alive" in replica.log.read_text()


def test_one_that_is_not_ready_says_why_and_is_ready_again_without_a_restart(tmp_path: Path) -> None:
    probes = replace(PROBES, live=replace(HEALTH, path=None))
    with running(tmp_path, probes=probes) as replica:
        first = replica.until(state="ready")
        (tmp_path / "unready-1").touch()
        found = replica.until(state="unready")
        assert "/health answers 503" in found["reason"]
        (tmp_path / "unready-1").unlink()
        assert replica.until(state="ready")["pid"] == first["pid"]


def test_its_secret_is_in_a_file_that_only_its_user_can_read(tmp_path: Path) -> None:
    with running(tmp_path, secret="s3cret") as replica:
        found = replica.until(state="ready")
        variables = environment(found["pid"])
        file = Path(variables["UGRO_SERVICE_KEY_FILE"])
        assert file.read_text() == "s3cret"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "s3cret" not in "".join(variables.values())
        command = Path(f"/proc/{found['pid']}/cmdline").read_text()
        assert "s3cret" not in command + replica.log.read_text()
        assert (variables["UGRO_PORT"], variables["UGRO_REPLICA"]) == (str(found["port"]), "1")


def environment(pid: int) -> Mapping[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)

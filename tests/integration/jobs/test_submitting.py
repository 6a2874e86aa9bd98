"""From the command to the recorded job: Ctrl-C, a closed terminal, and what the exit code says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from tests.rig.agent import holder, is_paused, log_tail
from tests.rig.waiting import wait_until

PAUSE = "UGRO_AGENT_CRASH_POINT"
Paused = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def ugro() -> Iterator[Ugro]:
    with commands() as ugro:
        yield ugro


@pytest.fixture
def paused() -> Iterator[tuple[Ugro, Paused]]:
    """A command whose agent stops at a point of the submission."""
    with commands() as ugro:

        def submit(point: str) -> subprocess.Popen[bytes]:
            client = ugro.start("run", "--name", "mine", "true", env={PAUSE: f"{point}:pause"})
            wait_until(lambda: is_paused(holder(ugro.home)), 30, f"the agent to stop at {point}")
            return client

        yield ugro, submit


def go_on(ugro: Ugro) -> None:
    pid = holder(ugro.home)
    assert pid is not None
    os.kill(pid, signal.SIGCONT)


def jobs(ugro: Ugro) -> list[str]:
    found = json.loads(ugro("status", "--json").stdout)["jobs"]
    return [str(job["name"]) for job in found]


def until_it_says(client: subprocess.Popen[bytes], line: bytes) -> None:
    assert client.stderr is not None
    seen = b""
    while line not in seen:
        seen = client.stderr.readline()
        assert seen, f"it ended and never said {line!r}"


def test_ctrl_c_before_the_job_is_recorded_means_that_it_is_not_submitted(paused: tuple[Ugro, Paused]) -> None:
    ugro, submit = paused
    client = submit("submit.begun")
    client.send_signal(signal.SIGINT)
    until_it_says(client, b"withdrawing the job")
    go_on(ugro)
    output, errors = client.communicate(timeout=30)
    assert (client.returncode, output) == (130, b"")
    assert errors == b"error: interrupted: the job was not submitted\n"
    assert ugro("run", "--name", "later", "true").returncode == 0
    assert jobs(ugro) == ["later"]


def test_ctrl_c_after_it_is_recorded_names_the_job_that_goes_on(paused: tuple[Ugro, Paused]) -> None:
    ugro, submit = paused
    client = submit("submit.recorded")
    client.send_signal(signal.SIGINT)
    until_it_says(client, b"withdrawing the job")
    go_on(ugro)
    _, errors = client.communicate(timeout=30)
    assert client.returncode == 130
    assert b"error: interrupted after job 1 mine was submitted: it continues\n" in errors
    assert b"hint:  see: ugro logs 1 -f; stop it: ugro cancel 1\n" in errors
    assert ugro("wait", "1").returncode == 0


def test_a_second_ctrl_c_leaves_at_once_and_claims_nothing(paused: tuple[Ugro, Paused]) -> None:
    ugro, submit = paused
    client = submit("submit.begun")
    client.send_signal(signal.SIGINT)
    until_it_says(client, b"withdrawing the job")
    client.send_signal(signal.SIGINT)
    _, errors = client.communicate(timeout=30)
    assert client.returncode == 130
    assert errors.startswith(b"error: interrupted: not known whether the job was submitted\nhint:  look: ugro status")
    go_on(ugro)


def test_a_terminal_that_is_closed_before_the_job_is_recorded_submits_nothing(paused: tuple[Ugro, Paused]) -> None:
    ugro, submit = paused
    client = submit("submit.begun")
    client.send_signal(signal.SIGHUP)
    client.communicate(timeout=30)
    go_on(ugro)
    wait_until(lambda: "the client left before its answer" in log_tail(ugro.home), 30, "the agent to notice it")
    assert jobs(ugro) == []


def test_a_job_that_reaches_its_time_limit_ends_with_the_code_of_a_timeout(ugro: Ugro) -> None:
    assert ugro("run", "--name", "long", "--time-limit", "0.3s", "sleep", "1000").returncode == 124
    assert ugro("wait", "long").returncode == 124
    assert json.loads(ugro("status", "long", "--json").stdout)["job"]["exit_code"] == 124

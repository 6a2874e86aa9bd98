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


@pytest.mark.proof
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


@pytest.mark.proof
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


@pytest.mark.proof
def test_a_terminal_that_is_closed_before_the_job_is_recorded_submits_nothing(paused: tuple[Ugro, Paused]) -> None:
    ugro, submit = paused
    client = submit("submit.begun")
    client.send_signal(signal.SIGHUP)
    client.communicate(timeout=30)
    go_on(ugro)
    wait_until(lambda: "the client left before its answer" in log_tail(ugro.home), 30, "the agent to notice it")
    assert jobs(ugro) == []


@pytest.mark.proof
def test_a_job_that_reaches_its_time_limit_ends_with_the_code_of_a_timeout(ugro: Ugro) -> None:
    assert ugro("run", "--name", "long", "--time-limit", "0.3s", "sleep", "1000").returncode == 124
    assert ugro("wait", "long").returncode == 124
    assert json.loads(ugro("status", "long", "--json").stdout)["job"]["exit_code"] == 124


# --- input ----------------------------------------------------------------------------------------------------------


def in_a_shell(ugro: Ugro, script: str) -> subprocess.CompletedProcess[str]:
    path = f"{os.path.dirname(ugro.argv()[0])}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script],
        env=ugro.environment({"PATH": path}),
        cwd=ugro.home / "cwd",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_input_that_a_job_would_not_get_is_refused_before_anything_is_submitted(ugro: Ugro) -> None:
    before = jobs(ugro)
    done = in_a_shell(ugro, "echo 'print(42)' > s.py; ugro run -- python3 - < s.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: a job gets no input: stdin would be lost\nhint:  write it to a file")
    assert jobs(ugro) == before


@pytest.mark.proof
def test_the_input_of_a_loop_is_left_to_the_loop(ugro: Ugro) -> None:
    loop = "printf 'a\nb\nc\n' | while read word; do ugro run -d --name $word true; done"
    done = in_a_shell(ugro, loop)
    assert done.returncode == 0, done.stderr
    assert jobs(ugro)[:3] == ["c", "b", "a"]
    assert done.stderr.count("note: a job gets no input: what is in the pipe is not read\n") == 2
    done = in_a_shell(ugro, "printf 'd\ne\n' > names; while read word; do ugro run -d --name $word true; done < names")
    assert (done.returncode, jobs(ugro)[:2], "no input" in done.stderr) == (0, ["e", "d"], False)

"""Commands of the user's on this machine: their input and output, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.waiting import is_alive, wait_until
from ugro.features.alerts.channels import SendFailure
from ugro.kernel.support import commands as command
from ugro.kernel.support import commands as signed_post
from ugro.kernel.support.commands import Ended
from ugro.kernel.support.errors import TimedOut
from ugro.kernel.support.process import INHERITED


def run(*argv: str, folder: Path, timeout_s: float = 120, content: bytes = b"") -> Ended:
    return asyncio.run(command.run(argv, env={"WHO": "ann"}, cwd=folder, timeout_s=timeout_s, content=content))


def test_a_command_gets_its_input_and_says_how_it_ended(tmp_path: Path) -> None:
    ended = run("sh", "-c", "cat; echo $WHO; pwd; exit 3", folder=tmp_path, content=b"hello\n")
    assert (ended.code, ended.said.split()) == (3, ["hello", "ann", str(tmp_path)])
    assert ended.complaint == f"exit code 3: {tmp_path}"
    assert run("true", folder=tmp_path, content=b"x" * 10**6).complaint is None, "it need not read"


def test_a_command_gets_nothing_of_the_agents_environment_but_what_every_program_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("UGRO_SMTP_PASSWORD", "hush")
    monkeypatch.setenv("UGRO_HOME", "/state")
    monkeypatch.setenv("LANG", "C.UTF-8")
    said = run(sys.executable, "-c", "import os; print(*map('='.join, os.environ.items()), sep='\\n')", folder=tmp_path)
    found = dict(line.split("=", 1) for line in said.said.splitlines())
    assert found.keys() <= {*INHERITED, "WHO"}
    assert (found["PATH"], found["WHO"]) == (os.environ["PATH"], "ann")
    assert (found["UGRO_HOME"], found["LANG"]) == ("/state", "C.UTF-8")


def test_a_program_that_is_not_there_is_a_failure_with_a_reason(tmp_path: Path) -> None:
    assert run("/no/such/program", folder=tmp_path).complaint == (
        "exit code 127: /no/such/program: No such file or directory"
    )
    with pytest.raises(command.NotStarted, match="cannot be started"):
        run("true", folder=tmp_path / "gone")


def leaving(folder: Path, on_term: str, then: str = "") -> tuple[list[str], Path]:
    """A command that leaves a process in a session of its own; and the file with its number."""
    pid = folder / "pid"
    left = f"trap \"{on_term}\" TERM; echo $$ > {pid}.new; mv {pid}.new {pid}; while :; do sleep 0.05; done"
    return ["sh", "-c", f"setsid sh -c '{left}' & until [ -e {pid} ]; do sleep 0.01; done; {then}"], pid


def test_what_a_command_leaves_is_ended_also_if_it_has_left_the_session(tmp_path: Path) -> None:
    argv, pid = leaving(tmp_path, "")
    assert run(*argv, folder=tmp_path).code == 0
    assert not is_alive(int(pid.read_text()))


def test_what_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    argv, pid = leaving(tmp_path, "", "sleep 600")

    async def given_up() -> None:
        running = asyncio.create_task(command.run(argv, env={}, cwd=tmp_path, timeout_s=600))
        while not pid.exists():
            await asyncio.wait([running], timeout=0.01)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(given_up())
    assert not is_alive(int(pid.read_text()))
    with pytest.raises(TimedOut, match=r"sleep did not end within 0\.2 s"):
        run("sleep", "600", folder=tmp_path, timeout_s=0.2)


def test_a_guard_that_is_asked_to_end_while_it_ends_what_was_left_finishes_that(tmp_path: Path) -> None:
    argv, pid = leaving(tmp_path, f"touch {tmp_path}/asked")
    guard = [sys.executable, "-P", "-m", "ugro.kernel.support.command_guard", str(os.getpid()), "PATH", *argv]
    with subprocess.Popen(guard, stderr=subprocess.PIPE, text=True) as process:
        wait_until((tmp_path / "asked").exists, 20, "the guard to end what was left")
        process.terminate()
        assert process.stderr is not None
        said = process.stderr.read()
    assert (process.returncode, "Traceback" in said) == (0, False), said
    assert not is_alive(int(pid.read_text()))


def test_a_secret_must_be_one_and_is_not_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("short\n")
    with pytest.raises(SendFailure) as caught:
        signed_post.key_of("hook idle", str(file), None)
    assert "short" not in str(caught.value)
    monkeypatch.setitem(os.environ, "MY_SECRET", "0123456789abcdef")
    assert signed_post.key_of("hook idle", None, "MY_SECRET") == b"0123456789abcdef"
    monkeypatch.setitem(os.environb, b"MY_SECRET", b"\xff" * 16)
    assert signed_post.key_of("hook idle", None, "MY_SECRET") == b"\xff" * 16


def test_the_signature_is_the_documented_one() -> None:
    # Computed with: printf '17.{}' | openssl dgst -sha256 -hmac key
    wanted = "sha256=e66392eac42eafc68c35a01c712811e016386c12456975fc3af80c9268568e3a"
    assert signed_post.signature(b"key", "17", b"{}") == wanted

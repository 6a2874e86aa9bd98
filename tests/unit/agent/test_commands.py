"""Commands of the user's on this machine: their input and output, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.rig.waiting import is_alive, wait_until
from ugro.agent.support import command, signed_post
from ugro.agent.support.command import Ended
from ugro.core.errors import TimedOut
from ugro.telemetry.channels import SendFailure


def run(*argv: str, folder: Path, timeout_s: float = 20, content: bytes = b"") -> Ended:
    return asyncio.run(command.run(argv, env={"WHO": "ann"}, cwd=folder, timeout_s=timeout_s, content=content))


def test_a_command_gets_its_input_and_says_how_it_ended(tmp_path: Path) -> None:
    ended = run("sh", "-c", "cat; echo $WHO; pwd; exit 3", folder=tmp_path, content=b"hello\n")
    assert (ended.code, ended.said.split()) == (3, ["hello", "ann", str(tmp_path)])
    assert ended.complaint == f"exit code 3: {tmp_path}"
    assert run("true", folder=tmp_path, content=b"x" * 10**6).complaint is None, "it need not read"


def test_a_program_that_is_not_there_is_a_failure_with_a_reason(tmp_path: Path) -> None:
    assert run("/no/such/program", folder=tmp_path).complaint == (
        "exit code 127: /no/such/program: No such file or directory"
    )
    with pytest.raises(command.NotStarted, match="cannot be started"):
        run("true", folder=tmp_path / "gone")


@pytest.mark.parametrize("hangs", [True, False])
def test_what_a_command_leaves_is_ended_also_if_it_has_left_the_session(tmp_path: Path, hangs: bool) -> None:
    pids = tmp_path / "pids"
    script = f"setsid sh -c 'echo $$ >> {pids}; trap \"\" TERM; sleep 600' & sleep 0.3; {'sleep 600' if hangs else ''}"
    if hangs:
        with pytest.raises(TimedOut, match="sh did not end within 1 s"):
            run("sh", "-c", script, folder=tmp_path, timeout_s=1)
    else:
        assert run("sh", "-c", script, folder=tmp_path).code == 0
    wait_until(lambda: not is_alive(int(pids.read_text())), 10, "it to be ended")


def test_a_secret_must_be_one_and_is_not_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("short\n")
    with pytest.raises(SendFailure) as caught:
        signed_post.key_of("hook idle", str(file), None)
    assert "short" not in str(caught.value)
    monkeypatch.setitem(os.environ, "MY_SECRET", "0123456789abcdef")
    assert signed_post.key_of("hook idle", None, "MY_SECRET") == b"0123456789abcdef"


def test_the_signature_is_the_documented_one() -> None:
    # Computed with: printf '17.{}' | openssl dgst -sha256 -hmac key
    wanted = "sha256=e66392eac42eafc68c35a01c712811e016386c12456975fc3af80c9268568e3a"
    assert signed_post.signature(b"key", "17", b"{}") == wanted

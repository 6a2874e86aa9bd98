"""pip and uv on this machine: how pip is configured, and what is told of their failures."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.rig.waiting import wait_until
from ugro.agent.python_env.process import run
from ugro.agent.python_env.tools import Pip, _is_whole, _take_out, failed
from ugro.remote.python_env.failures import Mask


def test_the_indexes_of_pip_are_used_if_nodes_can_reach_them() -> None:
    settings = (
        "global.index-url='https://old/simple'\n"
        "global.extra-index-url='file:///here https://one/simple\\nhttps://two/simple'\n"
        "user.index-url='https://ann:pw@new/simple'\nglobal.cert='/x'\n"
    )
    indexes = Pip(["pip"], settings, 0.0).indexes
    assert indexes == ("https://ann:pw@new/simple", ("https://one/simple", "https://two/simple"))
    assert Pip(["pip"], "", 0.0).indexes == (None, ())
    assert Pip(["pip"], "global.index-url='file:///only/here'\n", 0.0).indexes == (None, ())


def test_a_failure_has_its_cause_and_last_lines_without_passwords() -> None:
    said = "error: No solution found when resolving dependencies\n  see https://ann:hunter2@host/simple and hunter2\n"
    error = failed("uv", 1, said, Mask(["https://ann:hunter2@host/simple"]), "its packages cannot be resolved")
    assert error.cause == "not-found"
    assert error.message.startswith("its packages cannot be resolved: ")
    assert len(error.tail) == 2
    assert not any("hunter2" in line for line in (error.message, *error.tail))


_AGENT = """
import asyncio, os, sys
from pathlib import Path
from ugro.agent.python_env.process import run
tool = ["sh", "-c", "echo $$ > pid; exec sleep 600"]
asyncio.run(run(tool, env=os.environ, cwd=Path(sys.argv[1]), timeout_s=600))
"""


def test_a_tool_ends_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-c", _AGENT, str(tmp_path)])
    file = tmp_path / "pid"
    try:
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"), 30, "the tool to start")
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    wait_until(lambda: not _runs(file.read_text().strip()), 10, "the tool to end")


def _runs(pid: str) -> bool:
    try:
        return "(zombie)" not in Path("/proc", pid, "status").read_text()
    except OSError:
        return False


def test_a_tool_that_cannot_be_started_fails_with_a_sentence(tmp_path: Path) -> None:
    ended = asyncio.run(run([str(tmp_path / "uv")], env={}, cwd=tmp_path, timeout_s=60))
    assert (ended.code, ended.err.strip()) == (1, f"{tmp_path / 'uv'}: No such file or directory")


def test_a_uv_that_was_damaged_is_not_used(tmp_path: Path) -> None:
    work, folder = tmp_path / "work", tmp_path / "kept" / "x86_64-glibc"
    work.mkdir()
    folder.parent.mkdir()
    with zipfile.ZipFile(work / "uv-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("uv-1.data/scripts/uv", b"program")
        wheel.writestr("uv-1.data/scripts/uvx", b"other")
    assert not _is_whole(folder)
    _take_out(work, folder)
    assert _is_whole(folder)
    assert [path.name for path in folder.iterdir()] == ["uv"], "it is sent to nodes as it is"
    (folder / "uv").write_bytes(b"pro")
    assert not _is_whole(folder)

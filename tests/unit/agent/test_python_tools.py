"""pip and uv on this machine: how pip is configured, and what is told of their failures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.rig.waiting import wait_until
from ugro.features.environments.model import EnvRequest, Whose
from ugro.features.environments.node.failures import Mask
from ugro.features.environments.service.tools import Pip, Tools, Workshop, _is_whole, _take_out, failed, run


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


def tools(folder: Path, settings: str) -> Tools:
    """As if pip had said this about itself."""
    made = Tools(Workshop(folder))
    made._known_pip = Pip(["pip"], settings, time.monotonic())
    return made


def test_pips_own_login_is_for_the_owner_and_its_index_for_everybody(tmp_path: Path) -> None:
    settings = "user.index-url='https://ann:pw@mirror/simple'\nuser.extra-index-url='https://token@more/simple'\n"

    async def sources() -> dict[Whose, tuple[str, ...]]:
        here = tools(tmp_path, settings)
        requests = {whose: EnvRequest(requirements=("a",), whose=whose) for whose in Whose}
        lends = {whose: await here.lends_login(request) for whose, request in requests.items()}
        # The wheels of the cluster file's packages are sent, so that a member's account gets no password.
        assert lends == {Whose.OWNER: False, Whose.CLUSTER: True, Whose.OTHER: False}
        assert not await here.lends_login(EnvRequest(index_url="https://own:pw@index/simple", whose=Whose.CLUSTER))
        return {whose: (await here.sources_of(request)).addresses for whose, request in requests.items()}

    found = asyncio.run(sources())
    assert found[Whose.OWNER] == ("https://ann:pw@mirror/simple", "https://token@more/simple")
    assert found[Whose.OTHER] == ("https://mirror/simple", "https://more/simple")


def test_uv_and_pip_get_nothing_of_the_owner_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://ann:hush@host/simple")
    monkeypatch.setenv("HTTPS_PROXY", "http://ann:pw@proxy:3128")
    settings = "global.cert='/ca.pem'\nuser.client-cert='/hush.pem'\nglobal.find-links='/home/hush'\n"

    async def variables(whose: Whose) -> dict[str, str]:
        return await tools(tmp_path, settings).variables(EnvRequest(whose=whose), {"OWN": "1"}, tmp_path)

    others = asyncio.run(variables(Whose.OTHER))
    assert not any("hush" in value for value in others.values())
    assert (others["https_proxy"], others["PIP_CERT"], others["OWN"]) == ("http://ann:pw@proxy:3128", "/ca.pem", "1")
    assert not any("pw" in value for name, value in others.items() if name.isupper()), "uv would tell an index"
    assert (others["NETRC"], others["PIP_CONFIG_FILE"]) == (os.devnull, os.devnull)
    assert list(Path(others["HOME"]).iterdir()) == []
    owners = asyncio.run(variables(Whose.OWNER))
    assert (owners["HF_TOKEN"], owners["HOME"], owners["OWN"]) == ("hush", os.environ["HOME"], "1")


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
from ugro.features.environments.service.tools import run
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

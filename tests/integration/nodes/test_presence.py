"""Who is at a machine that is reached by ssh: a login with a terminal is somebody, the agent's own is nobody."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.conftest import Farms, in_loop, link_to
from tests.rig.waiting import wait_until
from ugro.features.power.owners import Presence, parse
from ugro.kernel.links.calls import Stream
from ugro.kernel.support.errors import RemoteFailure

_LIMIT_S = 30


async def word(stream: Stream) -> Presence:
    async with asyncio.timeout(_LIMIT_S):
        async for _, payload in stream:
            return parse(payload.splitlines()[-1], "n001")
    raise AssertionError("it stopped looking")


def log_in(ssh_config: Path, name: str) -> subprocess.Popen[bytes]:
    """With a terminal, as a person does."""
    argv = ["ssh", "-F", str(ssh_config), "-tt", name, "cat"]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def terminal_of(processes: list[int]) -> str:
    for pid in processes:
        try:
            path = os.readlink(f"/proc/{pid}/fd/0")
        except OSError:
            continue
        if path.startswith("/dev/pts/"):
            return path
    return ""


@pytest.mark.proof
@in_loop
async def test_a_login_over_ssh_is_somebody_and_the_agents_own_session_is_nobody(
    farm_of: Farms, tmp_path: Path
) -> None:
    farm = farm_of(1)
    [node] = farm.nodes
    (tmp_path / "pts").mkdir()
    env = (("UGRO_PRESENCE_DEV", str(tmp_path)),)  # somebody else may type on a terminal of this machine
    async with link_to(farm, node, env=env) as link:
        stream = link.stream("presence.watch", {"when": "active", "quiet_s": 2.0})
        first = await word(stream)
        assert first == Presence(None, "", ("terminals",), ()), "a session of ssh without a terminal is no person"
        login = log_in(farm.ssh_config, node.name)
        try:
            path = await asyncio.to_thread(wait_until, lambda: terminal_of(node.processes()), _LIMIT_S, "the login")
            (tmp_path / "pts" / Path(path).name).symlink_to(path)
            seen = await word(stream)
            assert seen.sign.endswith(f" types on {path.removeprefix('/dev/')}")
            assert seen.idle_s is not None
        finally:
            assert login.stdin is not None
            login.stdin.close()
            login.kill()
            login.wait()
            stream.cancel()


@in_loop
async def test_what_cannot_be_looked_for_is_refused(farm_of: Farms) -> None:
    farm = farm_of(1)
    async with link_to(farm, farm.nodes[0]) as link:
        for params in ({"when": "asleep", "quiet_s": 1.0}, {"when": "active", "quiet_s": 0}, {"when": "active"}):
            with pytest.raises(RemoteFailure):
                await link.stream("presence.watch", params).result()

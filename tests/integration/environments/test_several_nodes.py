"""One environment on several nodes: what goes wrong on one of them stays there."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import in_loop
from tests.rig.engine import KEY, EngineRig
from tests.rig.waiting import wait_until
from ugro.features.environments.model import EnvRequest, Made
from ugro.features.environments.service.service import PythonEnvService
from ugro.kernel.links.node import Identity
from ugro.kernel.support.errors import Unreachable
from ugro.kernel.support.state_dir import StateDir


class SlowSecond(EngineRig):
    """The second node looks for its interpreters until the test lets it go on."""

    def _entry(self, name: str, root: str) -> str:
        words = f"[sh, {self._gate}, {self._cut(name)}, env, 'PATH={self.folder}/bin:/usr/bin:/bin']"
        own = f"{{transport: {words}, remote_root: {self.folder}/{root}, python: {sys.executable}}}"
        return own if name == "n2" else super()._entry(name, root)

    def make_slow(self) -> None:
        stub = self.folder / "bin" / "python3.14"
        stub.parent.mkdir()
        until = f"i=0\nwhile [ ! -e {self.folder}/go ] && [ $i -lt 150 ]; do sleep 0.1; i=$((i+1)); done"
        stub.write_text(f"#!/bin/sh\ntouch {self.folder}/asked\n{until}\nexit 1\n")
        stub.chmod(0o755)


@pytest.mark.proof
@in_loop
async def test_a_link_that_is_lost_between_two_questions_fails_its_node_alone(tmp_path: Path) -> None:
    rig = SlowSecond(tmp_path, 2)
    rig.make_slow()
    async with rig.agent() as (store, _):
        assert rig.cluster is not None
        identity = Identity(await store.agent_id(), 1, KEY)
        service = PythonEnvService(StateDir(tmp_path / "home"), store, rig.cluster, rig.code, identity)
        try:
            await service.hosts.of("n1")
            request = EnvRequest(existing=sys.prefix)
            work = asyncio.create_task(service.ensure_each(request, ["n1", "n2"]))
            await asyncio.to_thread(wait_until, (tmp_path / "asked").exists, 20, "n2 to be asked")
            rig.cut("n1")
            (tmp_path / "go").touch()
            found = await work
        finally:
            await service.close()
    assert isinstance(found["n1"], Unreachable)
    assert isinstance(found["n2"], Made)

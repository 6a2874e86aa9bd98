"""`ugro node setup`: what of an environment is in its table."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ugro.agent.ops.setup import NodeSetup
from ugro.cli.environments.setup import _row
from ugro.core.env_report import Setup
from ugro.core.errors import UgroError
from ugro.core.node import NodeSpec
from ugro.core.python_env import EnvProgress, EnvRequest, Made

NOTE = "pip was used: uv does not start on this node (permission denied)"
MADE = Made("e" * 32, "/r/bin/python", "3.11.2", 10, "", "", installer="pip", note=NOTE)


class Ready:
    """Has the environment already."""

    async def ensure_each(
        self,
        request: EnvRequest,
        nodes: Sequence[str],
        on_progress: Callable[[str, EnvProgress], None],
        *,
        upgrade: bool = False,
    ) -> Mapping[str, Made | UgroError]:
        return dict.fromkeys(nodes, MADE)


class Unknown:
    """A health check that knows no facts."""

    async def reports(self, nodes: Sequence[Any]) -> AsyncIterator[list[Any]]:
        yield [SimpleNamespace(facts=None) for _ in nodes]


def test_why_pip_was_used_is_said() -> None:
    cluster: Any = None
    health: Any = Unknown()
    node: Any = SimpleNamespace(spec=NodeSpec("n1"))

    async def work() -> Setup:
        setup = NodeSetup(cluster, health, Ready())
        told = [one async for part in setup.run([node], EnvRequest(requirements=("a",))) for one in part]
        found = told[-1]["setup"]
        assert isinstance(found, Setup)
        return found

    [row] = asyncio.run(work()).nodes
    assert row.note == NOTE
    assert _row(row)[-1].text == f"{'e' * 12}; {NOTE}"

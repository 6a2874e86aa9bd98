"""Which Python on a node measures devices: one that has PyTorch."""

from __future__ import annotations

import asyncio

from ugro.agent.tracking import node_checks
from ugro.core.errors import UgroError
from ugro.nodes.link import Link
from ugro.nodes.python_envs import PythonEnvs
from ugro.remote.messages import Packages

_ASK_S = 5.0


async def find(link: Link, environments: PythonEnvs) -> str | None:
    """The path of its Python: of the environment that was used last and has it. None: the one that runs the ranks.

    That one comes first if it has PyTorch, and also if none has it: its error says what is missing.
    """
    own = await node_checks.packages(link, timeout_s=_ASK_S)
    if isinstance(own, Packages) and own.torch is not None:
        return None
    try:
        async with asyncio.timeout(_ASK_S):
            for one in await environments.list():
                if any(name.lower() == "torch" for name, _ in one.made.packages):
                    made = await environments.ready(one.made.name)  # marks it as used: nobody removes it now
                    return made.python if made is not None else None
    except (UgroError, TimeoutError):
        return None
    return None

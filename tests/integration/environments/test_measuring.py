"""Devices are measured with a Python that has PyTorch: the node's own, or that of an environment on it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import in_loop
from tests.rig.python_envs import python_envs, recipe
from tests.rig.wheels import wheel
from ugro.features.environments.model import EnvProgress
from ugro.features.hardware import service as torch_python

PLAIN = os.path.join(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}")


def nothing(progress: EnvProgress) -> None:
    pass


@pytest.mark.proof
@in_loop
async def test_the_environment_that_has_pytorch_is_used_where_the_nodes_own_python_lacks_it(
    root: Path, uv: Path, tmp_path: Path
) -> None:
    async with python_envs(root, python=PLAIN) as envs:
        link = await envs.node.ready(20)
        assert await torch_python.find(link, envs) is None, "nobody has it: its own Python says what is missing"
        await envs.make(recipe(root, uv, [wheel(tmp_path, "tiny", "1.0")], name="e1"), nothing)
        assert await torch_python.find(link, envs) is None
        made = await envs.make(recipe(root, uv, [wheel(tmp_path, "torch", "2.0")], name="e2"), nothing)
        assert await torch_python.find(link, envs) == made.python
    async with python_envs(root) as envs:
        assert await torch_python.find(await envs.node.ready(20), envs) is None, "its own Python has it, too"

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig import python_envs
from tests.rig.wheels import Wheel, wheel


@pytest.fixture(scope="session")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_envs.uv_binary(tmp_path_factory)


@pytest.fixture(scope="session")
def uv_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent's folder with its own uv in it, fetched as an agent does it: the version and hash of its table."""
    return python_envs.fetched_uv(tmp_path_factory)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Wheel, Wheel]:
    """Two packages; the first needs the second, and has a command."""
    folder = tmp_path_factory.mktemp("wheels")
    commands = {"tiny-say": "tiny:main"}
    return wheel(folder, "tiny", "1.2", requires=["small-thing>=1"], commands=commands), wheel(folder, "small-thing")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of a node."""
    return tmp_path / "root"

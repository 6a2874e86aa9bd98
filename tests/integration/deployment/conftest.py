"""What the tests of containers share: podman, and the agent's image."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig import podman as rig
from tests.rig.podman import BASE, Offline, Podman


@pytest.fixture(scope="session")
def podman() -> Iterator[Podman]:
    one = Podman(Path(tempfile.mkdtemp(prefix="c")))
    try:
        try:
            one.take("base")
        except Offline as error:
            pytest.skip(f"Debian's packages cannot be reached: {error}"[:500])
        try:
            one("run", "--rm", *rig.RUN, BASE, "true")
        except (AssertionError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"podman runs no container here: {error}"[:500])
        yield one
    finally:
        one.close()


@pytest.fixture(scope="session")
def image(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> str:
    try:
        return podman.build_agent(tmp_path_factory.mktemp("context"))
    except Offline as error:
        pytest.skip(f"the wheels cannot be reached: {error}"[:500])

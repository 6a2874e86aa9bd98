"""A laptop and a master, shared by the tests of a file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.machines import Machines, machines


@pytest.fixture(scope="module")
def pair() -> Iterator[Machines]:
    directory = Path(tempfile.mkdtemp(prefix="m"))
    try:
        with machines(directory) as found:
            yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)

"""What proofs share: an environment without the user's own UGRO, which agents that commands start would inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.rig.engines import engine  # noqa: F401  # a fixture


@pytest.fixture(scope="session", autouse=True)
def no_ugro_of_the_user() -> Iterator[None]:
    kept = {key: value for key, value in os.environ.items() if key.startswith(("UGRO_", "SSH_"))}
    for key in kept:
        del os.environ[key]
    yield
    os.environ.update(kept)

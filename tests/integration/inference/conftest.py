"""Tiny models, each made once, and servers of them that the tests of a file share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.rig import models
from tests.rig.inference import InferenceServer, inference_server

Serve = Callable[..., InferenceServer]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with ExitStack() as stack:
        cwd = tmp_path_factory.mktemp("server")

        def start(model: Path, *options: str, **env: str) -> InferenceServer:
            words = ("--model", str(model), *options)
            server = stack.enter_context(inference_server(*words, cwd=cwd, env={"HF_HUB_OFFLINE": "1", **env}))
            server.wait_ready()
            return server

        yield start

"""The server of the agent's API. A module of its own, because its imports are slow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from ugro.agent.agent import Agent
from ugro.agent.api.app import create_app

_GOODBYE_S = 2


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn's own handler raises the signal again after serving, which would end the agent too early.
        yield


def make_server(agent: Agent) -> tuple[Server, FastAPI]:
    api = create_app(agent)
    return Server(uvicorn.Config(api, log_config=None, lifespan="off", timeout_graceful_shutdown=_GOODBYE_S)), api

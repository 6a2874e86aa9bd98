"""The server of the agent's API. A module of its own, because its imports are slow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from ugro.agent.agent import Agent
from ugro.agent.api.app import create_app
from ugro.agent.api.audit_rules import TUNNEL_PATH
from ugro.agent.api.audit_trail import AuditTrail, LocalProtocol
from ugro.agent.api.body_limit import BodyLimit
from ugro.agent.api.gate import SocketCallers, who
from ugro.agent.api.remote import UPLOAD_PATH, RemoteClients

_GOODBYE_S = 2
_LARGEST_BODY = 64 << 20  # on the owner's socket; ten thousand jobs at once take a few MiB
_LARGEST_BODY_OF_MEMBERS = 4 << 20  # as objects, it takes twenty times as much
STREAMS = (TUNNEL_PATH, UPLOAD_PATH)  # their bodies are passed on piece by piece, as long as that takes


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn's own handler raises the signal again after serving, which would end the agent too early.
        yield


def make_server(agent: Agent) -> tuple[Server, FastAPI]:
    api = create_app(agent)
    return socket_server(agent, api), api


def socket_server(agent: Agent, api: FastAPI, *, is_of_team: bool = False) -> Server:
    """``is_of_team``: for the socket that members of the team open, through a door, instead of the owner's."""
    hint = "submit fewer jobs at once, and put data into files"
    remote = RemoteClients(api, agent.code.offers)
    most_bytes = _LARGEST_BODY_OF_MEMBERS if is_of_team else _LARGEST_BODY
    bounded = BodyLimit(remote, most_bytes=most_bytes, hint=hint, streams=STREAMS)
    recorded = AuditTrail(bounded, agent.audit, who)
    known = SocketCallers(recorded, agent.team, is_of_team=is_of_team)
    return Server(
        uvicorn.Config(
            known,
            http=LocalProtocol,
            ws="none",
            proxy_headers=False,
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=_GOODBYE_S,
            reset_contextvars=True,  # a request must not inherit the caller of the one before it on its connection
        )
    )

"""Starts the agent and its dashboard in this process: ``python -m ugro.agent``. Clients start it by themselves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ugro.agent.main import main

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ugro.agent.agent import Agent
    from ugro.agent.serve import ServeFront


async def _serve_dashboard(agent: Agent, api: FastAPI) -> None:
    # When the agent serves already, and beside that: whoever waits for it must not wait for pages.
    serve_web = await asyncio.to_thread(_load)
    await serve_web(agent, api)


def _load() -> ServeFront:
    from ugro.web.serve import serve_web

    return serve_web


main(_serve_dashboard)

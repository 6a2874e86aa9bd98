"""Starts the agent and its dashboard in this process: ``python -m ugro.kernel.agent``.

Clients start it automatically.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ugro.kernel.agent.main import main
from ugro.kernel.support.errors import NotAllowed

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ugro.kernel.agent.agent import Agent
    from ugro.kernel.agent.serve import ServeFront

log = logging.getLogger(__name__)


async def _serve_dashboard(agent: Agent, api: FastAPI) -> None:
    # Loaded after the agent serves its API, so that the command that started it does not wait for this.
    try:
        serve_web = await asyncio.to_thread(_load)
    except ImportError as error:  # jobs run without the dashboard
        log.error("no dashboard: %s", error)
        hint = "install UGRO with what it needs: pip"
        agent.dashboard.closed(NotAllowed(f"there is no dashboard: {error}", hint=hint))
        return
    await serve_web(agent, api)


def _load() -> ServeFront:
    from ugro.web.dashboard import serve_web

    return serve_web


main(_serve_dashboard)

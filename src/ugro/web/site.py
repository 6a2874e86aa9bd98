"""What all pages share: templates, their filters, and the context of the base template."""

from __future__ import annotations

import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

import jinja2
from fastapi import Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

import ugro
from ugro.agent.agent import Agent
from ugro.agent.support.caller import caller
from ugro.config.yamltext import escaped
from ugro.core.errors import Damaged, UgroError
from ugro.policy.nodes import health
from ugro.web import formatting
from ugro.web.access import SESSION, may_launch

_HERE = Path(__file__).parent
STATIC = _HERE / "static"
THEMES = ("light", "dark")
THEME_COOKIE = "ugro_theme"


class Site:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        self._templates.filters |= {
            "age": formatting.age,
            "bytes": formatting.size,
            "codes": formatting.codes,
            "escaped": escaped,
            "duration": formatting.duration,
            "energy": formatting.energy,
            "cost": formatting.cost,
            "iso": formatting.iso,
            "number": formatting.number,
            "pattern": formatting.pattern,
            "percent": formatting.percent,
            "speed": formatting.speed,
        }
        # Available in all templates without an import. Macros are loaded last because they use the others.
        self._templates.globals |= {"NEARLY_FULL": health.NEARLY_FULL, "FULL": health.FULL}
        self._templates.globals |= {"ui": self._templates.get_template("macros.html").module, "user": ""}

    async def render(self, request: Request, template: str, *, status: int = 200, **context: Any) -> Response:
        """``cli`` in the context is the equivalent command."""
        theme = request.cookies.get(THEME_COOKIE)
        base = {
            "request": request,
            "path": request.url.path,
            "theme": theme if theme in THEMES else None,
            "cursor": await self._cursor(),
            "agent": self.agent.status(),
            "may_launch": may_launch(self.agent.cluster.config.dashboard),
            "now": time.time(),
            "version": ugro.__version__,
            "cli": None,
            "user": own_user(self.agent),
        }
        page = self._templates.get_template(template).render(base | context)
        return HTMLResponse(page, status)

    async def _cursor(self) -> int:
        if self.agent.store.away is not None:
            return 0
        try:
            return await self.agent.store.ends.newest()
        except Damaged:  # the page says so, and needs no events
            return 0

    async def error(self, request: Request, error: UgroError, status: int) -> Response:
        title = HTTPStatus(status).phrase.lower()
        if request.scope.get(SESSION) is None:
            return PlainTextResponse(f"{title}\n", status)  # not for strangers: what happened, and to which cluster
        return await self.render(request, "error.html", status=status, title=title, error=error)

    def sign_in(self, once: str = "", to: str = "/") -> Response:
        """For strangers: how to sign in, or the button if a link's word is given. It shows nothing of the cluster."""
        page = self._templates.get_template("login.html").render(once=once, to=to)
        return HTMLResponse(page, 200 if once else 401)


def own_user(agent: Agent) -> str:
    """Who is signed in."""
    asks = caller()
    return agent.team.owner if asks is None else asks.user

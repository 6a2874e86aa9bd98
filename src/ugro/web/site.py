"""What every page has in common: its templates, what they can say, and the frame around it."""

from __future__ import annotations

import getpass
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

import jinja2
from fastapi import Request, Response
from fastapi.responses import HTMLResponse

import ugro
from ugro.agent.agent import Agent
from ugro.core.errors import UgroError
from ugro.policy.nodes import health
from ugro.web import words

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
            "age": words.age,
            "bytes": words.size,
            "codes": words.codes,
            "duration": words.duration,
            "iso": words.iso,
            "number": words.number,
            "percent": words.percent,
        }
        # For all templates and without an import; what macros need comes before them.
        self._templates.globals |= {"NEARLY_FULL": health.NEARLY_FULL, "FULL": health.FULL}
        self._templates.globals |= {"ui": self._templates.get_template("macros.html").module, "user": _user()}

    async def render(self, request: Request, template: str, *, status: int = 200, **context: Any) -> Response:
        """``cli`` in the context is the page's command line equivalent; ``request`` is what was asked."""
        theme = request.cookies.get(THEME_COOKIE)
        frame = {
            "request": request,
            "path": request.url.path,
            "theme": theme if theme in THEMES else None,
            "cursor": await self.agent.store.ends.newest(),
            "agent": self.agent.status(),
            "now": time.time(),
            "version": ugro.__version__,
            "cli": None,
        }
        page = self._templates.get_template(template).render(frame | context)
        return HTMLResponse(page, status)

    async def error(self, request: Request, error: UgroError, status: int) -> Response:
        title = HTTPStatus(status).phrase.lower()
        return await self.render(request, "error.html", status=status, title=title, error=error)

    def stranger(self) -> Response:
        """For whoever has no cookie: no word of the cluster."""
        page = self._templates.get_template("login.html").render(theme=None, version=ugro.__version__)
        return HTMLResponse(page, 401)

    def welcome(self, to: str) -> Response:
        """A page and not a redirect: along one that began elsewhere, browsers hold a strict cookie back."""
        return HTMLResponse(self._templates.get_template("welcome.html").render(to=to))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"

"""What all pages share: templates, their filters, and the context of the base template."""

from __future__ import annotations

import glob
import shlex
import time
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import jinja2
from fastapi import Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from markupsafe import Markup, escape

import ugro
from ugro.features.health import rules_score as health
from ugro.kernel.access.caller import caller
from ugro.kernel.agent.agent import Agent
from ugro.kernel.config.kinds import escaped
from ugro.kernel.feature import Entry, installed
from ugro.kernel.support import moments as clock
from ugro.kernel.support.errors import Damaged, UgroError
from ugro.kernel.support.moments import Instant, shown_s, unix_seconds
from ugro.kernel.support.quantities import format_cost, format_duration, format_energy, format_size
from ugro.web.access import SESSION, may_launch

# --- formatting -------------------------------------------------------------------------------------------------------
# Template filters: numbers, sizes, durations and times as text.


UNKNOWN = "–"
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
When = str | float | Instant | None


def seconds(when: When) -> float | None:
    """Unix seconds of a time from the API, which is RFC 3339 or already in seconds; or of an instant."""
    if when is None or when == "":
        return None
    if isinstance(when, Instant):
        return shown_s(when, clock.now())
    return unix_seconds(when) if isinstance(when, str) else float(when)


def age(when: When, now: float | None = None) -> str:
    """``3 min ago``, or ``in 3 min`` for the future. The same as in static/ages.js."""
    at = seconds(when)
    if at is None:
        return UNKNOWN
    passed = (time.time() if now is None else now) - at
    if abs(passed) < 1:
        return "now"
    length = _length(abs(passed))
    return f"{length} ago" if passed > 0 else f"in {length}"


def _length(seconds: float) -> str:
    unit, length = next((unit, length) for unit, length in _UNITS if seconds >= length or length == 1)
    return f"{int(seconds // length)} {unit}"


def iso(when: When) -> str:
    at = seconds(when)
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def size(count: float | None) -> str:
    return UNKNOWN if count is None else format_size(count)


def duration(length: float | None) -> str:
    return UNKNOWN if length is None else format_duration(length)


def energy(joules: float | None) -> str:
    return UNKNOWN if joules is None else format_energy(joules)


def cost(amount: float | None, currency: str | None = None) -> str:
    return UNKNOWN if amount is None else format_cost(amount, currency or "")


def percent(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{100 * ratio:.0f} %"


def codes(text: str) -> Markup:
    """Text with the parts in backticks as code."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part) for index, part in enumerate(parts)
    )


def pattern(name: str) -> str:
    """For a command that takes patterns: one that matches this name only, quoted for a shell."""
    return shlex.quote(glob.escape(name))


def number(value: float | None) -> str:
    """With at most four significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# --- site -------------------------------------------------------------------------------------------------------------


_HERE = Path(__file__).parent
_FIRST = (Entry("/", "Cluster", "c"), Entry("/jobs", "Jobs", "j"))
_LAST = Entry("/settings", "Settings", "s")
STATIC = _HERE / "static"
THEMES = ("light", "dark")
THEME_COOKIE = "ugro_theme"


class Site:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(
                [_HERE / "templates", *(f"{feature.folder}/templates" for feature in installed() if feature.pages)]
            ),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        self._templates.filters |= {
            "age": age,
            "bytes": size,
            "codes": codes,
            "escaped": escaped,
            "duration": duration,
            "energy": energy,
            "cost": cost,
            "iso": iso,
            "number": number,
            "pattern": pattern,
            "percent": percent,
            "speed": speed,
        }
        # Available in all templates without an import. Macros are loaded last because they use the others.
        entries = [one for feature in installed() for one in feature.menu]
        self._templates.globals |= {"menu": (*_FIRST, *entries, _LAST)}
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

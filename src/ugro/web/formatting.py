"""Template filters: numbers, sizes, durations and times as text."""

from __future__ import annotations

import glob
import shlex
import time
from datetime import UTC, datetime

from markupsafe import Markup, escape

from ugro.core.support import clock
from ugro.core.support.moment import Instant, shown_s, unix_seconds
from ugro.core.support.quantity import format_cost, format_duration, format_energy, format_size

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

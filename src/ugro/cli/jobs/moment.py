"""A time in the past, given as a duration (10m ago) or as a date and time."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import click

from ugro.core.support.quantity import parse_duration


class Moment(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in some releases
    """Seconds since the epoch. A time without a zone is local time."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return max(0.0, time.time() - parse_duration(value))
        except ValueError:
            pass
        try:
            return max(0.0, datetime.fromisoformat(value).timestamp())
        except (ValueError, OverflowError, OSError):
            self.fail(f"expected how long ago, such as 10m, or a time such as 2030-01-31T08:00, got {value!r}", param)


MOMENT = Moment()
SINCE = "Show only what is newer than this: 10m (ago), or a time such as 2030-01-31T08:00."

"""The parameters of a sweep's trial, for scripts that have no command line of their own."""

from __future__ import annotations

import json
import os
from typing import Any

from ugro.core.errors import UsageError

VARIABLE = "UGRO_PARAMS"


def params(**defaults: Any) -> dict[str, Any]:
    """What this trial is to use, over ``defaults``; outside a sweep, the defaults. Nested as in the sweep's file."""
    text = os.environ.get(VARIABLE)
    if not text:
        return dict(defaults)
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise UsageError(f"{VARIABLE} is not a JSON object: {text!r:.60}", hint="ugro sweep sets it; leave it alone")
    return {**defaults, **given}

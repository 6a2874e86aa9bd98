"""``client.usage``: what users and groups have used, against their quotas."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from ugro.kernel.jobs.records import UsageReport
from ugro.kernel.support.codec import decode

WEEK_S = 7 * 86400.0


class UsageCalls:
    """Created by ``Client``."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def report(self, *, since_unix_s: float | None = None, user: str | None = None) -> UsageReport:
        """Of the last 7 days, unless another time is given; of whole hours."""
        since = time.time() - WEEK_S if since_unix_s is None else since_unix_s
        query = urlencode({"since": max(0.0, since), **({"user": user} if user is not None else {})})
        return decode(UsageReport, self._ask("GET", f"/v1/usage?{query}")["usage"])

"""The dashboard's address, for callers that ask before or after it has opened. The dashboard itself is ``ugro.web``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ugro.core.agent import DashboardLink
from ugro.core.errors import NotAllowed, UgroError

_OPEN_S = 20.0


class DashboardAddress:
    def __init__(self) -> None:
        self._is_settled = asyncio.Event()
        self._make: Callable[[], DashboardLink] | None = None
        self._problem: UgroError | None = None

    def opened(self, make: Callable[[], DashboardLink]) -> None:
        self._make, self._problem = make, None
        self._is_settled.set()

    def closed(self, problem: UgroError) -> None:
        self._make, self._problem = None, problem
        self._is_settled.set()

    async def link(self) -> DashboardLink:
        try:
            await asyncio.wait_for(self._is_settled.wait(), _OPEN_S)
        except TimeoutError:
            raise NotAllowed("the dashboard has not opened", hint="see: ugro agent logs") from None
        if self._make is None:
            raise self._problem or NotAllowed("the dashboard is closed")
        return self._make()

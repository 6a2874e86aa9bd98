"""Where the agent can be reached besides its own socket: the dashboard, which callers may ask for before it has opened,
the HTTPS API and the team's socket. What serves them is elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ugro.core.agent import DashboardLink
from ugro.core.errors import NotAllowed, UgroError

_OPEN_S = 20.0


class DashboardAddress:
    def __init__(self) -> None:
        self._is_settled = asyncio.Event()
        self._make: Callable[[str], DashboardLink] | None = None  # for a user
        self._problem: UgroError | None = None

    def opened(self, make: Callable[[str], DashboardLink]) -> None:
        self._make, self._problem = make, None
        self._is_settled.set()

    def closed(self, problem: UgroError) -> None:
        self._make, self._problem = None, problem
        self._is_settled.set()

    async def link(self, user: str) -> DashboardLink:
        """That signs a browser in as this user."""
        try:
            await asyncio.wait_for(self._is_settled.wait(), _OPEN_S)
        except TimeoutError:
            raise NotAllowed("the dashboard has not opened", hint="see: ugro agent logs") from None
        if self._make is None:
            raise self._problem or NotAllowed("the dashboard is closed")
        return self._make(user)


class OpenAddress:
    """An address that is open, or why it is not; neither, if nobody asked for it."""

    def __init__(self) -> None:
        self.url: str | None = None
        self.problem: UgroError | None = None

    def opened(self, url: str) -> None:
        self.url, self.problem = url, None

    def closed(self, problem: UgroError | None) -> None:
        self.url, self.problem = None, problem

    @property
    def complaint(self) -> str | None:
        if self.problem is None:
            return None
        return f"{self.problem.message}; {self.problem.hint}" if self.problem.hint else self.problem.message

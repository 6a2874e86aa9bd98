"""The points of one file of the spool on their way to a server. What it took is not sent again while others wait.

A server refuses a whole request for one point that it does not like, or because it is too large. Such a request is sent
again in two halves, so that the others get through; how often is bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ugro.telemetry.channels import SendFailure
from ugro.telemetry.export.destination import Destination
from ugro.telemetry.export.encoding import Sample

_AT_ONCE = 5000  # points of one request
_MOST_SPLITS = 256  # of one file, and each is two requests more; one bad point among 5000 takes 12 or 13
_OF_THE_CONTENT = (400, 413, 422)  # answers that a part of the same points may not get


class Outcome(NamedTuple):
    """How many points of a request were taken, and how many nobody will take."""

    sent: int = 0
    dropped: int = 0
    why_dropped: str = ""


class Delivery:
    def __init__(self, samples: Sequence[Sample]) -> None:
        # Halves go to the end: when there are no more splits, all that is left is in pieces of about one size.
        self._pieces = deque(samples[begin : begin + _AT_ONCE] for begin in range(0, len(samples), _AT_ONCE))
        self._splits = _MOST_SPLITS

    @property
    def is_done(self) -> bool:
        return not self._pieces

    async def send_some(self, destination: Destination, cluster: str) -> Outcome:
        """One request. Raises SendFailure if the server takes nothing now: nothing has changed then."""
        piece = self._pieces[0]
        try:
            rejected = min(len(piece), await asyncio.to_thread(destination.send, piece, cluster))
            outcome = Outcome(len(piece) - rejected, rejected, "the server rejected them")
        except SendFailure as failure:
            if failure.status is None or not destination.will_never_take(failure.status):
                raise
            outcome = self._refused(piece, failure)
        self._pieces.popleft()
        return outcome

    def _refused(self, piece: Sequence[Sample], failure: SendFailure) -> Outcome:
        if len(piece) == 1 or failure.status not in _OF_THE_CONTENT or not self._splits:
            return Outcome(0, len(piece), f"it was refused: {failure}")
        self._splits -= 1
        middle = len(piece) // 2
        self._pieces += (piece[:middle], piece[middle:])
        return Outcome()

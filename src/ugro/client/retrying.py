"""Asks again when the agent has ended meanwhile: another one is started, and answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ugro.client.http import AgentGone

_LEAST_PAUSE_S = 0.05
_TRIES = 8  # without any answer


def trying_again() -> Iterator[Callable[[], None]]:
    """Tries with growing pauses. The caller calls the yielded function after each success, which resets the count."""
    tries = 0

    def went_well() -> None:
        nonlocal tries
        tries = 0

    while tries < _TRIES:
        yield went_well
        tries += 1
        time.sleep(_LEAST_PAUSE_S * 2**tries)
    raise AgentGone("the agent keeps ending", hint="see: ugro agent logs")

"""``client.power``: puts nodes to sleep, and wakes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ugro.client.http import path_of


class PowerCalls:
    """Created by ``Client``."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def sleep(self, node: str) -> None:
        """Returns when that is decided. Raises NotAllowed if somebody would miss the node."""
        self._ask("POST", f"{path_of('nodes', node)}/sleep")

    def wake(self, node: str) -> None:
        """Returns when that is decided; ``client.iter_health`` says when it is awake."""
        self._ask("POST", f"{path_of('nodes', node)}/wake")

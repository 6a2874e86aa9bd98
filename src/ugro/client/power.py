"""``client.power``: puts nodes to sleep, and wakes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote


class PowerCalls:
    """Created by ``Client``."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def sleep(self, node: str) -> None:
        """Returns when that is decided. Raises NotAllowed if somebody would miss the node."""
        self._ask("POST", f"/v1/nodes/{quote(node, safe='')}/sleep")

    def wake(self, node: str) -> None:
        """Returns when that is decided; ``client.iter_health`` says when it is awake."""
        self._ask("POST", f"/v1/nodes/{quote(node, safe='')}/wake")

"""``client.hooks``: what is called when something happens, and the deliveries of those calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from ugro.client.http import path_of
from ugro.features.hooks.model import Delivery, HookReport
from ugro.kernel.support.codec import decode

_TEST_S = 120.0


class HookCalls:
    """Created by ``Client``."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def all(self) -> list[HookReport]:
        return [decode(HookReport, one) for one in self._ask("GET", "/v1/hooks")["hooks"]]

    def deliveries(self, limit: int = 20, hook: str | None = None) -> list[Delivery]:
        """The newest first."""
        query = urlencode({"limit": limit, **({"hook": hook} if hook is not None else {})})
        return [decode(Delivery, one) for one in self._ask("GET", f"/v1/hooks/deliveries?{query}")["deliveries"]]

    def test(self, hook: str) -> str:
        """Calls it once, with a sample. Returns the delivery's id."""
        return str(self._ask("POST", f"{path_of('hooks', hook)}/test", timeout_s=_TEST_S)["id"])

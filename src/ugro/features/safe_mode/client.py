"""``client.safe_mode``: the part of the Python API for an agent whose state is older than what its nodes run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ugro.features.safe_mode.model import Reconciliation
from ugro.kernel.support.codec import decode


class SafeModeCalls:
    """Created by ``Client``."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def plan(self) -> Reconciliation:
        """What each decision would do. Changes nothing."""
        return decode(Reconciliation, self._ask("GET", "/v1/agent/reconcile"))

    def adopt(self, *, skip_unreachable: bool = False) -> Reconciliation:
        """Records what the nodes run, and leaves safe mode."""
        return self._decide("adopt", skip_unreachable)

    def forget(self, *, skip_unreachable: bool = False) -> Reconciliation:
        """Ends what the state does not know, and leaves safe mode."""
        return self._decide("forget", skip_unreachable)

    def _decide(self, how: str, skip_unreachable: bool) -> Reconciliation:
        body = {"how": how, "skip_unreachable": skip_unreachable}
        return decode(Reconciliation, self._ask("POST", "/v1/agent/reconcile", body))

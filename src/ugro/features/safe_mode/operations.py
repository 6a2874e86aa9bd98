"""What can be asked of an agent whose state is older than what its nodes run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ugro.features.safe_mode.model import Reconciliation
from ugro.kernel.access.model import Role
from ugro.kernel.operations.request import Request


@dataclass(frozen=True, slots=True)
class PreviewReconciliation(Request[Reconciliation], route="GET /v1/agent/reconcile", role=Role.OPERATOR):
    """Says what each decision would do. Changes nothing."""


@dataclass(frozen=True, slots=True)
class ReconcileAgent(
    Request[Reconciliation], route="POST /v1/agent/reconcile", role=Role.ADMIN, audit="reconcile {how}"
):
    """Records what the nodes run, or ends what the state does not know; and leaves safe mode."""

    how: Literal["adopt", "forget"]
    skip_unreachable: bool = False

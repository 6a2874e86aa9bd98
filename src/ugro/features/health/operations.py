"""What can be asked of the doctor."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.kernel.access.model import Role
from ugro.kernel.agent.model import Finding
from ugro.kernel.operations.request import Lines, Request


@dataclass(frozen=True, slots=True)
class Diagnose(Request[Lines[Finding]], route="GET /v1/doctor", role=Role.USER, without_store=True):
    """Finds problems on nodes and between them, with remedies."""

    node: tuple[str, ...] = ()  # none: all

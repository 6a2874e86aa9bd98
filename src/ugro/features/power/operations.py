"""What can be asked about the power of nodes."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.kernel.access.model import Role
from ugro.kernel.operations.request import Request


@dataclass(frozen=True, slots=True)
class SuspendNode(
    Request[None], route="POST /v1/nodes/{name:path}/sleep", role=Role.OPERATOR, audit="suspend node {name}"
):
    """Puts a node to sleep, unless somebody would miss it. Answers when that is decided."""

    name: str


@dataclass(frozen=True, slots=True)
class WakeNode(Request[None], route="POST /v1/nodes/{name:path}/wake", role=Role.OPERATOR, audit="wake node {name}"):
    """Wakes a node. Answers when that is decided; its health says when it is awake."""

    name: str

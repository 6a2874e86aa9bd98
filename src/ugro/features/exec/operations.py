"""What can be asked about commands on nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ugro.kernel.access.model import Role
from ugro.kernel.operations.request import Between, Raw, Request

FRAMES = "application/vnd.ugro.frames"  # of ``node/wire.py``


@dataclass(frozen=True, slots=True)
class RunCommand(
    Request[Raw],
    route="POST /v1/exec",
    role=Role.OPERATOR,  # it runs on nodes as their account, without a job that others see
    audit="exec {nodes} {argv}",
    without_store=True,
    media=FRAMES,
):
    """Runs a command on nodes. It ends with the client that started it."""

    key: str
    nodes: tuple[str, ...]
    argv: Annotated[tuple[str, ...], Between(1)]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    grace_s: Annotated[float, Between(0, 600)] = 5.0


@dataclass(frozen=True, slots=True)
class EndCommand(Request[None], route="DELETE /v1/exec/{key}", role=Role.OPERATOR, audit="cancel exec"):
    """Ends a command on all its nodes; its answer says how it ended on each."""

    key: str

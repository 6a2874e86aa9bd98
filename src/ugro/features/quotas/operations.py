"""What can be asked about what users and groups have used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ugro.kernel.access.model import Role
from ugro.kernel.jobs.records import UsageReport
from ugro.kernel.operations.request import Between, Request

_LATEST_S = 4e9  # a time of this century


@dataclass(frozen=True, slots=True)
class Usage:
    usage: UsageReport


@dataclass(frozen=True, slots=True)
class GetUsage(Request[Usage], route="GET /v1/usage", role=Role.VIEWER):
    """Says what users and groups used since a time, of whole hours, and how much of their quotas."""

    since: Annotated[float, Between(0, _LATEST_S)] = 0  # seconds since the epoch
    user: Annotated[str, Between(most=255)] | None = None  # this user alone, and the user's groups

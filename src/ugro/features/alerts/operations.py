"""What can be asked about alerts, and about the channels that tell of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ugro.features.alerts.model import Alert, Tried
from ugro.kernel.access.model import Role
from ugro.kernel.agent.model import Event
from ugro.kernel.operations.request import Between, Request


@dataclass(frozen=True, slots=True)
class AlertList:
    alerts: tuple[Alert, ...]  # the active ones
    events: tuple[Event, ...]  # the history of alerts, the newest first


@dataclass(frozen=True, slots=True)
class ListAlerts(Request[AlertList], route="GET /v1/alerts", role=Role.VIEWER):
    """Lists the active alerts, and what became of earlier ones."""

    limit: Annotated[int, Between(0, 10_000)] = 100  # of events


@dataclass(frozen=True, slots=True)
class TriedChannels:
    channels: tuple[Tried, ...]


@dataclass(frozen=True, slots=True)
class TestChannels(
    Request[TriedChannels],
    route="POST /v1/alerts/test",
    role=Role.OPERATOR,
    audit="test channels {channels}",
    in_browser=True,
):
    """Sends a test message to channels; by default to all of the cluster file, and the log."""

    __test__ = False  # not a pytest class

    channels: Annotated[tuple[Annotated[str, Between(most=64)], ...], Between(most=100)] = ()

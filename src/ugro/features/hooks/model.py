"""Hooks: addresses and commands that are called when something happens, and the deliveries of those calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class HookName(StrEnum):
    QUEUE = "queue_longer_than"
    IDLE = "idle"
    NODE_LOST = "node_lost"
    JOB_ENDED = "job_ended"


class DeliveryState(StrEnum):
    WAITING = "waiting"
    DELIVERED = "delivered"
    FAILED = "failed"  # refused, or given up


@dataclass(frozen=True, slots=True)
class Delivery:
    """One call of a hook. It keeps its id and its content, however often it is tried."""

    seq: int
    id: str
    hook: HookName
    body: str  # JSON
    created_at: str  # RFC 3339
    state: DeliveryState = DeliveryState.WAITING
    tries: int = 0
    error: str = ""  # of the last try
    is_test: bool = False


@dataclass(frozen=True, slots=True)
class HookReport:
    """A hook as ``ugro hooks ls`` shows it."""

    name: HookName
    call: str  # without what may be secret
    when: str
    waiting: int = 0  # deliveries
    last_at: str | None = None
    last: DeliveryState | None = None
    error: str = ""

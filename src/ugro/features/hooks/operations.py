"""What can be asked about hooks and their deliveries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ugro.features.hooks.model import Delivery, HookReport
from ugro.kernel.access.model import Role
from ugro.kernel.operations.request import Between, Request


@dataclass(frozen=True, slots=True)
class HookList:
    hooks: tuple[HookReport, ...]


@dataclass(frozen=True, slots=True)
class ListHooks(Request[HookList], route="GET /v1/hooks", role=Role.OPERATOR):
    """Lists the hooks of the cluster file."""


@dataclass(frozen=True, slots=True)
class DeliveryList:
    deliveries: tuple[Delivery, ...]  # the newest first


@dataclass(frozen=True, slots=True)
class ListHookDeliveries(Request[DeliveryList], route="GET /v1/hooks/deliveries", role=Role.OPERATOR):
    """Lists the newest calls of all hooks, or of one."""

    limit: Annotated[int, Between(0, 10_000)] = 20
    hook: str | None = None


@dataclass(frozen=True, slots=True)
class TestedHook:
    id: str  # of the delivery


@dataclass(frozen=True, slots=True)
class TestHook(Request[TestedHook], route="POST /v1/hooks/{name}/test", role=Role.ADMIN, audit="test hook {name}"):
    """Calls a hook once, with a sample."""

    name: str

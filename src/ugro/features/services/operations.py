"""What can be asked about services, beside those who create and update them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ugro.features.services.model import KeyReport, ServiceReport
from ugro.kernel.access.model import Role
from ugro.kernel.operations.request import Between, Kind, Lines, Request


@dataclass(frozen=True, slots=True)
class ServiceList:
    services: tuple[ServiceReport, ...]


@dataclass(frozen=True, slots=True)
class ListServices(Request[ServiceList], route="GET /v1/services", role=Role.VIEWER):
    """Lists services, with ``all`` those that have ended, too."""

    all: bool = False


@dataclass(frozen=True, slots=True)
class OneService:
    service: ServiceReport


@dataclass(frozen=True, slots=True)
class GetService(Request[OneService], route="GET /v1/services/{name}", role=Role.VIEWER, of=Kind.SERVICE):
    """Shows a service and its replicas."""

    name: str


@dataclass(frozen=True, slots=True)
class WatchService(
    Request[Lines[ServiceReport]], route="GET /v1/services/{name}/watch", role=Role.VIEWER, of=Kind.SERVICE
):
    """Sends a service now and after each change, until it is over."""

    name: str


@dataclass(frozen=True, slots=True)
class ScaleService(
    Request[OneService],
    route="POST /v1/services/{name}/scale",
    role=Role.USER,
    audit="scale service {name} {replicas}",
    of=Kind.SERVICE,
    is_own=True,
):
    """Changes the number of replicas; those that failed are replaced."""

    name: str
    replicas: int


@dataclass(frozen=True, slots=True)
class DecideUpdateOfService(
    Request[OneService],
    route="POST /v1/services/{name}/decide",
    role=Role.USER,
    audit="decide about update of service {name} {promotes}",
    of=Kind.SERVICE,
    is_own=True,
):
    """Decides about a canary; an update that runs can also be rolled back."""

    name: str
    promotes: bool


@dataclass(frozen=True, slots=True)
class StopService(
    Request[OneService],
    route="DELETE /v1/services/{name}",
    role=Role.USER,
    audit="stop service {name}",
    of=Kind.SERVICE,
    is_own=True,
):
    """Stops a service; its replicas finish what they have. Answers at once."""

    name: str


@dataclass(frozen=True, slots=True)
class KeyList:
    keys: tuple[KeyReport, ...]


@dataclass(frozen=True, slots=True)
class ListServiceKeys(
    Request[KeyList], route="GET /v1/services/{name}/keys", role=Role.USER, of=Kind.SERVICE, is_own=True
):
    """Lists the API keys of a service, without the keys themselves."""

    name: str


@dataclass(frozen=True, slots=True)
class CreatedKey:
    key: KeyReport
    secret: str  # the key itself


@dataclass(frozen=True, slots=True)
class CreateServiceKey(
    Request[CreatedKey],
    route="POST /v1/services/{name}/keys",
    role=Role.USER,
    audit="create key of service {name}",
    of=Kind.SERVICE,
    is_own=True,
):
    """Creates an API key. It is not kept, and never shown again."""

    name: str
    label: Annotated[str, Between(most=100)] = ""


@dataclass(frozen=True, slots=True)
class RevokedKey:
    pass


@dataclass(frozen=True, slots=True)
class RevokeServiceKey(
    Request[RevokedKey],
    route="DELETE /v1/services/{name}/keys/{key}",
    role=Role.USER,
    audit="revoke key of service {name}",
    of=Kind.SERVICE,
    is_own=True,
):
    """Revokes an API key, by its id. It is refused at once."""

    name: str
    key: str

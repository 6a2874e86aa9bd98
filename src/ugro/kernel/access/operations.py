"""What can be asked about who asks, about tokens and the audit log; and how the API describes itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ugro.kernel.access.model import ApiToken, AuditEntry, Role
from ugro.kernel.operations.request import Between, Raw, Request

LONGEST_S = 3650 * 86400.0  # of a token's life
LATEST_S = 4e9  # a time of this century


@dataclass(frozen=True, slots=True)
class Whoami:
    user: str
    role: Role
    owner: str  # who runs the agent


@dataclass(frozen=True, slots=True)
class GetWhoami(Request[Whoami], route="GET /v1/whoami", role=Role.VIEWER):
    """Says who asks, with which role, and who runs the agent: as the kernel told it, whatever the environment says."""


@dataclass(frozen=True, slots=True)
class TokenList:
    tokens: tuple[ApiToken, ...]


@dataclass(frozen=True, slots=True)
class ListTokens(Request[TokenList], route="GET /v1/tokens", role=Role.VIEWER, for_people=True):
    """Lists one's own tokens; for an admin, everybody's."""


@dataclass(frozen=True, slots=True)
class CreatedToken:
    token: ApiToken
    secret: str  # the token itself


@dataclass(frozen=True, slots=True)
class CreateToken(
    Request[CreatedToken],
    route="POST /v1/tokens",
    role=Role.VIEWER,
    audit="create token {name} {role}",
    for_people=True,
):
    """Creates a token. It is shown once, and cannot be shown again."""

    role: Role
    expires_s: Annotated[float, Between(above=0, most=LONGEST_S)]
    name: Annotated[str, Between(most=64)] = ""


@dataclass(frozen=True, slots=True)
class RevokedToken:
    token: ApiToken


@dataclass(frozen=True, slots=True)
class RevokeToken(
    Request[RevokedToken],
    route="DELETE /v1/tokens/{word}",
    role=Role.VIEWER,
    audit="revoke token {word}",
    for_people=True,
):
    """Revokes a token, by its number or name. It is refused from now on."""

    word: str


@dataclass(frozen=True, slots=True)
class AuditPage:
    audit: tuple[AuditEntry, ...]


@dataclass(frozen=True, slots=True)
class ListAuditEntries(Request[AuditPage], route="GET /v1/audit", role=Role.OPERATOR):
    """Lists who did what: the newest entries, the oldest of them first."""

    limit: Annotated[int, Between(1, 10_000)] = 1000
    since: Annotated[float, Between(0, LATEST_S)] = 0  # seconds since the epoch
    user: str | None = None


@dataclass(frozen=True, slots=True)
class GetDescription(Request[Raw], route="GET /v1/openapi.json", role=Role.VIEWER):
    """Returns this description."""

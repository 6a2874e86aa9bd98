"""``client.identity``: who the agent sees, and the tokens of programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ugro.client.path import path_of
from ugro.core.identity import ApiToken, Role
from ugro.core.support.codec import decode


@dataclass(frozen=True, slots=True)
class Whoami:
    user: str
    role: Role
    owner: str  # who runs the agent


class IdentityCalls:
    """Created by ``Client``."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def whoami(self) -> Whoami:
        """As the kernel told the agent, whatever names the environment has."""
        return decode(Whoami, self._ask("GET", "/v1/whoami"))

    def tokens(self) -> list[ApiToken]:
        """One's own; for an admin, all."""
        return [decode(ApiToken, one) for one in self._ask("GET", "/v1/tokens")["tokens"]]

    def create_token(self, role: Role | str, expires_s: float, name: str = "") -> tuple[ApiToken, str]:
        """Its record, and the token itself, which cannot be shown again."""
        answer = self._ask("POST", "/v1/tokens", {"role": Role(role).value, "expires_s": expires_s, "name": name})
        return decode(ApiToken, answer["token"]), str(answer["secret"])

    def revoke_token(self, token: str | int) -> ApiToken:
        """By number or name."""
        return decode(ApiToken, self._ask("DELETE", path_of("tokens", token))["token"])

"""The sections ``team`` and ``api`` of the cluster file: who else may use this agent, and over which address."""

from __future__ import annotations

import ipaddress

from ugro.features.discovery.config import OneMap
from ugro.kernel.access import model as login
from ugro.kernel.access.model import Role, is_loopback
from ugro.kernel.config.kinds import BadValueError, Choice, Kind, MapOf, Text
from ugro.kernel.config.section import LOCAL_PATH, USER, Section, is_user, key, section

_MOST_MEMBERS = 10_000


def _is_account(text: str) -> bool:
    """One account for each user: where two had the same, one would have the other's jobs."""
    return text.count(login.USER) == 1 and "@" not in text and is_user(text.replace(login.USER, "user"))


ACCOUNT = Text("a name with {user} in it, such as \"{user}\"", _is_account)


@section
class Team(Section):
    """Other users of this machine who may use this agent. Without a group, only its owner can."""

    group: str | None = key(
        None,
        USER,
        "The Unix group whose members may use the agent, over a socket of its own (`socket`). The agent's owner must "
        "be a member too, or root.",
        example="gpu",
    )
    default_role: Role = key(
        Role.USER,
        Choice(Role),
        "The role of members that `roles` does not name: what each may do.",
        example="viewer",
    )
    roles: dict[str, Role] = key(
        {},
        MapOf("a map of user names to roles, such as {ann: operator}", USER, Choice(Role), most=_MOST_MEMBERS),
        "The roles of some members: viewer (sees), user (own jobs), operator (all jobs, nodes), admin (users, "
        "configuration). The agent's owner and root are admins.",
        example={"ann": "operator", "guest": "viewer"},
    )
    socket: str | None = key(
        None,
        LOCAL_PATH,
        "The team's socket, in a folder of its own. Null is `/run/ugro/agent.sock` for root, in systemd's runtime "
        "directory for a unit that has one, else `/tmp/ugro-OWNER/agent.sock`. Members name it in `UGRO_SOCKET`.",
        example="/srv/ugro/agent.sock",
    )
    account: str | None = key(
        None,
        ACCOUNT,
        "The account in which a user's jobs run, on all nodes that are reached by ssh, with `{user}` for the user's "
        "name. The agent's key must be accepted there. Null: all jobs run in the account of the node's entry.",
        example="{user}",
    )


class Address(Kind):
    expected = "an address and a port, such as 127.0.0.1:8443, 0.0.0.0:8443 or [::]:8443"
    metavar = "ADDRESS:PORT"

    def parse(self, value: object) -> tuple[str, int]:
        if isinstance(value, tuple) and len(value) == 2:  # from a default, or from a parsed section
            return value[0], value[1]
        if not isinstance(value, str):
            raise self.refuse(value)
        host, _, port = value.rpartition(":")
        try:
            address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]") if "[" in host else host)
        except ValueError:
            raise self.refuse(value) from None
        has_brackets = host.startswith("[") and host.endswith("]")
        if has_brackets != (address.version == 6) or not (port.isascii() and port.isdigit()) or len(port) > 5:
            raise self.refuse(value)
        if not 0 <= int(port) <= 65535:
            raise self.refuse(value)
        return str(address), int(port)

    def written(self, value: tuple[str, int]) -> object:
        host, port = value
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@section
class Tls(Section):
    """The certificate of the HTTPS API."""

    noun = "tls"

    cert: str | None = key(
        None, LOCAL_PATH, "A TLS certificate, with its chain (PEM).", example="/etc/ugro/cert.pem"
    )
    key_: str | None = key(
        None, LOCAL_PATH, "The certificate's private key, if it is in another file.", example="/etc/ugro/key.pem"
    )

    def check(self) -> None:
        if self.cert is None:
            raise BadValueError("there is no certificate", hint="name it: cert: /etc/ugro/cert.pem", at=("cert",))


@section
class Api(Section):
    """The HTTPS API for programs elsewhere, which use tokens (`ugro token create`). Off unless `bind` is given."""

    bind: tuple[str, int] | None = key(
        None,
        Address(),
        "The address and port to listen on. Beyond loopback, it opens only with TLS and once there is a valid token.",
        example="127.0.0.1:8443",
    )
    tls: Tls | None = key(
        None,
        OneMap(Tls, "a map of cert and key"),
        "The certificate; without it, plain HTTP, and only on loopback. See below.",
        example={"cert": "/etc/ugro/cert.pem"},
    )

    def check(self) -> None:
        if self.bind is not None and not is_loopback(self.bind[0]) and self.tls is None:
            hint = "give tls: {cert: FILE, key: FILE}, or bind to 127.0.0.1"
            raise BadValueError("beyond loopback, it needs TLS", hint=hint, at=("bind",))

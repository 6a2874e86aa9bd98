"""Who asks the agent for something: callers, roles and tokens; entries of the audit log; logins on nodes."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

# --- the audit log ----------------------------------------------------------------------------------------------------
# An entry says who did what. There is one for each call that changes something.


@dataclass(frozen=True, slots=True)
class AuditEntry:
    at: str  # RFC 3339
    user: str  # of this machine; empty if it is not known
    via: str  # the process, or the session and address of a browser
    action: str
    subject: str
    outcome: str  # "done", or why not


# --- callers, roles and tokens ----------------------------------------------------------------------------------------


class Role(StrEnum):
    """From the least to the most. Each may do what those before it may."""

    VIEWER = "viewer"  # sees
    USER = "user"  # submits jobs, and changes its own
    OPERATOR = "operator"  # all jobs, and the nodes
    ADMIN = "admin"  # users, and the configuration

    def covers(self, needed: Role) -> bool:
        return _RANKS[self] >= _RANKS[needed]


_RANKS: Mapping[Role, int] = {role: rank for rank, role in enumerate(Role)}


@dataclass(frozen=True, slots=True)
class Caller:
    user: str
    role: Role
    via: str  # for the audit log: the process, or the token and the address
    # The agent may read files of this machine for them: they have its account anyway.
    shares_account: bool = False
    is_alone: bool = False  # there is no team: all that the agent has is theirs
    by_token: bool = False

    @property
    def sees_all(self) -> bool:
        """Also the private jobs of others."""
        return self.role.covers(Role.OPERATOR)

    def may_see(self, user: str, *, is_private: bool) -> bool:
        return not is_private or user == self.user or self.sees_all

    def may_change(self, user: str) -> bool:
        """What this user has made."""
        return user == self.user or self.role.covers(Role.OPERATOR)

    def knows_values_of(self, user: str) -> bool:
        """Whether the environment variables of this user's jobs are shown with their values."""
        return user == self.user or self.is_alone


def least(one: Role, other: Role) -> Role:
    return one if other.covers(one) else other


@dataclass(frozen=True, slots=True)
class ApiToken:
    """A program's way in: it acts for a user. The token itself is shown once and kept nowhere."""

    id: int
    name: str
    user: str
    role: Role
    created_at: str  # RFC 3339, as the others
    expires_at: str
    revoked_at: str | None = None
    last_used_at: str | None = None
    last_used_by: str = ""  # an address

    def is_valid(self, now: str) -> bool:
        return self.revoked_at is None and now < self.expires_at


# --- logins -----------------------------------------------------------------------------------------------------------
# A login is a node as one person reaches it, named like ``ann@gpu1``; without accounts of persons, the node itself.
#
# What is started, sent or fetched goes through the login that a job was placed on. Devices, health and labels belong to
# the node, not to its logins.


USER = "{user}"  # in an account or a folder of the configuration: the person's name


def login_name(account: str, node: str) -> str:
    return f"{account}@{node}"


def node_of(login: str) -> str:
    """No node has ``@`` in its name; an account may."""
    return login.rpartition("@")[2]


def account_of(login: str) -> str:
    """Empty for the node itself."""
    return login.rpartition("@")[0]


# --- loopback addresses -----------------------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """A name other than localhost may be anybody's, whatever it begins with."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

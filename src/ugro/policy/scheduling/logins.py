"""Whether a user's jobs can start on a node that has accounts of its users, and whether waiting helps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ugro.policy.scheduling.cluster_view import NoLogin
from ugro.policy.scheduling.demand import alternatives
from ugro.policy.scheduling.waiting_jobs import DOOMED, PARKED, Line

# About the account, and mended by a person only. A name that is not found for a moment, or a full disk, is not: a job
# that may use GPUs must not start without them because its node is being tried.
_LASTING_CAUSES = frozenset({"login-denied", "python-missing", "python-old", "home-not-writable", "unsafe-folder"})


class Seeker(NamedTuple):
    """A user with jobs that wait for nodes: for those of these names, or for any, with all of these labels."""

    user: str
    only: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def may_use(self, node: str, labels: Collection[str]) -> bool:
        return (not self.only or node in self.only) and all(label in labels for label in self.labels)


def seekers(lines: Iterable[Line]) -> set[Seeker]:
    """Jobs that wait for something else than nodes need no login yet."""
    kinds = [(line.user, line.kind.resources) for line in lines if line.kind not in (PARKED, DOOMED)]
    return {Seeker(user, way.only, way.labels) for user, resources in kinds for way in alternatives(resources)}


@dataclass(frozen=True, slots=True)
class LoginView:
    """A node as one user reaches it: its link, and what the node has said over it."""

    user: str
    account: str
    is_valid: bool = True  # whether the account's name is one that systems allow
    is_open: bool = False
    error: str | None = None  # of the last try, while it is not open
    cause: str | None = None
    is_other_machine: bool = False  # than the node's own link leads to
    has_reported: bool = False  # what runs there


def objection(view: LoginView) -> NoLogin | None:
    """None: the user's jobs can start there."""
    user, account = view.user, view.account
    if not view.is_valid:
        return NoLogin(user, f"has no account for {user}: {account!r} is no account's name", is_lasting=True)
    if not view.is_open:
        if view.error is None:
            return NoLogin(user, f"is being connected as {account}")
        return NoLogin(user, f"cannot be reached as {account}: {view.error}", view.cause in _LASTING_CAUSES)
    if view.is_other_machine:
        return NoLogin(user, f"is another machine for {account}: its GPUs are not the same", is_lasting=True)
    return None if view.has_reported else NoLogin(user, f"has not said yet what runs there as {account}")

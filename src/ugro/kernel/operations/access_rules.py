"""Which role each route needs, and whose the thing must be that it is about. Pure.

The one table of it: a route that is not here is refused, and a test walks all routes. ``audit_rules`` says what the
requests that change something are called in the audit log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ugro.kernel.access.model import Caller, Role
from ugro.kernel.feature import installed
from ugro.kernel.operations.registry import requests
from ugro.kernel.operations.request import Kind, Operation
from ugro.kernel.support.errors import NotAllowed

_HINT = "ask an admin of this agent: team.roles in the cluster file gives roles"


@dataclass(frozen=True, slots=True)
class Access:
    role: Role | None  # None: everybody, also strangers
    kind: Kind | None = None  # the path names one of these, which may be private
    is_own: bool = False  # only its user may do this, or an operator
    needs_files: bool = False  # the agent reads or writes files of this machine that the request names
    is_for_people: bool = False  # not for tokens: it makes another way in

    @classmethod
    def to(cls, one: Operation) -> Access:
        return cls(one.role, one.of, one.is_own, one.needs_files, one.for_people)


_SEES = Access(Role.VIEWER)
_USES = Access(Role.USER)
_OPERATES = Access(Role.OPERATOR)
_ADMINISTERS = Access(Role.ADMIN)


def _sees(kind: Kind) -> Access:
    return Access(Role.VIEWER, kind)


def _changes(kind: Kind) -> Access:
    return Access(Role.USER, kind, is_own=True)


RULES: Mapping[str, Access] = {
    **{kind.operation.route: Access.to(kind.operation) for kind in requests()},
    # Nodes.
    "GET /v1/nodes": _SEES,
    # Files of clients on other machines.
    "POST /v1/remote/items": _USES,
    "POST /v1/remote/known": _USES,
    "POST /v1/remote/missing": _USES,
    "POST /v1/remote/trees": _USES,
    # Jobs.
    "POST /v1/plans": _USES,
    "POST /v1/recipes/launch": _USES,
    "GET /metrics": _SEES,
    # Sweeps.
    "POST /v1/sweeps": _USES,
    "POST /v1/sweeps/plan": _USES,
    # Services.
    "POST /v1/services": _USES,
    "POST /v1/services/{name}/update": _changes(Kind.SERVICE),
    # Ray clusters.
    # Notifications.
}
# The dashboard's own pages. What a browser asks of the API is in the table above, too.
PAGES: Mapping[str, Access] = {
    **{
        route: Access(Role(page.role), Kind(page.of) if page.of else None)
        for feature in installed()
        for route, page in feature.pages.items()
    },
    "GET /login": Access(None),
    "POST /login": Access(None),
    "POST /logout": Access(None),
    "GET /": _SEES,
    "GET /nodes/{name}": _SEES,
    "GET /live": _SEES,
    "GET /settings": _SEES,
    "GET /about": _SEES,
    "GET /jobs": _SEES,
    "GET /jobs/{word}": _sees(Kind.JOB),
    "GET /jobs/{word}/job.yaml": _sees(Kind.JOB),
    "GET /jobs/{number}/balance": _sees(Kind.JOB),
    "GET /jobs/{number}/log": _sees(Kind.JOB),
    "GET /jobs/{number}/log/search": _sees(Kind.JOB),
    "GET /jobs/{number}/log/raw": _sees(Kind.JOB),
    "GET /jobs/{number}/outputs": _sees(Kind.JOB),
    "GET /jobs/{number}/outputs.tar": _sees(Kind.JOB),
    "GET /jobs/{number}/file": _sees(Kind.JOB),
    "GET /jobs/{number}/file/raw": _sees(Kind.JOB),
    "GET /jobs/{number}/file/image": _sees(Kind.JOB),
    "GET /jobs/{number}/again": _changes(Kind.JOB),
    "POST /jobs/{number}/again": _changes(Kind.JOB),
}


def check_role(caller: Caller, access: Access | None) -> None:
    """Raises NotAllowed, also for a route without a rule."""
    if access is None:
        raise NotAllowed("this route states no role: nobody may use it", hint="please report it")
    if access.role is not None and not caller.role.covers(access.role):
        whose = "this token" if caller.by_token else caller.user
        hint = f"make one: ugro token create --role {access.role}" if caller.by_token else _HINT
        raise NotAllowed(f"this needs the role {access.role}, and {whose} has the role {caller.role}", hint=hint)
    if access.is_for_people and caller.by_token:
        raise NotAllowed("a token cannot do this", hint="use the command line on the master")
    if access.needs_files and not caller.shares_account:
        raise NotAllowed(
            "the agent does not read or write files of its machine for other accounts",
            hint="its owner can do this, on the master",
        )


def check_owner(caller: Caller, access: Access, owner: str, what: str) -> None:
    """Raises NotAllowed. ``what``: such as ``job 12``."""
    if access.is_own and not caller.may_change(owner):
        raise NotAllowed(f"{what} is {owner}'s", hint="its user or an operator can do this")

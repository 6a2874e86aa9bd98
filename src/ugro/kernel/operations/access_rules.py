"""Which role each route needs, and whose the thing must be that it is about. Pure.

The one table of it: a route that is not here is refused, and a test walks all routes. ``audit_rules`` says what the
requests that change something are called in the audit log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ugro.kernel.access.model import Caller, Role
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
    "GET /v1/agent": _SEES,
    "GET /v1/openapi.json": _SEES,
    "POST /v1/agent/stop": _ADMINISTERS,
    "GET /v1/agent/reconcile": _OPERATES,
    "POST /v1/agent/reconcile": _ADMINISTERS,
    "POST /v1/dashboard": Access(Role.VIEWER, is_for_people=True),
    "GET /v1/audit": _OPERATES,
    # Configuration.
    "PUT /v1/cluster": Access(Role.ADMIN, needs_files=True),
    "GET /v1/cluster/file": Access(Role.ADMIN, needs_files=True),
    "PUT /v1/cluster/file": Access(Role.ADMIN, needs_files=True),
    "POST /v1/cluster/reload": _USES,
    # Nodes.
    "GET /v1/health": _SEES,
    "GET /v1/best": _SEES,
    "GET /v1/nodes": _SEES,
    "POST /v1/nodes": _ADMINISTERS,
    "DELETE /v1/nodes/{name:path}": _ADMINISTERS,
    "POST /v1/nodes/{name:path}/drain": _OPERATES,
    "POST /v1/nodes/{name:path}/resume": _OPERATES,
    "POST /v1/nodes/{name:path}/sleep": _OPERATES,
    "POST /v1/nodes/{name:path}/wake": _OPERATES,
    "GET /v1/nodes/{name:path}/history": _SEES,
    "GET /v1/nodes/{name:path}/hostkey": Access(Role.ADMIN, needs_files=True),
    "POST /v1/nodes/{name:path}/hostkey": Access(Role.ADMIN, needs_files=True),
    "GET /v1/doctor": _USES,
    "POST /v1/examine": Access(Role.ADMIN, needs_files=True),
    "GET /v1/ssh-hosts": Access(Role.ADMIN, needs_files=True),
    "GET /v1/discovery": _OPERATES,
    "GET /v1/discovery/reports": _OPERATES,
    # A command runs on nodes as their account, without a job that others see.
    "POST /v1/exec": _OPERATES,
    "DELETE /v1/exec/{key}": _OPERATES,
    # To a socket of their own jobs; or to a port of a node, which a job of theirs there could reach too (ops/tunnels).
    "POST /v1/tunnel": _USES,
    # Code and environments on nodes.
    "GET /v1/sync": _SEES,
    "POST /v1/sync": _USES,  # of other accounts, their own client reads and sends the folder
    "POST /v1/tidy": _OPERATES,
    # Files of clients on other machines.
    "POST /v1/remote/items": _USES,
    "POST /v1/remote/known": _USES,
    "POST /v1/remote/missing": _USES,
    "POST /v1/remote/trees": _USES,
    # Jobs.
    "GET /v1/jobs": _SEES,
    "POST /v1/jobs": _USES,
    "POST /v1/jobs/batch": _USES,
    "POST /v1/jobs/plan": _USES,
    "POST /v1/plans": _USES,
    "POST /v1/folders": _USES,
    "POST /v1/recipes/launch": _USES,
    "DELETE /v1/submissions/{key}": _USES,
    "GET /v1/jobs/{word}": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/file": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/why": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/wait": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/log": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/logs": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/results": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/results/brief": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/results/files": _sees(Kind.JOB),
    "POST /v1/jobs/{word}/results/content": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/notes": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/profile": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/steps": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/traces": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/headline": _sees(Kind.JOB),
    "GET /v1/jobs/{word}/energy": _sees(Kind.JOB),
    "POST /v1/jobs/{word}/cancel": _changes(Kind.JOB),
    "POST /v1/jobs/{word}/retry": _changes(Kind.JOB),
    "PUT /v1/jobs/{word}/notes": _changes(Kind.JOB),
    "DELETE /v1/jobs/{word}/results": _changes(Kind.JOB),
    "POST /v1/jobs/{word}/results/fetch": _changes(Kind.JOB),
    "POST /v1/jobs/{word}/trace": _changes(Kind.JOB),
    "GET /v1/headlines": _SEES,
    "GET /v1/advice": _SEES,
    "GET /v1/compare": _SEES,
    "GET /v1/events": _SEES,
    "GET /v1/changes": _SEES,
    "GET /v1/metrics": _SEES,
    "GET /v1/metrics/keys": _SEES,
    "GET /metrics": _SEES,
    # Sweeps.
    "GET /v1/sweeps": _SEES,
    "POST /v1/sweeps": _USES,
    "POST /v1/sweeps/plan": _USES,
    "GET /v1/sweeps/{word}": _sees(Kind.SWEEP),
    "GET /v1/sweeps/{word}/document": _sees(Kind.SWEEP),
    "GET /v1/sweeps/{word}/watch": _sees(Kind.SWEEP),
    "GET /v1/sweeps/{word}/importance": _sees(Kind.SWEEP),
    "POST /v1/sweeps/{word}/stop": _changes(Kind.SWEEP),
    "POST /v1/sweeps/{word}/resume": _changes(Kind.SWEEP),
    "POST /v1/sweeps/{word}/launch": _changes(Kind.SWEEP),
    # Services.
    "POST /v1/services": _USES,
    "POST /v1/services/{name}/update": _changes(Kind.SERVICE),
    # Ray clusters.
    # Notifications.
    "GET /v1/alerts": _SEES,
    "POST /v1/alerts/test": _OPERATES,
}
# The dashboard's own pages. What a browser asks of the API is in the table above, too.
PAGES: Mapping[str, Access] = {
    "GET /login": Access(None),
    "POST /login": Access(None),
    "POST /logout": Access(None),
    "GET /": _SEES,
    "GET /nodes/{name}": _SEES,
    "GET /hardware": _SEES,
    "GET /experiments": _SEES,
    "GET /compare": _SEES,
    "GET /compare/code": _SEES,
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
    "GET /sweeps": _SEES,
    "GET /sweeps/{word}": _sees(Kind.SWEEP),
    "GET /sweeps/{word}/importance": _sees(Kind.SWEEP),
    "GET /sweeps/{word}/trials.csv": _sees(Kind.SWEEP),
    "GET /usage": _SEES,
    "GET /usage.csv": _SEES,
    "GET /services": _SEES,
    "GET /services/{word}": _sees(Kind.SERVICE),
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

"""The guards between users of one agent: roles, owners, private jobs, values, files and tokens."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_RULES = "src/ugro/agent/api/access_rules.py"
_IDENTITY = "src/ugro/core/identity.py"
_CALLER = "src/ugro/agent/support/caller.py"
_GATE = "src/ugro/agent/api/gate.py"

ROLES = ("tests/integration/agent/test_roles.py",)
OWN = ("tests/integration/agent/test_own_jobs.py",)
TOKENS = ("tests/unit/agent/test_identity.py",)

MUTANTS = (
    Mutant("roles are not checked", (Edit(_RULES, "not caller.role.covers(access.role):", "False:"),), ROLES),
    Mutant(
        "a token has more than its user",
        (Edit("src/ugro/agent/ops/team.py", "least(role, token.role)", "token.role"),),
        ROLES,
    ),
    Mutant("an expired token is accepted", (Edit(_IDENTITY, " and now < self.expires_at", ""),), ROLES),
    Mutant("a revoked token is accepted", (Edit(_IDENTITY, "self.revoked_at is None and ", ""),), TOKENS),
    Mutant("a token makes tokens", (Edit(_RULES, "access.is_for_people and caller.by_token", "False"),), ROLES),
    Mutant("jobs are everybody's", (Edit(_RULES, "access.is_own and not caller.may_change(owner)", "False"),), OWN),
    Mutant("private jobs are seen", (Edit(_IDENTITY, "return not is_private or user", "return True or user"),), OWN),
    Mutant("values are seen", (Edit(_IDENTITY, "return user == self.user or self.is_alone", "return True"),), OWN),
    Mutant("a claimed name counts", (Edit(_CALLER, "claimed if asks is None else asks.user", "claimed"),), OWN),
    Mutant("files are read for everybody", (Edit(_CALLER, "asks is None or asks.shares_account\n", "True\n"),), OWN),
    Mutant(
        "roles are checked after the body",
        (
            Edit(_GATE, "                gate.admit(request)\n", ""),
            Edit(_GATE, "request.scope[_ACCESS]\n", "self.admit(request) or request.scope[_ACCESS]\n"),
        ),
        ("tests/integration/agent/test_team_limits.py",),
    ),
    Mutant(
        "a port is reached through the node's own login",
        (Edit("src/ugro/agent/ops/tunnels.py", "named if is_chosen_here else self._own_login(named)", "named"),),
        ("tests/unit/agent/test_tunnels.py",),
    ),
    Mutant("nobody is known to the services", (Edit(_GATE, "        enter(caller)\n", ""),), OWN),
)

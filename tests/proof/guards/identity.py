"""The guards between users of one agent: roles, owners, private jobs, values, files and tokens."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_RULES = "src/ugro/agent/api/access_rules.py"
_IDENTITY = "src/ugro/core/identity.py"
_CALLER = "src/ugro/agent/support/caller.py"
_GATE = "src/ugro/agent/api/gate.py"
_RAY = "src/ugro/agent/services/ray_place.py"
_SERVICES = "src/ugro/agent/services/service.py"
_SWEEPS = "src/ugro/agent/sweep/service.py"

ROLES = ("tests/integration/agent/test_roles.py",)
OWN = ("tests/integration/agent/test_own_jobs.py",)
THINGS = ("tests/integration/agent/test_own_things.py",)
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
    Mutant("a word is looked up twice", (Edit(_GATE, "path[key] = thing", "_ = thing"),), THINGS),
    Mutant("a Ray cluster is everybody's", (Edit(_RAY, "    if not may_change:\n", "    if False:\n"),), THINGS),
    Mutant(
        "an operator updates with another's variables",
        (Edit(_SERVICES, "        _expect_own_values(service)\n", ""),),
        THINGS,
    ),
    Mutant(
        "a sweep's document shows values",
        (Edit(_SWEEPS, "found if knows_values_of(sweep.user) else without_values(found)", "found"),),
        THINGS,
    ),
    Mutant("private sweeps are found", (Edit(_SWEEPS, "find(word, viewer())", "find(word, None)"),), THINGS),
    Mutant(
        "files are looked for",
        (Edit("src/ugro/agent/jobs/submission.py", "is_to_send and is_here and may_read_files()", "is_to_send"),),
        OWN,
    ),
    Mutant("nobody is known to the services", (Edit(_GATE, "        enter(caller)\n", ""),), OWN),
)

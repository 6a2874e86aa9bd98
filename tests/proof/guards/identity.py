"""The guards between users of one agent: roles, owners, private jobs, values, files and tokens; and of uploads."""

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
OWN = ("tests/integration/agent/test_own_jobs.py", "tests/integration/agent/test_own_routes.py")
THINGS = ("tests/integration/agent/test_own_things.py",)
TOKENS = ("tests/unit/agent/test_identity.py",)
OFFERED = ("tests/integration/agent/test_offered_files.py",)
OFFERS = ("tests/unit/agent/test_client_files.py",)
UPLOADS = ("tests/unit/agent/test_uploads.py",)
OF_CLIENTS = ("tests/unit/client/remote/test_offer.py",)
_OFFERS = "src/ugro/agent/support/client_files.py"
_UPLOADS = "src/ugro/agent/code/uploads.py"
_OF_CLIENTS = "src/ugro/client/remote/offer.py"

MUTANTS = (
    Mutant("roles are not checked", (Edit(_RULES, "not caller.role.covers(access.role):", "False:"),), ROLES),
    Mutant(
        "a token has more than its user",
        (Edit("src/ugro/agent/ops/team.py", "least(role, token.role)", "token.role"),),
        ROLES,
    ),
    Mutant(
        "a stream goes on with a role that its user has no more",
        (Edit("src/ugro/agent/api/while_allowed.py", " or not found.role.covers(caller.role)", ""),),
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
    Mutant(
        "a user takes all connections to a node",
        (Edit("src/ugro/agent/ops/tunnels.py", "self._taken[taker] >= MOST_OF_USER:", "False:"),),
        ("tests/unit/agent/test_tunnels.py",),
    ),
    Mutant("nobody is known to the services", (Edit(_GATE, "        enter(caller)\n", ""),), OWN),
    Mutant("whole hashes are seen", (Edit(_CALLER, "spec=known.spec.with_short_hashes", "spec=known.spec"),), OFFERED),
    Mutant(
        "a user id without a name is a member",
        (Edit("src/ugro/agent/ops/team.py", "self.names.of(uid) if not", "self.names.of(uid) or str(uid) if not"),),
        OFFERED,
    ),
    Mutant("what was sent is everybody's", (Edit(_OFFERS, "self._known.get(user)", 'self._known.get("ann")'),), OFFERS),
    Mutant("a request may be of any size", (Edit(_OFFERS, "+ size > _MOST_OF_AN_OFFER", "+ size < 0"),), OFFERS),
    Mutant("more may come than was announced", (Edit(_UPLOADS, "if self._came > self._size:", "if False:"),), UPLOADS),
    Mutant("uploads fill the store", (Edit(_UPLOADS, "stored + to_come > 2 * self._limit.bytes", "False"),), UPLOADS),
    Mutant("an upload may stand still", (Edit(_UPLOADS, "_moving(pieces, self._stalled_s)", "pieces"),), UPLOADS),
    Mutant("an upload may trickle", (Edit(_UPLOADS, "if came >= _LEAST_BYTES:", "if came:"),), UPLOADS),
    Mutant(
        "a master gets a variable that the command does not name",
        (Edit(_OF_CLIENTS, "if name not in self._variables:", "if False:"),),
        OF_CLIENTS,
    ),
    Mutant(
        "a master gets what a link leads to, though the user does not say so",
        (Edit(_OF_CLIENTS, "os.environ.get(_OUTSIDE) != _FOLLOW:", "False:"),),
        OF_CLIENTS,
    ),
    Mutant(
        "a master may ask for the home folder",
        (Edit(_OF_CLIENTS, "if what is not None and not self._is_named(path, words):", "if False:"),),
        OF_CLIENTS,
    ),
    Mutant(
        "a master may ask for code that is not to be sent",
        (Edit(_OF_CLIENTS, "if not _sends_code(self.body):", "if False:"),),
        OF_CLIENTS,
    ),
)

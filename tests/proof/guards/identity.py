"""The guards between users of one agent: roles, owners, private jobs, values, files and tokens; and of uploads."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_RULES = "ugro.kernel.operations.access_rules"
_IDENTITY = "ugro.kernel.access.model"
_CALLER = "ugro.kernel.access.caller"
_GATE = "ugro.kernel.access.gate"
_SERVICES = "ugro.features.services.service.service"
_SWEEPS = "ugro.features.sweeps.service.service"

ROLES = ("tests/integration/agent/test_roles.py",)
OWN = ("tests/integration/agent/test_own_jobs.py", "tests/integration/agent/test_own_routes.py")
THINGS = ("tests/integration/agent/test_own_things.py",)
TOKENS = ("tests/unit/agent/test_identity.py",)
OFFERED = ("tests/integration/agent/test_offered_files.py",)
OFFERS = ("tests/unit/agent/test_client_files.py",)
UPLOADS = ("tests/unit/agent/test_uploads.py",)
OF_CLIENTS = ("tests/unit/client/remote/test_offer.py",)
_OFFERS = "ugro.kernel.files.client_files"
_UPLOADS = "ugro.features.remote_access.service"
_OF_CLIENTS = "ugro.features.remote_access.client.offer"

MUTANTS = (
    Mutant(
        "roles are not checked", (Edit(_RULES, "check_role", "not caller.role.covers(access.role)", "False"),), ROLES
    ),
    Mutant(
        "a token has more than its user",
        (Edit("ugro.kernel.access.service", "Team.token", "least(role, token.role)", "token.role"),),
        ROLES,
    ),
    Mutant(
        "a stream goes on with a role that its user has no more",
        (
            Edit(
                "ugro.kernel.access.gate",
                "while_allowed.sending",
                "found is None or not found.role.covers(caller.role)",
                "found is None",
            ),
        ),
        ROLES,
    ),
    Mutant(
        "an expired token is accepted",
        (
            Edit(
                _IDENTITY,
                "ApiToken.is_valid",
                "self.revoked_at is None and now < self.expires_at",
                "self.revoked_at is None",
            ),
        ),
        ROLES,
    ),
    Mutant(
        "a revoked token is accepted",
        (
            Edit(
                _IDENTITY,
                "ApiToken.is_valid",
                "self.revoked_at is None and now < self.expires_at",
                "now < self.expires_at",
            ),
        ),
        TOKENS,
    ),
    Mutant(
        "a token makes tokens",
        (Edit(_RULES, "check_role", "access.is_for_people and caller.by_token", "False"),),
        ROLES,
    ),
    Mutant(
        "jobs are everybody's",
        (Edit(_RULES, "check_owner", "access.is_own and (not caller.may_change(owner))", "False"),),
        OWN,
    ),
    Mutant("private jobs are seen", (Edit(_IDENTITY, "Caller.may_see", "not is_private", "True"),), OWN),
    Mutant(
        "values are seen",
        (Edit(_IDENTITY, "Caller.knows_values_of", "user == self.user or self.is_alone", "True"),),
        OWN,
    ),
    Mutant(
        "a claimed name counts", (Edit(_CALLER, "_as_seen", "claimed if asks is None else asks.user", "claimed"),), OWN
    ),
    Mutant(
        "files are read for everybody",
        (Edit(_CALLER, "may_read_files", "asks is None or asks.shares_account", "True"),),
        OWN,
    ),
    Mutant(
        "a word is looked up twice",
        (
            Edit(
                _GATE,
                "Gate._check_thing",
                "path[key] = thing.number if key == 'number' else str(thing.number)",
                "_ = thing.number if key == 'number' else str(thing.number)",
            ),
        ),
        THINGS,
    ),
    Mutant(
        "an operator updates with another's variables",
        (Edit(_SERVICES, "Services.update", "_expect_own_values(service)", ""),),
        THINGS,
    ),
    Mutant(
        "a sweep's document shows values",
        (
            Edit(
                _SWEEPS,
                "SweepService.document",
                "found if caller.knows_values_of(sweep.user) else without_values(found)",
                "found",
            ),
        ),
        THINGS,
    ),
    Mutant("private sweeps are found", (Edit(_SWEEPS, "SweepService.find", "viewer()", "None"),), THINGS),
    Mutant(
        "files are looked for",
        (
            Edit(
                "ugro.kernel.jobs.submission",
                "SubmissionReader._with_cwd",
                "draft.section.sync and is_here and may_read_files()",
                "draft.section.sync",
            ),
        ),
        OWN,
    ),
    Mutant(
        "roles are checked after the body",
        (
            Edit(_GATE, "_guarded_by.GuardedRoute.get_route_handler.admitted", "gate.admit(request)", ""),
            Edit(_GATE, "Gate.check", "request.scope[_ACCESS]", "self.admit(request) or request.scope[_ACCESS]"),
        ),
        ("tests/integration/agent/test_team_limits.py",),
    ),
    Mutant(
        "a port is reached through the node's own login",
        (
            Edit(
                "ugro.kernel.links.tunnels",
                "Tunnels.open",
                "named if is_chosen_here else self._own_login(named)",
                "named",
            ),
        ),
        ("tests/unit/agent/test_tunnels.py",),
    ),
    Mutant(
        "a user takes all connections to a node",
        (Edit("ugro.kernel.links.tunnels", "Tunnels._take", "self._taken[taker] >= MOST_OF_USER", "False"),),
        ("tests/unit/agent/test_tunnels.py",),
    ),
    Mutant("nobody is known to the services", (Edit(_GATE, "Gate.admit", "enter(caller)", ""),), OWN),
    Mutant("whole hashes are seen", (Edit(_CALLER, "shown", "known.spec.with_short_hashes", "known.spec"),), OFFERED),
    Mutant(
        "a user id without a name is a member",
        (
            Edit(
                "ugro.kernel.access.service",
                "Team.peer",
                "await self.names.of(uid)",
                "await self.names.of(uid) or str(uid)",
            ),
        ),
        OFFERED,
    ),
    Mutant(
        "what was sent is everybody's",
        (Edit(_OFFERS, "Offers.of", "self._known.get(user)", "self._known.get('ann')"),),
        OFFERS,
    ),
    Mutant(
        "a request may be of any size",
        (
            Edit(
                _OFFERS,
                "Offer.add",
                "self.size - self._sizes.get(key, 0) + size > _MOST_OF_AN_OFFER",
                "self.size - self._sizes.get(key, 0) + size < 0",
            ),
        ),
        OFFERS,
    ),
    Mutant(
        "more may come than was announced",
        (Edit(_UPLOADS, "_Receiving.feed", "self._came > self._size", "False"),),
        UPLOADS,
    ),
    Mutant(
        "uploads fill the store",
        (Edit(_UPLOADS, "_Receiving._expect_room", "stored + to_come > 2 * self._limit.bytes", "False"),),
        UPLOADS,
    ),
    Mutant(
        "an upload may stand still",
        (Edit(_UPLOADS, "Uploads._received", "_moving(pieces, self._stalled_s)", "pieces"),),
        UPLOADS,
    ),
    Mutant("an upload may trickle", (Edit(_UPLOADS, "_moving", "came >= _LEAST_BYTES", "came"),), UPLOADS),
    Mutant(
        "a master gets a variable that the command does not name",
        (Edit(_OF_CLIENTS, "Offer.expect_variables", "name not in self._variables", "False"),),
        OF_CLIENTS,
    ),
    Mutant(
        "a master gets what a link leads to, though the user does not say so",
        (Edit(_OF_CLIENTS, "_own_rules", "os.environ.get(_OUTSIDE) != _FOLLOW", "False"),),
        OF_CLIENTS,
    ),
    Mutant(
        "a master may ask for the home folder",
        (Edit(_OF_CLIENTS, "Offer._expect_meant", "what is not None and (not self._is_named(path, words))", "False"),),
        OF_CLIENTS,
    ),
    Mutant(
        "a master may ask for code that is not to be sent",
        (Edit(_OF_CLIENTS, "Offer._value", "not _sends_code(self.body)", "False"),),
        OF_CLIENTS,
    ),
)

"""The guards of the dashboard's port and the team's socket, and of terminals that show what programs wrote."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_DOOR = "src/ugro/agent/door.py"
_ACCESS = "src/ugro/web/access.py"
_TOKENS = "src/ugro/web/tokens.py"
_APP = "src/ugro/web/app.py"

CROWD = ("tests/integration/dashboard/test_door.py", "-k", "starve")
LAST = ("tests/integration/dashboard/test_door.py", "-k", "last_descriptors")
SLOW = ("tests/integration/dashboard/test_door.py", "-k", "too_little")
LARGE = ("tests/integration/dashboard/test_door.py", "-k", "large_body or endless_body")
STREAMS = ("tests/integration/dashboard/test_door.py", "-k", "streams")
STRANGERS = ("tests/integration/dashboard/test_strangers.py", "-k", "learns_nothing or large_body")
SIGN_OUT = ("tests/integration/dashboard/test_strangers.py", "-k", "copied_cookie")
LINKS = ("tests/integration/dashboard/test_access.py", "-k", "looking_at_a_link")
SESSIONS = ("tests/unit/web/test_web.py", "-k", "session")
UNITS = ("tests/unit/agent/test_connections.py",)
TEAM = ("tests/integration/agent/test_team_limits.py",)
TERMINAL = ("tests/unit/cli/test_untrusted.py",)

_NO_BOUND = Edit(_DOOR, "(is_tight or len(strangers) >= limits.strangers)", "is_tight")
_NO_TOTAL = Edit(_DOOR, "len(inside) < limits.connections:", "True:")
_NO_RESERVE = Edit(_DOOR, "is_tight = highest >= limit - self.limits.free_descriptors(limit)", "is_tight = False")

MUTANTS = (
    Mutant("connections to the dashboard are not bounded", (_NO_BOUND, _NO_TOTAL, _NO_RESERVE), CROWD),
    Mutant("strangers are not bounded", (_NO_BOUND,), UNITS),
    Mutant("connections are not bounded in total", (_NO_TOTAL,), UNITS),
    Mutant("the dashboard takes the last descriptors", (_NO_RESERVE,), LAST),
    Mutant(
        "one member may have all connections",
        (Edit(_DOOR, "len(own) >= limits.of_one_peer:", "False:"),),
        UNITS,
    ),
    Mutant(
        "one user may have all connections",
        (Edit(_DOOR, "== connection.user], self.limits.of_one_user)", "== connection.user], None)"),),
        ("tests/integration/agent/test_door_shares.py",),
    ),
    Mutant(
        "members may send as much as the owner",
        (Edit("src/ugro/agent/server.py", "_LARGEST_BODY_OF_MEMBERS if is_of_team else", ""),),
        TEAM,
    ),
    Mutant(
        "a request inherits the client of the one before it",
        (Edit("src/ugro/agent/server.py", "reset_contextvars=True,", "reset_contextvars=False,"),),
        TEAM,
    ),
    Mutant(
        "the agent keeps the limit of descriptors that it was given",
        (Edit("src/ugro/core/support/descriptors.py", "and soft < wanted:", "and soft > wanted:"),),
        CROWD,
    ),
    Mutant(
        "jobs get the agent's limit of descriptors",
        (Edit("src/ugro/nodes/process.py", "        restore_limit(process.pid)", "        pass"),),
        CROWD,
    ),
    Mutant(
        "strangers may take their time",
        (Edit(_DOOR, "return now - self.began > limits.stranger_s", "return False"),),
        SLOW,
    ),
    Mutant(
        "unfinished bodies are waited for",
        (Edit(_DOOR, "return self.cycle.more_body and now - self.since > limits.body_s", "return False"),),
        SLOW,
    ),
    Mutant(
        "bodies are not bounded",
        (Edit("src/ugro/agent/api/body_limit.py", "self._left -= ", "self._left -= 0 * "),),
        LARGE,
    ),
    Mutant(
        "declared lengths of bodies are not looked at",
        (Edit("src/ugro/agent/api/body_limit.py", "elif _declared(scope) > self._most:", "elif False:"),),
        LARGE,
    ),
    Mutant(
        "live streams of a session are not bounded",
        (Edit("src/ugro/web/streams.py", "if len(self._open[session]) >= MOST_PER_SESSION:", "if False:"),),
        STREAMS,
    ),
    Mutant(
        "signing out does not end the session", (Edit(_TOKENS, "        self._known.pop(name, None)\n", ""),), SIGN_OUT
    ),
    Mutant(
        "signing out lasts until the agent stops",
        (
            Edit(
                _TOKENS,
                "        self._known.pop(name, None)\n        try:\n            self._write()",
                "        self._known.pop(name, None)\n        try:\n            pass",
            ),
        ),
        SESSIONS,
    ),
    Mutant(
        "streams go on after signing out",
        (Edit(_APP, "        access.streams.end(request.scope[SESSION])\n", ""),),
        SIGN_OUT,
    ),
    Mutant(
        "routes for strangers are prefixes",
        (
            Edit(_ACCESS, 'if scope["path"] == "/login":', 'if scope["path"].startswith(("/login", "/static")):'),
            Edit("src/ugro/web/site.py", "if request.scope.get(SESSION) is None:", "if False:"),
        ),
        STRANGERS,
    ),
    Mutant(
        "a stranger's page shows the name of the cluster",
        (
            Edit(
                "src/ugro/web/site.py",
                "render(once=once, to=to)",
                "render(once=once, to=self.agent.status().cluster_name)",
            ),
            Edit("src/ugro/web/templates/login.html", "<h1>Sign in</h1>", "<h1>Sign in {{ to }}</h1>"),
        ),
        STRANGERS,
    ),
    Mutant(
        "looking at a link uses it up",
        (
            Edit(
                _APP,
                "        return site.sign_in(once, to)",
                "        tokens.take(once, time.time())\n        return site.sign_in(once, to)",
            ),
        ),
        LINKS,
    ),
    Mutant(
        "titles and clipboards reach the terminal",
        (Edit("src/ugro/cli/untrusted.py", "if self._is_dumb or not (is_colour or deletes):", "if self._is_dumb:"),),
        TERMINAL,
    ),
    Mutant(
        "a string without an end swallows what follows",
        (
            Edit("src/ugro/cli/untrusted.py", "[^\\x07\\r\\n\\x1b", "[^\\x07\\x1b"),
            Edit("src/ugro/cli/untrusted.py", "]{0,4096}", "]*"),
        ),
        TERMINAL,
    ),
)

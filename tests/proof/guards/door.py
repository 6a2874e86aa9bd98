"""The guards of the dashboard's port and the team's socket, and of terminals that show what programs wrote."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_DOOR = "ugro.kernel.operations.door"
_ACCESS = "ugro.web.access"
_TOKENS = "ugro.web.access"
_APP = "ugro.web.dashboard"

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

_NO_BOUND = Edit(_DOOR, "leaving", "is_tight or len(strangers) >= limits.strangers", "is_tight")
_NO_TOTAL = Edit(_DOOR, "leaving", "len(inside) < limits.connections", "True")
_NO_RESERVE = Edit(_DOOR, "Door._admit", "highest >= limit - self.limits.free_descriptors(limit)", "False")

MUTANTS = (
    Mutant("connections to the dashboard are not bounded", (_NO_BOUND, _NO_TOTAL, _NO_RESERVE), CROWD),
    Mutant("strangers are not bounded", (_NO_BOUND,), UNITS),
    Mutant("connections are not bounded in total", (_NO_TOTAL,), UNITS),
    Mutant("the dashboard takes the last descriptors", (_NO_RESERVE,), LAST),
    Mutant(
        "one member may have all connections",
        (Edit(_DOOR, "leaving", "len(own) >= limits.of_one_peer", "False"),),
        UNITS,
    ),
    Mutant(
        "one user may have all connections",
        (Edit(_DOOR, "Door.makes_room", "self.limits.of_one_user", "None"),),
        ("tests/integration/agent/test_door_shares.py",),
    ),
    Mutant(
        "members may send as much as the owner",
        (
            Edit(
                "ugro.kernel.operations.app",
                "socket_server",
                "_LARGEST_BODY_OF_MEMBERS if is_of_team else _LARGEST_BODY",
                "_LARGEST_BODY",
            ),
        ),
        TEAM,
    ),
    Mutant(
        "a request inherits the client of the one before it",
        (Edit("ugro.kernel.operations.app", "socket_server", "True", "False"),),
        TEAM,
    ),
    Mutant(
        "the agent keeps the limit of descriptors that it was given",
        (Edit("ugro.kernel.support.process", "raise_limit", "soft < wanted", "soft > wanted"),),
        CROWD,
    ),
    Mutant(
        "jobs get the agent's limit of descriptors",
        (Edit("ugro.kernel.links.transport", "_start", "restore_limit(process.pid)", "pass"),),
        CROWD,
    ),
    Mutant(
        "strangers may take their time",
        (Edit(_DOOR, "Connection.is_overdue", "now - self.began > limits.stranger_s", "False"),),
        SLOW,
    ),
    Mutant(
        "unfinished bodies are waited for",
        (Edit(_DOOR, "Connection.is_overdue", "self.cycle.more_body and now - self.since > limits.body_s", "False"),),
        SLOW,
    ),
    Mutant(
        "bodies are not bounded",
        (
            Edit(
                "ugro.kernel.operations.door",
                "_Counted.receive",
                "len(message.get('body', b''))",
                "0 * len(message.get('body', b''))",
            ),
        ),
        LARGE,
    ),
    Mutant(
        "declared lengths of bodies are not looked at",
        (Edit("ugro.kernel.operations.door", "BodyLimit.__call__", "_declared(scope) > self._most", "False"),),
        LARGE,
    ),
    Mutant(
        "live streams of a session are not bounded",
        (Edit("ugro.web.access", "Streams.serve", "len(self._open[session]) >= MOST_PER_SESSION", "False"),),
        STREAMS,
    ),
    Mutant(
        "signing out does not end the session",
        (Edit(_TOKENS, "Sessions.end", "self._known.pop(name, None)", ""),),
        SIGN_OUT,
    ),
    Mutant(
        "signing out lasts until the agent stops",
        (Edit(_TOKENS, "Sessions.end", "self._write()", "pass"),),
        SESSIONS,
    ),
    Mutant(
        "streams go on after signing out",
        (Edit(_APP, "_add_login.logout", "access.streams.end(request.scope[SESSION])", ""),),
        SIGN_OUT,
    ),
    Mutant(
        "routes for strangers are prefixes",
        (
            Edit(_ACCESS, "_signs_in", "scope['path'] == '/login'", "scope['path'].startswith(('/login', '/static'))"),
            Edit("ugro.web.site", "Site.error", "request.scope.get(SESSION) is None", "False"),
        ),
        STRANGERS,
    ),
    Mutant(
        "a stranger's page shows the name of the cluster",
        (
            Edit("ugro.web.site", "Site.sign_in", "to", "self.agent.status().cluster_name"),
            Edit("web/templates/login.html", "", "<h1>Sign in</h1>", "<h1>Sign in {{ to }}</h1>"),
        ),
        STRANGERS,
    ),
    Mutant(
        "looking at a link uses it up",
        (
            Edit(
                _APP,
                "_add_login.offer",
                "'A GET changes nothing: programs that look at links before people do must not use them up.'",
                "'A GET changes nothing: programs that look at links before people "
                "do must not use them up.'\n"
                "tokens.take(once, time.time())",
            ),
        ),
        LINKS,
    ),
    Mutant(
        "titles and clipboards reach the terminal",
        (
            Edit(
                "ugro.cli.untrusted",
                "TerminalFilter._kept",
                "self._is_dumb or not (is_colour or deletes)",
                "self._is_dumb",
            ),
        ),
        TERMINAL,
    ),
    Mutant(
        "a string without an end swallows what follows",
        (
            Edit(
                "ugro.cli.untrusted",
                "",
                "'(?:\\\\x1b[\\\\]PX^_]|[\\\\x90\\\\x98\\\\x9d\\\\x9e\\\\x9f])[^\\"
                "\\x07\\\\r\\\\n\\\\x1b\\\\x90\\\\x98\\\\x9c-\\\\x9f]{0,4096}'",
                "'(?:\\\\x1b[\\\\]PX^_]|[\\\\x90\\\\x98\\\\x9d\\\\x9e\\\\x9f])[^\\"
                "\\x07\\\\x1b\\\\x90\\\\x98\\\\x9c-\\\\x9f]{0,4096}'",
            ),
            Edit(
                "ugro.cli.untrusted",
                "",
                "'(?:\\\\x1b[\\\\]PX^_]|[\\\\x90\\\\x98\\\\x9d\\\\x9e\\\\x9f])[^\\"
                "\\x07\\\\r\\\\n\\\\x1b\\\\x90\\\\x98\\\\x9c-\\\\x9f]{0,4096}'",
                "'(?:\\\\x1b[\\\\]PX^_]|[\\\\x90\\\\x98\\\\x9d\\\\x9e\\\\x9f])[^\\"
                "\\x07\\\\r\\\\n\\\\x1b\\\\x90\\\\x98\\\\x9c-\\\\x9f]*'",
            ),
        ),
        TERMINAL,
    ),
)

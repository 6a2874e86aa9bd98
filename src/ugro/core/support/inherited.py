"""What a command of the user's gets of the agent's environment, which may hold secrets: what every program needs."""

from __future__ import annotations

from collections.abc import Mapping

INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE"),
    "UGRO_HOME",  # so that the command's own ugro finds this agent
)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in INHERITED if name in environ}

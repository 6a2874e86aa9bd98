"""Which environment variables look like secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|PASS|KEY|CREDENTIAL)S?$", re.IGNORECASE)


def looks_secret(name: str) -> bool:
    return any(_SECRET.search(part) for part in name.split("_"))


def masked(env: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name: HIDDEN if looks_secret(name) else value for name, value in env}

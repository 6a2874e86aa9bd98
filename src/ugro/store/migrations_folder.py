"""The numbered steps to the newest schema, as they lie in a package."""

from __future__ import annotations

import re
from importlib import resources


def migrations(package: str) -> dict[int, str]:
    folder = resources.files(package) / "migrations"
    found = {}
    for entry in folder.iterdir():
        if match := re.fullmatch(r"(\d{4})_\w+\.sql", entry.name):
            found[int(match[1])] = entry.read_text()
    return found


def newest_schema(package: str) -> int:
    return max(migrations(package))


def statements(sql: str) -> list[str]:
    """In our migrations a semicolon only ends a statement. ``executescript`` would commit on its own."""
    lines = [line for line in sql.splitlines() if not line.lstrip().startswith("--")]
    return [statement for statement in "\n".join(lines).split(";") if statement.strip()]

"""Resolved requirements as text: every package with its version and the hashes of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ugro.policy.python_env.requirements import logical_lines, normal

_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*===?\s*([^\s;,]+)")
_HASH = re.compile(r"--hash[= ](sha256:[0-9a-f]{64})")


def with_given_hashes(resolved: str, given: Iterable[str]) -> str:
    """Where somebody has given hashes for a version, only files with these are accepted, whatever the index has now."""
    known = {pin: hashes for line in given if (pin := _pin(line)) and (hashes := _HASH.findall(line))}
    if not known:
        return resolved
    lines = []
    for _, line in logical_lines(resolved):
        accepted = known.get(_pin(line) or ("", ""), [])
        bare = line.partition(" --hash")[0]
        lines.append(f"{bare} {' '.join(f'--hash={one}' for one in accepted)}" if accepted else line)
    return "".join(f"{line}\n" for line in lines)


def versions(resolved: str) -> list[tuple[str, str]]:
    """Name and version of each package."""
    return [pin for _, line in logical_lines(resolved) if (pin := _pin(line)) is not None]


def _pin(line: str) -> tuple[str, str] | None:
    found = _PIN.match(line)
    return (normal(found[1]), found[2]) if found else None

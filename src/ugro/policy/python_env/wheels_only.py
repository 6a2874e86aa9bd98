"""Packages that have no wheel. To be resolved they would have to be built, and building runs code of the package.

For somebody who does not have the agent's account nothing is built on its machine: such a package is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from ugro.policy.python_env.requirements import address_in

HINT = (
    "build a wheel of it and name where that can be downloaded (index_url, find_links), "
    "or use an environment that the nodes have: existing"
)
# What uv says of a package that it was not allowed to build.
_SAID = (
    re.compile(r"[Ww]heels are required for `([^`\s]+)`"),
    re.compile(r"`?([A-Za-z0-9][A-Za-z0-9._-]*)`?(?:[=<>!~]=?\S*)? has no (?:usable |compatible )?wheels"),
    re.compile(r"[Bb]uilding source distributions for `([^`\s]+)` is disabled"),
)


def without_wheel(name: str) -> str:
    return f"{name} has no wheel, and the agent builds no packages for others than its owner"


def source_archive(lines: Iterable[str]) -> str | None:
    """The first package that is taken from an address which is not that of a wheel."""
    for line in lines:
        name, address = address_in(line)
        if address is not None and not _is_wheel(address):
            return name
    return None


def unbuilt(said: str) -> str | None:
    """The package without a wheel, from what uv said when it failed."""
    text = " ".join(said.split())  # uv breaks its lines
    return next((found[1] for pattern in _SAID if (found := pattern.search(text))), None)


def _is_wheel(address: str) -> bool:
    try:
        return urlsplit(address).path.endswith(".whl")
    except ValueError:
        return False

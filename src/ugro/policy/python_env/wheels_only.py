"""What holds for packages that somebody chose who does not have the agent's account: they are wheels, from the web.

A package without a wheel would have to be built to be resolved, and building runs its code on the agent's machine. And
uv reads any file that an index or a package refers to: with the agent's account, a wheel of the owner's own.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from ugro.policy.python_env.requirements import BadRequirement, address_in, checked

HINT = (
    "build a wheel of it and name where that can be downloaded (index_url, find_links), "
    "or use an environment that the nodes have: existing"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# What uv says of a package that it was not allowed to build.
_SAID = (
    re.compile(r"[Ww]heels are required for `([^`\s]+)`"),
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
    before, sentence, _ = text.partition(" has no usable wheels")
    name = _NAME.search(before.rpartition(" ")[2]) if sentence else None
    return name[0] if name else next((found[1] for pattern in _SAID if (found := pattern.search(text))), None)


def requirements_from_web(lock: str, folders: Sequence[str]) -> str:
    """What uv resolved, as pinned requirements with hashes. Raises BadRequirement.

    ``lock``: a pylock.toml, which says of each file where it is. ``folders``: of this machine, which the owner allows.
    """
    packages = tomllib.loads(lock).get("packages", [])
    return "".join(f"{checked(_line(package, folders))}\n" for package in packages)


def _line(package: Mapping[str, Any], folders: Sequence[str]) -> str:
    name, files = package["name"], package.get("wheels", [])
    what = f"{name}=={package.get('version', '')}"
    if (archive := package.get("archive")) is not None:
        files, what = [archive], f"{name} @ {archive.get('url', '')}"
    if not files:
        raise BadRequirement(without_wheel(name), HINT)
    if not all(_may_be_read(file.get("url", ""), folders) for file in files):
        raise BadRequirement(f"{name} is a file of the agent's machine", "name an index that has the package itself")
    hashes = sorted({file["hashes"]["sha256"] for file in files if "sha256" in file.get("hashes", {})})
    condition = f" ; {package['marker']}" if "marker" in package else ""
    return " ".join((f"{what}{condition}", *(f"--hash=sha256:{one}" for one in hashes)))


def _may_be_read(address: str, folders: Sequence[str]) -> bool:
    parts = urlsplit(address)
    if parts.scheme in ("http", "https"):
        return True
    path = posixpath.normpath(unquote(parts.path))
    return parts.scheme == "file" and any(path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _is_wheel(address: str) -> bool:
    try:
        return urlsplit(address).path.endswith(".whl")
    except ValueError:
        return False

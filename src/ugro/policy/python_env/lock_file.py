"""Lock files: which kind a text is, and the packages of a ``pylock.toml`` as requirements with hashes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from ugro.policy.python_env.requirements import BadRequirement, checked

UV_LOCK = "uv.lock"
PYLOCK = "pylock.toml"
_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9.!+_-]{1,100}")


def kind_of_lock(text: str) -> str:
    """Raises BadRequirement if it is neither."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadRequirement(f"not valid TOML: {error}", "name a uv.lock or a pylock.toml") from error
    if "lock-version" in found:
        return PYLOCK
    if isinstance(found.get("version"), int) and ("package" in found or "requires-python" in found):
        return UV_LOCK
    raise BadRequirement("not a lock file", "name a uv.lock or a pylock.toml")


def pylock_requirements(text: str) -> tuple[str, ...]:
    packages = tomllib.loads(text).get("packages", [])
    if not isinstance(packages, list):
        raise BadRequirement("packages is not a list", "write it again: uv export --format pylock.toml")
    return tuple(_line(package) for package in packages if isinstance(package, dict))


def _line(package: Mapping[str, Any]) -> str:
    name, version, marker = (str(package.get(key, "")) for key in ("name", "version", "marker"))
    hint = "write the file without it, or use a requirements file"
    if not _NAME.fullmatch(name):
        raise BadRequirement(f"not a package's name: {name[:60]!r}", hint)
    for place in ("vcs", "directory", "archive"):
        if place in package:
            raise BadRequirement(f"{name} comes from a {place}, not from a package index", hint)
    if re.search(r"\b(extras|dependency_groups)\b", marker) or "\n" in marker:
        raise BadRequirement(f"{name} depends on an extra or a group", hint)
    hashes = sorted(set(_hashes(package)))
    if not _VERSION.fullmatch(version) or not hashes:
        raise BadRequirement(f"{name} has no version or no hashes", hint)
    condition = f" ; {marker}" if marker else ""
    return checked(f"{name}=={version}{condition} {' '.join(f'--hash=sha256:{one}' for one in hashes)}")


def _hashes(package: Mapping[str, Any]) -> Iterator[str]:
    files = [*_maps(package.get("wheels")), *_maps([package.get("sdist")])]
    for file in files:
        hashes = file.get("hashes")
        found = hashes.get("sha256") if isinstance(hashes, Mapping) else None
        if isinstance(found, str) and _HASH.fullmatch(found):
            yield found


def _maps(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []

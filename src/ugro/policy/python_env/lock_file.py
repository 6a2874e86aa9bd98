"""Lock files: which kind a text is, its indexes, and the packages of a ``pylock.toml`` as requirements with hashes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ugro.core.support.secret import without_userinfo
from ugro.policy.python_env.requirements import BadRequirement, checked

UV_LOCK = "uv.lock"
PYLOCK = "pylock.toml"
_PYPI = "https://pypi.org/simple"
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


def lock_indexes(text: str, named: Iterable[str] = ()) -> tuple[str, ...]:
    """The indexes on the web that its packages were found in. Not PyPI: that is the default, which may be replaced.

    ``named``: addresses that are used anyway. They may have a login, which a lock does not have.
    """
    found = tomllib.loads(text)
    packages = [*_maps(found.get("package")), *_maps(found.get("packages"))]
    addresses = [address for package in packages if (address := _index(package)).startswith(("https://", "http://"))]
    for address in addresses:
        if "${" in address or re.search(r"[\s,]", address):
            hint = "write the index's address as it is, and lock again"
            raise BadRequirement("the address of an index has a variable, a space or a comma in it", hint)
    known = {_PYPI, *(without_userinfo(one).rstrip("/") for one in named)}
    return tuple(one for one in dict.fromkeys(addresses) if one.rstrip("/") not in known)


def _index(package: Mapping[str, Any]) -> str:
    source = package.get("source")  # of a uv.lock
    named = source.get("registry") if isinstance(source, Mapping) else package.get("index")
    return named if isinstance(named, str) else ""


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

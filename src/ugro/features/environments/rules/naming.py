"""What an environment is called, and on which platform it is made.

Its name is the hash of all that decides what is in it: every package with its version and the hashes of its files, the
version of Python, the platform. So the same name is the same environment, on every node and for every job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from ugro.features.environments.model import SHORT, EnvHost, EnvOnNode, EnvRequest, HeldOn, KeptEnvironment, Platform
from ugro.features.environments.rules.requirements import logical_lines, normal, project
from ugro.kernel.links.model import by_name
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotFound, UsageError
from ugro.kernel.support.secrets import without_passwords, without_userinfo

# --- kept -------------------------------------------------------------------------------------------------------------
# The Python environments that nodes keep, by name: who has which, and which one a user means.


def by_environment(nodes: Mapping[str, Iterable[EnvOnNode]]) -> tuple[KeptEnvironment, ...]:
    """The last used first."""
    copies: dict[str, dict[str, EnvOnNode]] = {}
    for node in sorted(nodes, key=by_name):
        for one in nodes[node]:
            copies.setdefault(one.name, {})[node] = one
    kept = []
    for name, holders in copies.items():
        made = next(iter(holders.values())).made
        held = tuple(
            HeldOn(node, one.made.size, one.made.made_at, one.made.used_at, one.in_use)
            for node, one in holders.items()
        )
        kept.append(KeptEnvironment(name, made.version, tuple(sorted(made.packages)), held))
    return tuple(sorted(kept, key=lambda one: (one.used_at, one.name), reverse=True))


def meant(word: str, kept: Sequence[KeptEnvironment]) -> KeptEnvironment:
    """By its name, or by the first letters of it if no other begins so."""
    found = [one for one in kept if one.name == word] or [one for one in kept if one.name.startswith(word)]
    if not found or not word:
        raise NotFound(f"no node has an environment {word}", hint="see: ugro env ls")
    if len(found) > 1:
        names = ", ".join(one.name[: max(SHORT, len(word) + 2)] for one in found[:3])
        raise UsageError(f"{len(found)} environments begin with {word}: {names}", hint="give more letters of the name")
    return found[0]


# --- naming -----------------------------------------------------------------------------------------------------------


_NAME_DIGITS = 32
MUSL = "musl"
# The C libraries for which uv resolves; a node's own is at least as new as the one chosen.
_MANYLINUX = (*((2, minor) for minor in range(40, 30, -1)), (2, 28), (2, 17))
_OLD_NAMES = {(2, 17): "manylinux2014", (2, 12): "manylinux2010", (2, 5): "manylinux1"}
ARCHES = ("x86_64", "aarch64")


def platform_of(host: EnvHost, python: str) -> Platform:
    return Platform(host.arch, host.libc, host.libc_version, python)


def common_python(hosts: Mapping[str, EnvHost]) -> str | None:
    """The version that nodes run UGRO with, if it is the same, else the newest that all of them have."""
    minors = [[minor_of(version) for version, _ in host.pythons] for host in hosts.values()]
    firsts = {one[0] for one in minors if one}
    if len(firsts) == 1 and all(minors):
        return firsts.pop()
    common = set.intersection(*(set(one) for one in minors)) if minors else set()
    return max(common, key=_as_numbers, default=None)


def pythons_of(hosts: Mapping[str, EnvHost]) -> str:
    """gpu1 has 3.11; gpu2 has 3.9, 3.12"""
    parts = []
    for node, host in hosts.items():
        minors = dict.fromkeys(minor_of(version) for version, _ in host.pythons)
        parts.append(f"{node} has {', '.join(minors) or 'none'}")
    return "; ".join(parts)


def minor_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _as_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def uv_platform(platform: Platform) -> str | None:
    """The word by which uv knows it; None if it does not."""
    if platform.arch not in ARCHES:
        return None
    if platform.libc == MUSL:
        return f"{platform.arch}-unknown-linux-musl"
    known = next((one for one in _MANYLINUX if one <= platform.libc_version), None)
    return f"{platform.arch}-manylinux_{known[0]}_{known[1]}" if known else None


def wheel_platforms(platform: Platform) -> list[str]:
    """The platform tags of wheels that run there, the newest first, as pip takes them."""
    major, minor = platform.libc_version
    if platform.libc == MUSL:
        tags = [f"musllinux_{major}_{one}_{platform.arch}" for one in range(minor, -1, -1)]
    else:
        tags = []
        for one in range(minor, 4, -1):
            tags.append(f"manylinux_{major}_{one}_{platform.arch}")
            if (old := _OLD_NAMES.get((major, one))) is not None:
                tags.append(f"{old}_{platform.arch}")
    return [*tags, f"linux_{platform.arch}"]


def label_of(request: EnvRequest, labels: Collection[str]) -> str:
    """The label whose override a node gets; empty for none."""
    return next((one.label for one in request.overrides if one.label in labels), "")


def with_override(request: EnvRequest, label: str) -> EnvRequest:
    """What nodes with this label get. The override's packages replace those of the same name."""
    chosen = next((one for one in request.overrides if one.label == label), None)
    plain = replace(request, overrides=())
    if chosen is None:
        return plain
    replaced = {project(line) for line in chosen.requirements}
    kept = [line for line in request.requirements if project(line) not in replaced]
    return replace(
        plain,
        requirements=(*kept, *chosen.requirements),
        index_url=chosen.index_url or request.index_url,
        extra_index_url=(*chosen.extra_index_url, *request.extra_index_url),
    )


def request_key(request: EnvRequest, platform: Platform) -> str:
    """Of what was asked for, without overrides: by it the resolved packages are kept.

    Without passwords: another one must not make another environment. What others chose is kept apart (``apart``).
    """
    plain = replace(
        request.with_addresses(without_userinfo),
        requirements=tuple(sorted(set(request.requirements))),
        constraints=tuple(sorted(set(request.constraints))),
        offline=False,
        upgrade=False,
        python=None,
    )
    wanted = asdict(plain)
    del wanted["whose"], wanted["user"]
    target = [platform.arch, platform.libc, list(platform.libc_version), platform.python]
    return hashlib.sha256(dumps({"request": wanted, "platform": target, **apart(request)}).encode()).hexdigest()


def apart(request: EnvRequest) -> dict[str, object]:
    """What tells requests of different people apart that are the same but for passwords.

    What others chose is not the owner's: its sources are not quite the same. What one of them gets with a login is
    theirs alone: nobody else has shown that the index lets them in.
    """
    if not request.is_foreign:
        return {}
    has_login = any(without_userinfo(address) != address for address in request.addresses)
    return {"others": request.user if has_login else True}


def files_key(request: EnvRequest, platform: Platform, name: str) -> str:
    """By it the files are kept that are sent for the environment ``name``.

    Those of others are found by their own request alone. An index of theirs can say that it has a file with a certain
    hash, which makes the name of an environment, and have no such file.
    """
    return f"{request_key(request, platform)}/{name}" if request.is_foreign else name


def environment_name(requirements: str, platform: Platform) -> str:
    """``requirements``: every package with its version and the hashes of its files."""
    packages = sorted(_canonical(line) for _, line in logical_lines(requirements))
    libc = [platform.libc, *platform.libc_version]
    content = dumps({"packages": packages, "python": platform.python, "platform": [platform.arch, *libc]})
    return hashlib.sha256(content.encode()).hexdigest()[:_NAME_DIGITS]


def package_count(requirements: str) -> int:
    return sum(not line.startswith("-") for _, line in logical_lines(requirements))


def without_hash(requirements: str) -> list[str]:
    """The packages of a resolved text that no hash protects."""
    lines = [line for _, line in logical_lines(requirements) if not line.startswith("-")]
    return [line for line in lines if "--hash=" not in line]


def _canonical(line: str) -> list[str]:
    """The order and the letters in which an index names things do not matter."""
    words = line.split()
    hashes = sorted(word for word in words if word.startswith("--hash="))
    name, equals, version = " ".join(word for word in words if not word.startswith("--hash=")).partition("==")
    return [f"{normal(name)}{equals}{version}", *hashes]


# --- words ------------------------------------------------------------------------------------------------------------
# A Python environment in words: what was asked for, and what a node does to make it.


_MOST_NAMED = 4
_PHASES = {
    "resolving": "resolving the packages",
    "downloading": "downloading to this machine",
    "sending": "sending",
    "waiting": "waiting for another installation",
    "unpacking": "unpacking the installer",
    "python": "preparing Python",
    "installing": "installing",
    "checking": "checking",
}


def in_words(request: EnvRequest) -> str:
    """'torch==2.13.0, numpy and 3 more, Python 3.11'."""
    if request.existing is not None:
        return f"{request.existing}, which exists already"
    if request.lock is not None:
        packages = f"the packages of {request.lock_name or 'a lock file'}"
    else:
        packages = _first(request.requirements)
    return packages + (f", Python {request.python}" if request.python else "")


def phase_in_words(phase: str) -> str:
    return _PHASES.get(phase, phase)


def _first(requirements: tuple[str, ...]) -> str:
    """Options of a requirements file are no packages; a comment or a hash says nothing here."""
    lines = (line.split(" #")[0].split(" --")[0].strip() for line in requirements)
    named = [without_passwords(line) for line in lines if line and not line.startswith(("-", "#"))]
    shown = ", ".join(named[:_MOST_NAMED]) or "no packages"
    return f"{shown} and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else shown

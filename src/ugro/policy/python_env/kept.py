"""The Python environments that nodes keep, by name: who has which, and which one a user means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ugro.core.env_report import SHORT, HeldOn, KeptEnvironment
from ugro.core.errors import NotFound, UsageError
from ugro.core.node import by_name
from ugro.core.python_env import EnvOnNode


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

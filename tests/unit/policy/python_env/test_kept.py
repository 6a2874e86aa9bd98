"""The environments that nodes keep, together: who has which, and which one a user means."""

from __future__ import annotations

import pytest

from ugro.features.environments.model import EnvOnNode, Made
from ugro.features.environments.rules.naming import by_environment, meant
from ugro.kernel.support.errors import NotFound, UsageError


def on_node(name: str, used: str, size: int = 10, runs: int = 0) -> EnvOnNode:
    made = Made(name, f"/r/{name}/bin/python", "3.11.2", size, "2026-01-01T00:00:00Z", used, (("torch", "2.13.0"),))
    return EnvOnNode(made, runs)


def test_an_environment_is_listed_once_with_all_its_nodes_the_last_used_first() -> None:
    kept = by_environment(
        {
            "gpu10": [on_node("aa1", "2026-02-01T00:00:00Z", 30, 2)],
            "gpu2": [on_node("aa1", "2026-01-05T00:00:00Z"), on_node("bb1", "2026-03-01T00:00:00Z")],
        }
    )
    assert [(one.name, [held.node for held in one.nodes]) for one in kept] == [
        ("bb1", ["gpu2"]),
        ("aa1", ["gpu2", "gpu10"]),
    ]
    assert (kept[1].size_bytes, kept[1].runs, kept[1].used_at) == (30, 2, "2026-02-01T00:00:00Z")


def test_the_first_letters_are_enough_unless_two_begin_so() -> None:
    kept = by_environment({"n1": [on_node(name, "2026-01-01T00:00:00Z") for name in ("abc1", "abc2", "abc", "d0")]})
    assert meant("d", kept).name == "d0"
    assert meant("abc", kept).name == "abc", "a whole name is never ambiguous"
    with pytest.raises(UsageError, match="3 environments begin with ab"):
        meant("ab", kept)
    for word in ("x", ""):
        with pytest.raises(NotFound):
            meant(word, kept)

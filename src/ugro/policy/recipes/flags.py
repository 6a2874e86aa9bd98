"""The words for a recipe's script, compared with the flags that it has, before anything is started. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ugro.core.errors import UsageError
from ugro.core.recipe import Flag, Recipe


def check_flags(recipe: Recipe, words: Sequence[str]) -> None:
    """Raises UsageError for one that it does not have. What a value means is the script's own matter."""
    known = {name: flag for flag in recipe.flags for name in (flag.name, *flag.also)}
    rest = list(words)
    while rest:
        name, equals, _ = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise UsageError(f"{name!r:.80} is not an option of recipe {recipe.name}", hint=_see(recipe))
        flag = known.get(name.replace("_", "-"))
        if flag is None:
            raise UsageError(f"recipe {recipe.name} has no option {name:.80}", hint=_hint(recipe, name, list(known)))
        if not equals and not _is_switch(flag):
            if not rest or rest[0].startswith("--"):
                raise UsageError(f"{name} needs a value", hint=f"{flag.name}: {flag.help}")
            rest.pop(0)


def _is_switch(flag: Flag) -> bool:
    return isinstance(flag.default, bool)


def _hint(recipe: Recipe, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
    return f"did you mean {near[0]}?" if near else _see(recipe)


def _see(recipe: Recipe) -> str:
    return f"its options: ugro recipe show {recipe.name}"

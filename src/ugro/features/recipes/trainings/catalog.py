"""The recipes that come with UGRO: each is a folder beside this file, described by its recipe.yaml."""

from __future__ import annotations

import difflib
import functools
import shutil
from pathlib import Path
from typing import Any

from ugro.features.recipes.model import Flag, Recipe
from ugro.kernel.support.errors import NotFound, UgroError, UsageError

_FILE = "recipe.yaml"
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "__init__.py")


@functools.cache
def all_recipes() -> tuple[Recipe, ...]:
    """By name."""
    return tuple(_read(path.parent) for path in sorted(Path(__file__).parent.glob(f"*/{_FILE}")))


def find(name: str) -> Recipe:
    """Names may be written with ``-`` or ``_``."""
    wanted = name.replace("-", "_")
    for one in all_recipes():
        if one.name == wanted:
            return one
    names = [one.name for one in all_recipes()]
    near = difflib.get_close_matches(wanted, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
    raise NotFound(f"there is no recipe {name!r}", hint=hint)


def copy(name: str, target: Path) -> list[str]:
    """Copies a recipe's files into a folder that is new or empty; returns their names."""
    source = Path(find(name).folder)
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{target} is not an empty folder", hint="name a new one")
        shutil.copytree(source, target, ignore=_LEFT_OUT, dirs_exist_ok=True)
    except OSError as error:
        raise UgroError(f"{target}: {(error.strerror or str(error)).lower()}", hint="name another folder") from error
    return sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())


def _read(folder: Path) -> Recipe:
    import yaml  # slower to load than the rest

    content: dict[str, Any] = yaml.safe_load((folder / _FILE).read_text(encoding="utf-8"))
    flags = tuple(_flag(one) for one in content.get("flags", ()))
    return Recipe(
        folder.name,
        str(content["summary"]),
        str(content["task"]),
        str(content["script"]),
        str(folder),
        tuple(content.get("environment", {}).get("packages", ())),
        content.get("models", {}),
        content.get("datasets", {}),
        flags,
        str(content["metric"]),
    )


def _flag(one: dict[str, Any]) -> Flag:
    return Flag(str(one["name"]), str(one["help"]), one.get("default"), tuple(one.get("also", ())))

"""Options that ``ugro map`` and ``ugro estimate`` have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ugro.core.errors import UsageError

if TYPE_CHECKING:
    from ugro.batch.pool import Pool

ENGINES = ("local", "ray")


def input_option(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "A file with one JSON value per line: the items. - is stdin."
    return click.option("--input", "input_", required=True, type=click.Path(), help=text)(command)


def shared_option(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "Pass FILE to every call by this name: the value of a .json file, the bytes of any other."
    return click.option("--shared", multiple=True, metavar="NAME=FILE", help=text)(command)


def shared_of(words: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for word in words:
        name, _, file = word.partition("=")
        if not name.isidentifier() or not file:
            raise UsageError(f"--shared {word}: expected NAME=FILE", hint="for example: --shared table=table.json")
        found[name] = file
    return found


def open_pool(engine: str, workers: int | None) -> Pool:
    """What functions print goes to stderr, or on Ray nowhere: stdout is for the result."""
    from ugro.batch.pool import Pool

    if engine == "ray":
        from ugro.batch.ray_engine import RayEngine

        address = os.environ.get("RAY_ADDRESS") or "auto"
        return Pool(engine=RayEngine(address, workers, shows_output=False))
    from ugro.batch.local import LocalEngine

    return Pool(engine=LocalEngine(workers, sys.stderr))

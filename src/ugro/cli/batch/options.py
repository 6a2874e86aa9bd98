"""Options that ``ugro map`` and ``ugro estimate`` have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ugro.core.errors import UsageError

if TYPE_CHECKING:
    from ugro.batch.pool import Pool
    from ugro.cli.session import Session

MEASURED = ("local", "ray")
ENGINES = (*MEASURED, "jobs")
_FLAGS = {"nodes": "nodes", "options": "job-option"}


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


def job_options_of(words: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise UsageError(f"--job-option {word}: expected NAME=VALUE", hint="for example: --job-option memory=4GB")
        found[name.replace("-", "_")] = value
    return found


def open_pool(session: Session, engine: str, **wanted: Any) -> Pool:
    """``wanted``: ``workers``, and for jobs ``nodes`` and ``options``.

    What functions print goes to stderr, on Ray nowhere, on jobs to their logs: stdout is for the result.
    """
    if given := [name for name in ("nodes", "options") if wanted.get(name) and engine != "jobs"]:
        raise UsageError(f"--{_FLAGS[given[0]]} is for --engine jobs, and this is {engine}", hint="leave it out")
    if engine == "local":
        from ugro.batch.measure import here

        return here(wanted.get("workers"))
    from ugro.client.batch import PoolWish, open_pool

    client = session.client(uses_nodes=True) if engine == "jobs" else session.new_client()
    return open_pool(client, PoolWish(engine, shows_output=False, **wanted))

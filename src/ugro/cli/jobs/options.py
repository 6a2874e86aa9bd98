"""The options that submit a job: one for each key of a job file, and a few for the submission itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from ugro.cli import candidates
from ugro.config.job.options import OPTIONS, POSITIONAL, Option

F = TypeVar("F", bound=Callable[..., Any])
JOB_FIELDS = frozenset(OPTIONS)
_COMPLETERS = {
    "JOB": candidates.jobs,
    "LABEL": candidates.labels,
    "NODE": candidates.node_names,
    "DIR": candidates.directories,
    "FILE": candidates.files,
}


def job_options(*, without: Sequence[str] = (), submits: bool = True) -> Callable[[F], F]:
    """``submits``: with the options of a submission."""
    left_out = (*POSITIONAL, *without)
    options = [_click_option(option) for option in OPTIONS.values() if option.name not in left_out]
    options += [click.option("--force", is_flag=True, help="Send the code even if it is larger than sync.max_size.")]
    if submits:
        options += [
            click.option("--dry-run", is_flag=True, help="Show the exact plan; submit nothing."),
            click.option("--detach", "-d", is_flag=True, help="Do not wait for the job."),
        ]

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def option_with(word: str) -> str | None:
    """The option of a job that has this word among its values, if there is one."""
    return next((name for name, option in OPTIONS.items() if word in option.choices), None)


def recipe_options(command: F) -> F:
    """Those that train with a recipe instead of a script."""
    model = "Train this model, without a script: a short name, a hub id, or a folder (see docs/recipes.md)."
    dataset = "With --model: the data, by a short name, a hub id, or a file or folder."
    recipe = "With --model: the recipe that trains it; see ugro recipe ls."
    command = click.option("--recipe", metavar="NAME", help=recipe)(command)
    command = click.option("--dataset", metavar="DATA", shell_complete=candidates.files, help=dataset)(command)
    return click.option("--model", metavar="MODEL", shell_complete=candidates.files, help=model)(command)


def environment_options(command: F) -> F:
    """Those that say which Python environment a job needs."""
    options = [one for one in OPTIONS.values() if one.path[0] == "environment" and one.name != "environment"]
    for option in reversed(options):
        command = _click_option(option)(command)
    return command


def _click_option(option: Option) -> Callable[[F], F]:
    if option.is_switch:
        names = f"{option.flag}/--no-{option.flag.removeprefix('--')}"
        return click.option(names, default=None, help=option.help)
    short = ("-e",) if option.name == "env" else ()
    return click.option(
        option.flag,
        *short,
        multiple=option.may_repeat,
        metavar=option.metavar,
        shell_complete=_COMPLETERS.get(option.metavar, candidates.words(option.choices)),
        help=option.help,
    )

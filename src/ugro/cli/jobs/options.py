"""The options that submit a job: one for each key of a job file, and a few for the submission itself."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ugro.cli import candidates
from ugro.cli.output import is_option, option_meant
from ugro.cli.session import Session
from ugro.kernel.jobs.config.options import OPTIONS, POSITIONAL, Option
from ugro.kernel.jobs.script import Knows, knows
from ugro.kernel.support.errors import UsageError

# --- arguments --------------------------------------------------------------------------------------------------------
# How the words of a command line are divided between ``ugro`` and the program that it starts.


RECIPE_FLAGS = ("--model", "--dataset", "--recipe")
_MOST_SOURCE_BYTES = 1 << 20
_SEVERAL_NODES = ("--nodes", "--nnodes", "--num-nodes", "-n", "-N")  # here and in other launchers
_UNKNOWN_SOURCE = "?"  # no Python: it may know anything


class LaunchCommand(click.Command):
    """Our options may stand anywhere before a ``--``; after the script, all other words are the script's.

    Only whole names are ours: ``-lr 1`` and ``--node-count 3`` are the script's.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        options = self._options(ctx)
        has_recipe = names_recipe(args[:at], options)
        if has_recipe:
            script, (ours, words) = None, divide_all(args[:at], options)
        else:
            own = {name: takes for name, takes in options.items() if name not in RECIPE_FLAGS}
            ours, script, words = divide(args[:at], own)
        ctx.meta["has_recipe"] = has_recipe
        ctx.meta["script"], ctx.meta["args"] = script, [*words, *args[at + 1 :]]
        ctx.meta["ours"] = list(ours)  # click uses the list up
        left = super().parse_args(ctx, ours)
        if script is not None and not ctx.resilient_parsing:
            _look_at(ctx, script, words, [name for name in options if name not in RECIPE_FLAGS])
        return left

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[SCRIPT [ARGS]...]"]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> candidates.Items:
        return super().shell_complete(ctx, incomplete) or candidates.files(ctx, None, incomplete)

    def _options(self, ctx: click.Context) -> dict[str, bool]:
        """By name, whether it takes a value."""
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        return {
            name: not option.is_flag for option in options for name in (*option.opts, *option.secondary_opts)
        }


def _look_at(ctx: click.Context, script: str, words: Sequence[str], options: Sequence[str]) -> None:
    """Of the script's words, those that look like our own options, misspelt: a note, or UsageError if nobody has it."""
    for word in words:
        name = word.partition("=")[0]
        if not is_option(name) or (meant := option_meant(name, options)) is None:
            continue
        found = knows(_source(ctx, script), name)
        if found is Knows.NO:
            raise UsageError(
                f"{name} is no option of {script}, and none of {ctx.command_path}: did you mean {meant}?",
                hint=f"if the script takes it all the same, put it behind a --: "
                f"{ctx.command_path} {shlex.quote(script)} -- {shlex.quote(word)}",
            )
        session = ctx.find_object(Session)
        is_letter = len(name) == 2  # most scripts have some
        if found is Knows.MAYBE and session is not None and not is_letter:
            session.output.note(f"note: {name} is passed to {script}; if you meant ugro's own option: {meant}")


def _source(ctx: click.Context, script: str) -> str:
    """The text of the script; what is no Python, as far as can be seen here, says nothing."""
    folder = ctx.params.get("workdir") or "."
    try:
        path = Path(os.path.expanduser(folder), os.path.expanduser(script))
        return path.read_text() if path.stat().st_size <= _MOST_SOURCE_BYTES else _UNKNOWN_SOURCE
    except (OSError, ValueError):
        return _UNKNOWN_SOURCE


def names_recipe(words: Sequence[str], options: dict[str, bool]) -> bool:
    """Whether a recipe's flag stands before any script: after it, such a flag is the script's."""
    rest = iter(words)
    for word in rest:
        name, has_value, _ = word.partition("=")
        if name in RECIPE_FLAGS and name in options:
            return True
        if name in options:
            if options[name] and not has_value:
                next(rest, None)
        elif word.startswith("-") and word != "-":  # the script's own, of a recipe that is named later
            return any(one.partition("=")[0] in RECIPE_FLAGS for one in rest)
        else:
            return False
    return False


def divide_all(words: Sequence[str], options: dict[str, bool]) -> tuple[list[str], list[str]]:
    """Our words, and those of the script, which is not among them."""
    ours, _, theirs = divide(["", *words], options)  # an empty word in the script's place
    return ours, theirs


class RunCommand(click.Command):
    """From the first word that is not an option, everything is the command's, also a ``--json``."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        session = ctx.find_object(Session)
        if session is not None and ctx.parent is not None and not ctx.resilient_parsing:
            session.output.is_json = bool(ctx.parent.params.get("as_json"))
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in _SEVERAL_NODES:
                raise
            hint = "a script on several nodes: ugro launch train.py --nodes 3"
            raise UsageError(f"{error.option_name}: a command runs on one node", hint=hint) from error


def divide(words: Sequence[str], options: dict[str, bool]) -> tuple[list[str], str | None, list[str]]:
    """Returns our words, the script, and its words. Before the script, every option must be ours."""
    ours: list[str] = []
    script: str | None = None
    theirs: list[str] = []
    rest = iter(words)
    for word in rest:
        name, has_value, _ = word.partition("=")
        if word in options or (has_value and options.get(name) and name.startswith("--")):
            ours.append(word)
            if options[name] and not has_value:
                ours += [value for value in [next(rest, None)] if value is not None]
        elif script is not None:
            theirs.append(word)
        elif word.startswith("-") and word != "-":
            ours.append(word)  # click reports it
        else:
            script = word
    return ours, script, theirs


# --- options ----------------------------------------------------------------------------------------------------------


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


# --- node number ------------------------------------------------------------------------------------------------------
# The option ``--nodes`` of commands that are not about one job.


class NodeNumber(click.IntRange):
    """A number of nodes, or ``all``."""

    def __init__(self, most: int | None = None, *, everything: int | None = None) -> None:
        super().__init__(1, most)
        self.everything = everything  # what ``all`` is

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.everything if value == "all" else super().convert(value, param, ctx)

"""``ugro recipe``: the trainings that come with UGRO, to look at and to copy."""

from __future__ import annotations

from pathlib import Path

import click

from ugro.cli.output import Cell
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.core.recipe import Recipe
from ugro.recipes import catalog

_MOST_NAMED = 3


@click.group(cls=CommandGroup)
def recipe() -> None:
    """List, show and copy the built-in training recipes.

    A recipe is an ordinary training script. ugro launch --model runs it as it is; a copy can be changed.
    """


@recipe.command()
@json_option
@pass_session
def ls(session: Session) -> None:
    """List the recipes."""
    found = catalog.all_recipes()
    if session.output.is_json:
        session.output.document({"recipes": found})
        return
    rows = [
        [Cell(one.name, "id"), Cell(one.task), Cell(_models(one)), Cell(one.summary)]
        for one in found
    ]
    session.output.table(("RECIPE", "TASK", "MODELS", "WHAT IT DOES"), rows)


@recipe.command()
@click.argument("name")
@json_option
@pass_session
def show(session: Session, name: str) -> None:
    """Show a recipe: its models, datasets and flags."""
    found = catalog.find(name)
    if session.output.is_json:
        session.output.document({"recipe": found})
        return
    for line in _lines(found):
        session.output.text(line)


@recipe.command()
@click.argument("name")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@json_option
@pass_session
def copy(session: Session, name: str, folder: Path) -> None:
    """Copy a recipe's files into DIR, to change them."""
    names = catalog.copy(name, folder)
    if session.output.is_json:
        session.output.document({"folder": str(folder.absolute()), "files": names})
        return
    session.output.text(f"copied to {folder}: {', '.join(names)}")
    session.output.note(f"launch it: ugro launch {catalog.find(name).script} --workdir {folder} --model … --dataset …")


def _models(one: Recipe) -> str:
    return ", ".join([*list(one.models)[:_MOST_NAMED], "…"])


def _lines(one: Recipe) -> list[str]:
    width = max((len(flag.name) for flag in one.flags), default=0)
    datasets = {name: " ".join(str(about[key]) for key in ("path", "name") if key in about)
                for name, about in one.datasets.items()}  # fmt: skip
    return [
        f"{one.name}  {one.summary}",
        f"  task     {one.task}",
        f"  script   {one.folder}/{one.script}",
        f"  packages {', '.join(one.packages)}",
        "models",
        *(f"  {name:<18} {hub}" for name, hub in one.models.items()),
        "datasets",
        *(f"  {name:<18} {about}" for name, about in datasets.items()),
        "flags",
        *(f"  {flag.name:<{width}}  {flag.help}{_default(flag.default)}" for flag in one.flags),
    ]


def _default(value: object) -> str:
    return "" if value in (None, False) else f" (default: {value})"

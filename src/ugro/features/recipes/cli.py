"""``ugro recipe``: the trainings that come with UGRO, to look at and to copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ugro.cli.jobs.options import JOB_FIELDS
from ugro.cli.output import Cell
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.features.recipes.model import Recipe
from ugro.features.recipes.trainings import catalog
from ugro.kernel.support.errors import UsageError

# --- recipe -----------------------------------------------------------------------------------------------------------
# ``--model``: makes an ordinary launch, or sweep, of a model and a dataset.


_BEST = "best"


def apply_recipe(ctx: click.Context, session: Session, file: Path | None, fields: dict[str, Any]) -> None:
    """With ``--model``: the script, its words and the fields become the recipe's. Says first whether it fits."""
    from ugro.features.recipes.client import Wanted

    wanted = {name: fields.pop(name) for name in ("model", "dataset", "recipe")}
    if not ctx.meta["has_recipe"]:
        return
    args = ctx.meta["args"]
    _check(file, args)
    client = session.client(uses_nodes=True)
    session.output.progress("looking for the model on this machine and on the nodes")
    found = client.recipes.prepare(Wanted(**wanted), fields=_of_job({**fields, "args": args}))
    session.output.end_progress()
    for note in found.notes if not session.output.is_json else ():
        session.output.note(note)
    made = dict(found.fields)
    ctx.meta["script"], ctx.meta["args"] = made.pop("script"), made.pop("args")
    if fields.get("metric", "") is None and fields["goal"] in (None, "minimize"):  # of a sweep
        fields["metric"] = found.metric
    fields |= made


def _check(file: Path | None, args: list[str]) -> None:
    if file is not None:
        raise UsageError("give a file or --model, not both", hint="a recipe has a script of its own")
    if args and not args[0].startswith("-"):
        hint = f"for an option of your script, put it behind: ugro launch {args[0]} --model …"
        raise UsageError(f"give a script or --model, not both: {args[0]}", hint=hint)


def _of_job(fields: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in fields.items() if value is not None and value not in ((), [])}
    is_best = given.get("nodes") == _BEST  # found later, with this job
    return {name: value for name, value in given.items() if name in JOB_FIELDS and not (is_best and name == "nodes")}


# --- recipe -----------------------------------------------------------------------------------------------------------


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

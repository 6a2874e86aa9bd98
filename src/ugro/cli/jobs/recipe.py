"""``--model``: makes an ordinary launch, or sweep, of a model and a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ugro.cli.jobs.options import JOB_FIELDS
from ugro.cli.session import Session
from ugro.core.errors import UsageError

_BEST = "best"


def apply_recipe(ctx: click.Context, session: Session, file: Path | None, fields: dict[str, Any]) -> None:
    """With ``--model``: the script, its words and the fields become the recipe's. Says first whether it fits."""
    from ugro.client.recipes import Wanted

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

"""``ugro sweep``: starts a search for the best settings of a training, follows it, and shows what it found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ugro.cli import candidates
from ugro.cli.jobs.arguments import LaunchCommand
from ugro.cli.jobs.document import job_document
from ugro.cli.jobs.folders import read_folders
from ugro.cli.jobs.options import job_options, recipe_options
from ugro.cli.jobs.origin import code_folder
from ugro.cli.jobs.recipe import apply_recipe
from ugro.cli.session import Session, StartGroup, json_option, pass_session
from ugro.cli.sweep.plan import show_plan
from ugro.cli.sweep.show import document, follow, importance_table, show, summary_row, trial_document
from ugro.core.errors import Interrupted, UgroError, UsageError
from ugro.core.support.quantity import parse_duration
from ugro.core.sweep import METHODS, PRUNERS, Budget

if TYPE_CHECKING:
    from ugro.client.sweeps import SweepWish

_OWN = ("method", "metric", "goal", "target", "prune", "force", "study")
_LISTED = ("SWEEP", "STATE", "TRIALS", "METRIC", "BEST", "CREATED")


class _Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in some releases
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param)


class _Extension(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # as above
    """A number, or a number to add: ``+20``."""

    name = "trials"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, bool]:
        text = str(value)
        if not text.removeprefix("+").isdecimal() or int(text) < 1:
            self.fail(f"expected a number such as 60 or +20, got {text!r}", param)
        return int(text), text.startswith("+")


class SweepGroup(StartGroup):
    """``ugro sweep SCRIPT …`` starts a sweep; ``ugro sweep COMMAND`` is about sweeps."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["SCRIPT [RANGES]... | -f FILE | COMMAND NAME"]


@click.group(cls=SweepGroup)
def sweep() -> None:
    """Search for the best settings of a training.

    All options of a new sweep, such as --trials, --metric, --prune and --gpus-per-node: ugro sweep start --help

    \b
    Examples:
      ugro sweep train.py --lr "1e-5,2e-5,5e-5" --batch_size "1,2"
      ugro sweep train.py --lr log:1e-5..1e-2 --layers 2..8 --trials 40 --metric val/loss --prune asha
      ugro sweep -f sweep.yaml --parallel 3
      ugro sweep --study search.py --parallel 4
      ugro sweep best NAME
    """


@sweep.command(cls=LaunchCommand)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A sweep file, as W&B has them (docs/sweeps.md).")
@click.option("--study", is_flag=True, help="The script has an Optuna study: run it as several workers of that.")
@click.option("--method", type=click.Choice(METHODS), help="Default: grid if all points can be tried, else bayes.")
@click.option("--metric", metavar="NAME", help="The metric to compare, as the script logs it.")
@click.option("--goal", type=click.Choice(["minimize", "maximize"]), help="Default: minimize.")
@click.option("--target", type=float, help="Start no more trials once a trial is as good as this.")
@click.option("--prune", type=click.Choice([*PRUNERS, "none"]), help="End trials that are worse at the same step.")
@click.option("--trials", type=click.IntRange(1, 1_000_000), help="The most trials to make.")
@click.option("--parallel", type=click.IntRange(1, 10_000), help="The most trials at once. Default: as many as fit.")
@click.option("--trials-per-gpu", type=click.IntRange(1, 16), default=1, help="Trials that share each GPU.")
@click.option("--max-time", "time_s", type=_Duration(), metavar="TIME", help="Start no more after this time: 8h.")
@click.option("--gpu-hours", type=click.FloatRange(min=0, min_open=True), help="Start no more after these GPU-hours.")
@click.option("--no-improvement", type=click.IntRange(1, 1_000_000), help="End after so many trials no better.")
@click.option("--max-failed", type=click.IntRange(1, 1_000_000), help="Stop when more trials than this have failed.")
@recipe_options
@job_options(submits=False)
@click.option("--dry-run", is_flag=True, help="Show the space and the first trials; start nothing.")
@click.option("--detach", "-d", is_flag=True, help="Do not wait for the sweep.")
@json_option
@pass_session
@click.pass_context
def start(ctx: click.Context, session: Session, /, file: Path | None, **fields: Any) -> int:
    """Start a sweep: ugro sweep start SCRIPT, or without the word start.

    Runs SCRIPT once for each point, as ordinary jobs. An option of SCRIPT whose value is a list or a range is searched;
    all others are passed as they are. Ctrl-C detaches: the sweep continues. With --json, the sweep is started and
    printed, and ugro does not wait for it.

    \b
    Ranges:
      --lr "1e-5,2e-5"        these values
      --layers 2..8           whole numbers
      --dropout 0.0..0.5      numbers; with a step: 0.0..0.5:0.1
      --lr log:1e-5..1e-2     numbers, each order of magnitude as likely
    """
    apply_recipe(ctx, session, file, fields)
    script = ctx.meta["script"]
    if file is None and script is None:
        raise UsageError("a script or a sweep file is needed", hint='ugro sweep train.py --lr "0.1,0.01"')
    is_dry, detach = fields.pop("dry_run"), fields.pop("detach")
    wish = _wish({**fields, "script": script, "args": ctx.meta["args"]})
    client = session.client(uses_nodes=True)
    code_folder(session.output, file, wish.fields)
    session.output.progress("reading the code")
    if is_dry:
        show_plan(session.output, client.sweeps.plan(file, wish))
        return 0
    try:
        read_folders(session.output, client, None, dict(wish.fields))
        found = client.sweeps.start(file, wish)
    except KeyboardInterrupt:
        client.close()
        raise Interrupted("interrupted: not known whether the sweep was started", hint="look: ugro sweep ls") from None
    session.output.end_progress()
    if session.output.is_json:
        session.output.document({"sweep": document(found)})
        return 0
    for note in found.notes:
        session.output.note(f"note: {note}")
    if found.total is None and found.budget.time_s is None and found.budget.gpu_s is None and not wish.study:
        session.output.note(f"note: it has no limit, such as --trials; end it with: ugro sweep stop {found.name}")
    if detach:
        session.output.note(f"sweep {found.name} runs; follow it: ugro sweep status {found.name} --follow")
        return 0
    return follow(session.output, client, found)


def _wish(given: dict[str, Any]) -> SweepWish:
    from ugro.client.sweeps import SweepWish

    hours = given.pop("gpu_hours")
    own = {name: given.pop(name) for name in _OWN}
    names = ("trials", "time_s", "no_improvement", "parallel", "max_failed", "trials_per_gpu")
    limits = {name: given.pop(name) for name in names}
    budget = Budget(**limits, gpu_s=None if hours is None else 3600 * hours)
    fields = {name: value for name, value in given.items() if value is not None and value not in ((), [])}
    return SweepWish(fields, budget=budget, **{**own, "force": bool(own["force"])})


@sweep.command()
@json_option
@pass_session
def ls(session: Session) -> None:
    """List sweeps, the newest first."""
    found = session.client().sweeps.newest()
    if session.output.is_json:
        session.output.document({"sweeps": [document(one) for one in found]})
    elif found:
        session.output.table(_LISTED, [summary_row(one) for one in found])
    else:
        session.output.note('no sweeps; start one: ugro sweep train.py --lr "0.1,0.01"')


@sweep.command()
@click.argument("name", default="last", shell_complete=candidates.sweeps)
@click.option("--follow", "-F", "follows", is_flag=True, help="Show it live until it is over.")
@json_option
@pass_session
def status(session: Session, name: str, follows: bool) -> int:
    """Show a sweep and its trials (default: the last sweep)."""
    client = session.client()
    found = client.sweeps.get(name)
    if session.output.is_json:
        session.output.document({"sweep": document(found)})
        return 0
    if follows and not found.is_over:
        return follow(session.output, client, found)
    show(session.output, found)
    return 0


@sweep.command()
@click.argument("name", default="last", shell_complete=candidates.sweeps)
@click.option("--launch", is_flag=True, help="Submit a job with the best settings.")
@json_option
@pass_session
def best(session: Session, name: str, launch: bool) -> int:
    """Show the best trial, or launch its settings again."""
    client, output = session.client(), session.output
    found = client.sweeps.get(name)
    trial = found.best_trial
    if trial is None:
        raise UsageError(f"sweep {found.name} has no best trial", hint=_why_none(found.metric, found.name))
    job = client.sweeps.launch_best(found.id) if launch else None
    if output.is_json:
        more = {} if job is None else {"job": job_document(job)}
        output.document({"best": trial_document(trial), "sweep": found.name, **more})
        return 0
    output.text(f"trial {trial.number} (job {trial.job}): {found.metric} {trial.best:.6g} best, {trial.last:.6g} last")
    for key, value in trial.values.items():
        output.text(f"  {key} = {value}")
    if job is not None:
        output.note(f"job {job.id} {job.spec.name} is {job.state}; follow it: ugro logs {job.id} -f")
    return 0


def _why_none(metric: str | None, name: str) -> str:
    return f"see: ugro sweep status {name}" if metric else "start it with --metric NAME to compare its trials"


@sweep.command()
@click.argument("name", default="last", shell_complete=candidates.sweeps)
@json_option
@pass_session
def stop(session: Session, name: str) -> None:
    """Stop a sweep and its running trials.

    ugro sweep resume continues it; the trials that were stopped are made again.
    """
    found = session.client().sweeps.stop(name)
    if session.output.is_json:
        session.output.document({"sweep": document(found)})
    else:
        session.output.note(f"sweep {found.name} is {found.state}; continue it: ugro sweep resume {found.name}")


@sweep.command()
@click.argument("name", default="last", shell_complete=candidates.sweeps)
@click.option("--trials", type=_Extension(), metavar="N", help="The most trials, or how many more: +20.")
@click.option("--parallel", type=click.IntRange(1, 10_000), help="The most trials at once.")
@click.option("--detach", "-d", is_flag=True, help="Do not wait for the sweep.")
@json_option
@pass_session
def resume(
    session: Session, name: str, trials: tuple[int, bool] | None, parallel: int | None, detach: bool
) -> int:
    """Continue a sweep that was stopped or is done."""
    client = session.client(uses_nodes=True)
    count, is_more = trials or (None, False)
    found = client.sweeps.resume(
        name, trials=None if is_more else count, more_trials=count if is_more else None, parallel=parallel
    )
    if session.output.is_json:
        session.output.document({"sweep": document(found)})
        return 0
    if detach:
        session.output.note(f"sweep {found.name} runs; follow it: ugro sweep status {found.name} --follow")
        return 0
    return follow(session.output, client, found)


@sweep.command()
@click.argument("name", default="last", shell_complete=candidates.sweeps)
@json_option
@pass_session
def importance(session: Session, name: str) -> None:
    """Show how much each parameter matters.

    Of the differences between complete trials, the share that each parameter explains (PED-ANOVA).
    """
    found = session.client().sweeps.importance(name)
    if session.output.is_json:
        session.output.document({"importance": found})
    else:
        importance_table(session.output, found)


@sweep.command()
@click.argument("name", default="last", shell_complete=candidates.sweeps)
@click.option("-o", "--output", "path", type=click.Path(path_type=Path, dir_okay=False), help="Default: NAME.html.")
@pass_session
def report(session: Session, name: str, path: Path | None) -> None:
    """Write a sweep as one HTML file.

    The file has the history, parallel coordinates, importances and the table of trials, also as CSV. It needs no
    server and loads nothing.
    """
    found, text = session.client().sweeps.html(name)
    path = path or Path(f"{found.name}.html")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UgroError(f"{path}: {(error.strerror or str(error)).lower()}", hint="choose another: -o FILE") from None
    session.output.text(str(path))

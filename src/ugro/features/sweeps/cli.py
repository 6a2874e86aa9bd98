"""``ugro sweep``: starts a search for the best settings of a training, follows it, and shows what it found."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ugro.cli import candidates
from ugro.cli.jobs.describe import ago
from ugro.cli.jobs.document import job_document
from ugro.cli.jobs.folders import read_folders
from ugro.cli.jobs.options import LaunchCommand, job_options, recipe_options
from ugro.cli.jobs.origin import code_folder
from ugro.cli.output import Cell, Output, Style
from ugro.cli.session import Session, StartGroup, json_option, pass_session
from ugro.client.client import Client
from ugro.client.http import account
from ugro.client.jobs import new_key
from ugro.features.recipes.cli import apply_recipe
from ugro.features.sweeps.client import SweepWish, extended, html
from ugro.features.sweeps.model import (
    METHODS,
    PRUNERS,
    Budget,
    Importance,
    SweepPlan,
    SweepReport,
    SweepState,
    Trial,
    TrialState,
)
from ugro.features.sweeps.operations import (
    GetImportance,
    GetSweep,
    LaunchBestOfSweep,
    ListSweeps,
    ResumeSweep,
    StopSweep,
)
from ugro.kernel.support import moments as clock
from ugro.kernel.support.errors import Interrupted, UgroError, UsageError
from ugro.kernel.support.moments import instant_of
from ugro.kernel.support.quantities import format_duration, parse_duration

# --- plan -------------------------------------------------------------------------------------------------------------
# ``ugro sweep --dry-run``: what would be searched, and the first trials.


def show_plan(output: Output, plan: SweepPlan) -> None:
    output.end_progress()
    if output.is_json:
        first = [{"number": one.number, "parameters": one.values, "argv": one.argv} for one in plan.first]
        output.document({"plan": {**asdict(plan), "first": first}})
        return
    for note in plan.notes:
        output.note(f"note: {note}")
    for line in _lines(plan):
        output.text(line)
    output.note("nothing was started")


def _lines(plan: SweepPlan) -> Iterator[str]:
    prune = f", ends early by {plan.prune}" if plan.prune else ""
    goal = f"{plan.goal} {plan.metric}" if plan.metric else "no metric: the trials are not compared"
    yield f"sweep {plan.name}: {plan.method}, {goal}{prune}"
    width = max(len(one.name) for one in plan.space)
    for one in plan.space:
        yield f"  {one.name:{width}}  {one.words}"
    yield f"points: {plan.points if plan.points is not None else 'without end'}; {_budget(plan.total, plan.budget)}"
    if plan.starts_now:
        yield f"the first trial would start now on {plan.where}: {plan.reason}"
    else:
        where = f" for {plan.where}" if plan.where else ""
        yield f"the first trial would wait{where}: {plan.reason}"
    yield "the first trials, if none of them ends meanwhile:"
    for trial in plan.first:
        yield f"  {trial.number}  {shlex.join(trial.argv)}"
    if plan.total is None or plan.total > len(plan.first):
        yield "  …"


def _budget(total: int | None, budget: Budget) -> str:
    parts = [f"at most {total} trials" if total is not None else "trials without a limit"]
    if budget.time_s is not None:
        parts.append(f"{format_duration(budget.time_s)} of time")
    if budget.gpu_s is not None:
        parts.append(f"{budget.gpu_s / 3600:g} GPU-hours")
    if budget.no_improvement is not None:
        parts.append(f"ends after {budget.no_improvement} trials without improvement")
    parts.append(f"{budget.parallel} at once" if budget.parallel is not None else "as many at once as fit")
    if budget.trials_per_gpu > 1:
        parts.append(f"{budget.trials_per_gpu} on each GPU")
    return ", ".join(parts)


# --- show -------------------------------------------------------------------------------------------------------------
# How a sweep looks: a table of its trials, live on a terminal, and as a document.


_STYLES: dict[TrialState, Style] = {
    TrialState.COMPLETE: "good",
    TrialState.FAILED: "bad",
    TrialState.INFEASIBLE: "warn",
    TrialState.PRUNED: "dim",
    TrialState.CANCELLED: "warn",
    TrialState.STOPPED: "warn",
}
_SWEEP_STYLES: dict[SweepState, Style] = {SweepState.DONE: "good", SweepState.FAILED: "bad"}
_BAR = 30
_LIVE_ROWS = 12


def document(found: SweepReport) -> dict[str, Any]:
    """For programs: the values of parameters as they are."""
    own = asdict(found)
    own["trials"] = [trial_document(trial) for trial in found.trials]
    own["workers"] = [{"job": one.job, "state": one.state, "reason": one.reason} for one in found.workers]
    return own


def trial_document(trial: Trial) -> dict[str, Any]:
    own = asdict(trial)
    for name in ("settings", "asked", "ending", "memory"):
        del own[name]
    own["parameters"] = trial.values
    own["history"] = [[point.step, point.value] for point in trial.history]
    return own


def follow(output: Output, client: Client, found: SweepReport) -> int:
    """0 if it ended in good order; 130 if we detached."""
    output.note(f"sweep {found.name}: {_size(found)}, {found.method}")
    try:
        for seen in client.sweeps.watch(found.id):
            found = seen
            output.progress(*_headlines(found), table=output.table_lines(*_live_table(output, found)))
    except KeyboardInterrupt:
        stop = f"stop it: ugro sweep stop {found.name}"
        output.note(f"detached: sweep {found.name} continues; see: ugro sweep status {found.name} · {stop}")
        return 130
    output.end_progress()
    show(output, found)
    return 0 if found.state is SweepState.DONE else 1


def show(output: Output, found: SweepReport) -> None:
    output.table(*_table(found, found.trials))
    for line in _headlines(found):
        output.note(line)


def summary_row(found: SweepReport) -> list[Cell]:
    ended = sum(not trial.is_open for trial in found.trials)
    best = found.best_trial
    trials = f"{ended}/{found.total}" if found.total is not None else str(ended)
    return [
        Cell(found.name, "id"),
        Cell(found.state, _SWEEP_STYLES.get(found.state, "")),
        Cell(trials, is_number=True),
        Cell(found.metric or ""),
        Cell(_number(best.best if best else None), is_number=True),
        Cell(ago(instant_of(found.created_at, None), clock.now())),
    ]


def importance_table(output: Output, found: Sequence[Importance]) -> None:
    rows = [
        [Cell(one.parameter), Cell(f"{one.share:.3f}", is_number=True), Cell("█" * round(_BAR * one.share))]
        for one in found
    ]
    output.table(("PARAMETER", "IMPORTANCE", ""), rows)


def _live_table(output: Output, found: SweepReport) -> tuple[list[str], list[list[Cell]]]:
    """The best trials, and those that run."""
    running = [trial for trial in found.trials if trial.state is TrialState.RUNNING]
    sign = -1 if found.goal == "maximize" else 1
    ended = [trial for trial in found.trials if not trial.is_open]
    ended.sort(key=lambda one: (one.best is None, sign * (one.best or 0.0)))
    room = max(2, min(_LIVE_ROWS, output.room - 4))
    shown = [*ended[: max(1, room - len(running))], *running][:room]
    return _table(found, shown)


def _headlines(found: SweepReport) -> list[str]:
    counts = {state: sum(trial.state is state for trial in found.trials) for state in TrialState}
    words = [f"{count} {state}" for state, count in counts.items() if count]
    left = f", about {format_duration(found.eta_s)} left" if found.eta_s is not None and found.eta_s > 0 else ""
    reason = f": {found.reason}" if found.reason else ""
    first = f"sweep {found.name} is {found.state}{reason}"
    lines = [first, f"{_size(found)}: {', '.join(words) or 'none yet'}{left}"]
    if found.workers:
        said = [f"job {one.job} {one.state}{f': {one.reason}' if one.reason else ''}" for one in found.workers]
        lines.append(f"workers: {', '.join(said)}")
    if (best := found.best_trial) is not None:
        values = ", ".join(f"{name} {_shown(best.values[name])}" for name in found.parameters if name in best.values)
        lines.append(f"best: trial {best.number}, {found.metric} {_number(best.best)} with {values}")
    return lines


def _table(found: SweepReport, trials: Sequence[Trial]) -> tuple[list[str], list[list[Cell]]]:
    metric = [f"{found.metric} best", "last", "STEP"] if found.metric else []
    header = ["TRIAL", "JOB", "STATE", *found.parameters, *metric, "TOOK", "REASON"]
    return header, [_row(found, trial) for trial in trials]


def _row(found: SweepReport, trial: Trial) -> list[Cell]:
    values = trial.values
    measured = [
        Cell(_number(trial.best), "bold" if trial.number == found.best else "", is_number=True),
        Cell(_number(trial.last), is_number=True),
        Cell("" if trial.step is None else str(trial.step), is_number=True),
    ]
    return [
        Cell(str(trial.number), "id", is_number=True),
        Cell("" if trial.job is None else str(trial.job), is_number=True),
        Cell(trial.state, _STYLES.get(trial.state, "")),
        *(Cell(_shown(values.get(name)), is_number=_is_number(values.get(name))) for name in found.parameters),
        *(measured if found.metric else []),
        Cell("" if trial.took_s is None else format_duration(trial.took_s), is_number=True),
        Cell(trial.reason),
    ]


def _size(found: SweepReport) -> str:
    if found.total is not None:
        return f"{found.total} trials"
    # Its script says how many (n_trials) when it runs.
    return "as many trials as its script makes" if found.method == "study" else "trials without a limit"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# --- command ----------------------------------------------------------------------------------------------------------


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
    found = session.client().ask(ListSweeps()).sweeps
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
    found = client.ask(GetSweep(name)).sweep
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
    found = client.ask(GetSweep(name)).sweep
    trial = found.best_trial
    if trial is None:
        raise UsageError(f"sweep {found.name} has no best trial", hint=_why_none(found.metric, found.name))
    job = client.ask(LaunchBestOfSweep(str(found.id), account(), new_key())).job if launch else None
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
    found = session.client().ask(StopSweep(name)).sweep
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
    if count is not None and is_more:
        asked = extended(client, name, more_trials=count, parallel=parallel)
    else:
        asked = ResumeSweep(name, count, parallel)
    found = client.ask(asked).sweep
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
    found = session.client().ask(GetImportance(name)).importance
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
    found, text = html(session.client(), name)
    path = path or Path(f"{found.name}.html")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UgroError(f"{path}: {(error.strerror or str(error)).lower()}", hint="choose another: -o FILE") from None
    session.output.text(str(path))

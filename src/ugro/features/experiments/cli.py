"""``ugro experiment``: trains models in several ways, and reports on it; ``ugro compare``; ``ugro note``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ugro.cli import candidates
from ugro.cli.jobs.document import job_document
from ugro.cli.jobs.options import job_options
from ugro.cli.output import Cell
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.features.experiments.operations import ChangeJobNote, CompareJobs, GetJobNote
from ugro.features.sweeps.model import SweepState
from ugro.kernel.support.errors import Interrupted, NotFound, UsageError

if TYPE_CHECKING:
    from ugro.client.client import Client
    from ugro.features.experiments.client import Measured
    from ugro.features.experiments.rules.comparison import Row
    from ugro.features.sweeps.model import SweepReport


_LISTED = ("EXPERIMENT", "STATE", "RUNS", "CREATED")
_BALANCE = "balance"  # the experiment that there is
_OF_WISH = ("models", "modes", "seeds", "size", "epochs", "precision", "accumulate", "compress", "staleness")
_NAME = click.argument("name", default="last", shell_complete=candidates.sweeps)
_PLACE = click.Path(path_type=Path, file_okay=False)
_WHERE = "Where to write the report. Default: experiment-NAME."


class _Words(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in some releases
    """A list such as ``gpt,bert``."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(word.strip() for word in str(value).split(",") if word.strip())


class _Numbers(_Words):
    """A list such as ``1,4``."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        words = super().convert(value, param, ctx)
        if wrong := [word for word in words if not str(word).isdecimal()]:
            self.fail(f"expected whole numbers such as 1,4, got {wrong[0]!r}", param)
        return tuple(int(word) for word in words)


@click.group(cls=CommandGroup)
def experiment() -> None:
    """Compare ways to train on your nodes, with a report.

    \b
    Examples:
      ugro experiment run balance --models gpt,bert --modes uniform,adaptive --seeds 3
      ugro experiment run balance --models gpt --modes adaptive --precision fp32,bf16 --nodes 3
      ugro experiment report last
    """


@experiment.command()
@click.argument("what", required=False, metavar=_BALANCE)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="An experiment file, as a report has it.")
@click.option("--models", type=_Words(), help="Of gpt, bert, resnet50. Default: all.")
@click.option("--modes", type=_Words(), help="Of uniform, static, adaptive, local. Default: the first three.")
@click.option("--seeds", type=click.IntRange(1, 100), help="Runs of each combination. Default: 3.")
@click.option("--size", type=click.Choice(["tiny", "small", "full"]), help="Of the models. Default: tiny.")
@click.option("--epochs", type=click.IntRange(1, 10_000), help="Default: by the size.")
@click.option("--precision", type=_Words(), help="Ablation: fp32,bf16.")
@click.option("--accumulate", type=_Numbers(), help="Ablation: parts in which ranks compute their shares: 1,4.")
@click.option("--compress", type=_Words(), help="Ablation: how gradients are sent: none,fp16,powersgd.")
@click.option("--staleness", type=_Numbers(), help="Ablation of local updates: the most rounds of delay: 0,2.")
@click.option("--parallel", type=click.IntRange(1, 100), help="Runs at once. Default: 1, as they disturb others.")
@click.option("--resume", is_flag=True, help="Continue the experiment of this name.")
@click.option("-o", "--report", "place", type=_PLACE, metavar="DIR", help=_WHERE)
@job_options(submits=False, without=("balance", "workdir", "job_seed"))
@click.option("--dry-run", is_flag=True, help="Show the runs; start nothing.")
@click.option("--detach", "-d", is_flag=True, help="Do not wait for the experiment.")
@json_option
@pass_session
def run(session: Session, /, what: str | None, file: Path | None, place: Path | None, **fields: Any) -> int:
    """Train models in several ways, one run after the other, and write a report.

    Every model is trained in every mode and with every ablation, once per seed. The models and their data are small by
    default and made on the spot: nothing is downloaded. Modes: uniform gives each device the same share of a batch,
    static follows measured or rated speeds, adaptive what ranks measure while they train, and local lets each rank
    train alone for a while. Without --nodes, every run takes all nodes that can be used.

    Runs are ordinary jobs of a sweep. Ctrl-C detaches, and the experiment continues; so it does if the agent is killed.
    """
    resume, detach, is_dry = (fields.pop(name) for name in ("resume", "detach", "dry_run"))
    tree = _tree(what, file, fields)
    name = fields.get("name") or _BALANCE
    client = session.client(uses_nodes=True)
    if is_dry:
        from ugro.features.sweeps.cli import show_plan

        show_plan(session.output, client.experiments.plan(name, tree))
        return 0
    found = _begun(client, name, tree, resume=resume)
    if session.output.is_json:
        from ugro.features.sweeps.cli import document

        session.output.document({"experiment": document(found)})
        return 0
    if detach:
        session.output.note(f"experiment {found.name} runs; see: ugro experiment status {found.name}")
        return 0
    return _followed(session, client, found, place)


def _tree(what: str | None, file: Path | None, fields: dict[str, Any]) -> dict[str, Any]:
    wished = {name: fields.pop(name) for name in _OF_WISH}
    wished = {name: value for name, value in wished.items() if value is not None}
    parallel, given = fields.pop("parallel"), {name: value for name, value in fields.items() if name != "name"}
    job = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    job = {name: value for name, value in job.items() if value not in (None, [], False)}
    if parallel is not None:
        job["max_parallel"] = parallel
    if file is not None:
        return _of_file(what, file, [*wished, *job])
    if what != _BALANCE:
        known = "there is: balance, or a file with -f"
        raise UsageError("an experiment is needed" if what is None else f"unknown experiment {what!r:.60}", hint=known)
    from ugro.features.experiments.cli_show import abilities
    from ugro.features.experiments.client import Wish, document

    return document(Wish(**wished), abilities(), job)


def _of_file(what: str | None, file: Path, others: list[str]) -> dict[str, Any]:
    from ugro.features.experiments.client import read_file

    if what is not None or others:
        given = f"--{others[0].replace('_', '-')}" if others else what
        raise UsageError(f"-f and {given} exclude each other", hint="change the file")
    return read_file(file)


def _begun(client: Client, name: str, tree: dict[str, Any], *, resume: bool) -> SweepReport:
    if resume:
        try:
            return client.experiments.resume(name, tree)
        except NotFound:  # it was killed before it was recorded
            pass
    try:
        return client.experiments.start(name, tree)
    except KeyboardInterrupt:
        client.close()
        hint = "continue it: the same command with --resume"
        raise Interrupted("interrupted: not known whether the experiment was started", hint=hint) from None


def _followed(session: Session, client: Client, found: SweepReport, folder: Path | None) -> int:
    from ugro.features.experiments.cli_show import follow, show, written

    ended = follow(session.output, client, found)
    if ended is None:
        return 130
    measured = client.experiments.measured(ended.id)
    show(session.output, measured)
    written(session.output, client, measured, folder or Path(f"experiment-{ended.name}"))
    return 0 if ended.state is SweepState.DONE and all(run.state == "complete" for run in measured.runs) else 1


@experiment.command()
@json_option
@pass_session
def ls(session: Session) -> None:
    """List experiments, the newest first."""
    from ugro.features.sweeps.cli import document, summary_row

    found = session.client().experiments.newest()
    if session.output.is_json:
        session.output.document({"experiments": [document(one) for one in found]})
    elif found:
        rows = [summary_row(one) for one in found]
        session.output.table(_LISTED, [[*row[:3], row[-1]] for row in rows])
    else:
        session.output.note("no experiments; start one: ugro experiment run balance")


@experiment.command()
@_NAME
@click.option("--follow", "-F", "follows", is_flag=True, help="Wait until it is over.")
@json_option
@pass_session
def status(session: Session, name: str, follows: bool) -> int:
    """Show what an experiment has measured until now (default: the last one)."""
    from ugro.features.experiments.cli_show import follow, show

    client = session.client()
    if follows and not session.output.is_json:
        found = client.experiments.get(name)
        if not found.is_over and follow(session.output, client, found) is None:
            return 130
        name = str(found.id)
    measured = client.experiments.measured(name)
    if session.output.is_json:
        session.output.document({"experiment": _document(measured)})
    else:
        show(session.output, measured)
    return 0


@experiment.command()
@_NAME
@click.option("-o", "--output", "folder", type=_PLACE, metavar="DIR", help=_WHERE)
@json_option
@pass_session
def report(session: Session, name: str, folder: Path | None) -> None:
    """Write a report: a page with figures, and the raw data beside it.

    The page needs no server and loads nothing. A file beside it runs the experiment again.
    """
    from ugro.features.experiments.cli_show import machine_lines

    client = session.client()
    measured = client.experiments.measured(name)
    folder = folder or Path(f"experiment-{measured.sweep.name}")
    paths = client.experiments.write(measured, folder, machine_lines(client, measured))
    if session.output.is_json:
        session.output.document({"report": {"files": [str(path) for path in paths]}})
    else:
        session.output.text(str(paths[0]))


@experiment.command()
@_NAME
@json_option
@pass_session
def stop(session: Session, name: str) -> None:
    """Stop an experiment and its run; ugro experiment resume continues it."""
    _after(session, session.client().experiments.stop(name), "continue it: ugro experiment resume")


@experiment.command()
@_NAME
@json_option
@pass_session
def resume(session: Session, name: str) -> None:
    """Continue an experiment that was stopped.

    The run that was stopped is made again.
    """
    client = session.client(uses_nodes=True)
    _after(session, client.experiments.resume(name), "follow it: ugro experiment status --follow")


def _after(session: Session, found: SweepReport, hint: str) -> None:
    if session.output.is_json:
        from ugro.features.sweeps.cli import document

        session.output.document({"experiment": document(found)})
    else:
        session.output.note(f"experiment {found.name} is {found.state}; {hint} {found.name}")


def _document(measured: Measured) -> dict[str, Any]:
    from ugro.features.experiments.client import as_document

    return as_document(measured)


# --- compare ----------------------------------------------------------------------------------------------------------
# ``ugro compare``.


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB JOB...", shell_complete=candidates.jobs)
@click.option("--all", "-a", "is_all", is_flag=True, help="Also show what is the same.")
@json_option
@pass_session
def compare(session: Session, jobs: tuple[str, ...], is_all: bool) -> int:
    """Show what differs between jobs.

    Compares parameters, command, environment, code, packages, nodes, settings and metrics of two or more jobs. A name
    means the newest job of that name that is not among the others.

    \b
    Examples:
      ugro compare 12 13
      ugro compare train last
    """
    if len(jobs) < 2:
        raise UsageError("give at least two jobs", hint="ugro compare 12 13")
    found = session.client().ask(CompareJobs(jobs))
    rows = [row for row in found.rows if is_all or not row.is_same]
    if session.output.is_json:
        facts = [{"key": row.key, "is_same": row.is_same, "values": row.values} for row in rows]
        session.output.document({"jobs": [job_document(job) for job in found.jobs], "rows": facts})
    elif not rows:
        session.output.note("no differences")
    else:
        header = ("FACT", *(f"JOB {job.id}" for job in found.jobs))
        session.output.table(header, [_cells(row) for row in rows])
    return 0


def _cells(row: Row) -> list[Cell]:
    return [Cell(row.key), *(Cell(value or "-", "" if row.is_same else "warn") for value in row.values)]


# --- note -------------------------------------------------------------------------------------------------------------
# ``ugro note``.


@click.command()
@click.argument("job", shell_complete=candidates.jobs)
@click.argument("text", required=False)
@click.option("--tag", "-t", "tags", multiple=True, metavar="TAG", help="Add a tag. May be repeated.")
@click.option("--untag", multiple=True, metavar="TAG", help="Remove a tag. May be repeated.")
@json_option
@pass_session
def note(session: Session, job: str, text: str | None, tags: tuple[str, ...], untag: tuple[str, ...]) -> int:
    """Show or change the note and tags of a job.

    TEXT replaces the note; an empty TEXT removes it.

    \b
    Example:
      ugro note last "larger batch" --tag baseline
    """
    if both := sorted(set(tags) & set(untag)):
        raise UsageError(f"the tag {both[0]} is added and removed", hint="use one of --tag and --untag")
    client = session.client()
    is_change = text is not None or tags or untag
    found = client.ask(ChangeJobNote(job, text, add=tags, remove=untag) if is_change else GetJobNote(job)).note
    output = session.output
    if output.is_json:
        output.document({"note": found})
        return 0
    if found.tags:
        output.text(f"tags  {' '.join(found.tags)}")
    if found.text:
        output.block(found.text)
    if not found.tags and not found.text:
        output.note(f"job {found.job} has no note" + ("" if is_change else f'; write one: ugro note {found.job} "…"'))
    return 0

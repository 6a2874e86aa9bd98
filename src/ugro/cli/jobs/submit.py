"""Jobs go in: ``run``, ``launch`` and ``retry``. What becomes of them is shown by their siblings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ugro.cli.jobs.arguments import LaunchCommand, RunCommand
from ugro.cli.jobs.attach import attend
from ugro.cli.jobs.document import job_document
from ugro.cli.jobs.origin import origin_of
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.core.errors import UsageError
from ugro.core.job import Job, JobSpec, Launcher

F = TypeVar("F", bound=Callable[..., Any])

_EVERY = (
    click.option("--name", help="What to call it; default: after its script or program."),
    click.option("--gpus-per-node", metavar="N|all", help="How many GPUs of each node."),
    click.option("--gpu-memory", metavar="SIZE", help="Least memory of a GPU, such as 8GB."),
    click.option("--gpu-model", multiple=True, metavar="WORD", help="A word of the GPU's name; may be repeated."),
    click.option("--cpus", metavar="N", help="Cores on each node."),
    click.option("--memory", metavar="SIZE", help="Memory on each node, such as 16GB."),
    click.option("--label", multiple=True, help="Only nodes that carry it; may be repeated."),
    click.option("--priority", metavar="P", help="urgent, normal, batch, or 0 to 100."),
    click.option("--preemptible/--no-preemptible", default=None, help="Whether a more urgent job may take its place."),
    click.option("--time-limit", metavar="TIME", help="End it after this long, such as 12h."),
    click.option("--after", multiple=True, metavar="JOB", help="Start when it has succeeded; may be repeated."),
    click.option("--after-any", multiple=True, metavar="JOB", help="Start when it has ended; may be repeated."),
    click.option("--retries", metavar="N", help="Try again so often when its program fails."),
    click.option("--retry-on", multiple=True, metavar="CAUSE", help="Only then (see docs/jobs.md); may be repeated."),
    click.option("--never-retry-on", multiple=True, metavar="CAUSE", help="Never then; may be repeated."),
    click.option("--checkpoint-dir", metavar="DIR", help="Where it keeps its checkpoints."),
    click.option("--checkpoint-every", metavar="TIME", help="How often it should write one."),
    click.option("--lost-after", metavar="TIME", help="How long until a silent node counts as lost."),
    click.option("--on-lost", metavar="wait|restart", help="What to do then."),
    click.option("--stop-signal", metavar="NAME", help="What tells it to end; default TERM."),
    click.option("--stop-grace", metavar="TIME", help="How long it then has; default 30s."),
    click.option("--env", "-e", multiple=True, metavar="KEY[=VALUE]", help="Add to its environment; may be repeated."),
    click.option("--setup", metavar="TEXT", help="A shell snippet to run first, once per node and content."),
    click.option("--workdir", metavar="DIR", help="Where its code is, here; default: this folder."),
    click.option("--cwd", metavar="DIR", help="Where to run it, on the nodes; default: in a copy of its code."),
    click.option("--sync/--no-sync", default=None, help="Whether the code in --workdir goes along; default: it does."),
    click.option("--force", is_flag=True, help="Send the code however large it is."),
    click.option("--output", multiple=True, metavar="PATTERN", help="Files to bring home; may be repeated."),
    click.option("--result-checkpoints", metavar="RULE", help="Which come home: all, none, best, or 'last N'."),
    click.option("--result-limit", metavar="SIZE", help="How much comes home of an attempt, small files first."),
    click.option("--job-seed", metavar="N", help="Given to its processes as UGRO_SEED."),
    click.option("--cache-input", multiple=True, metavar="FILE", help="Counts for --cache by content; repeatable."),
    click.option("--cache/--no-cache", default=None, help="Do not run what has succeeded before, all the same."),
    click.option("--notify", multiple=True, help="A channel that is told when it ends; repeatable."),
    click.option("--dry-run", is_flag=True, help="Show the exact plan; submit nothing."),
    click.option("--detach", "-d", is_flag=True, help="Do not wait for it."),
)


def _job_options(command: F) -> F:
    for option in reversed(_EVERY):
        command = option(command)
    return command


@click.command(cls=RunCommand)
@_job_options
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@pass_session
def run(session: Session, /, command: tuple[str, ...], dry_run: bool, detach: bool, **fields: Any) -> int:
    """Run COMMAND as a job on the best node, show its output, and return its exit code.

    Options stand before the command. Ctrl-C detaches: the job goes on. With --json the job is submitted, shown, and not
    waited for.
    """
    return _hand_in(session, None, {**fields, "command": list(command)}, dry_run=dry_run, detach=detach)


@click.command(cls=LaunchCommand)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A job file (see docs/jobs.md).")
@click.option("--nodes", metavar="N", help="On how many nodes: 3, or 2..4.")
@click.option("--launcher", metavar="NAME", help="ddp (torchrun's environment, by ugro itself) or torchrun.")
@click.option("--balance", metavar="MODE", help="How ugro.train shares a batch: off, static or adaptive.")
@_job_options
@json_option
@pass_session
@click.pass_context
def launch(
    ctx: click.Context, session: Session, /, file: Path | None, dry_run: bool, detach: bool, **fields: Any
) -> int:
    """Launch SCRIPT with torchrun's environment on every device, on as many nodes as asked for.

    The options below may stand before and after SCRIPT; all others are the script's. For an option of the script that
    is named like one of these, put a -- before the script's words: all behind it is the script's.

    The output of rank 0 is shown, and the job's exit code is returned; Ctrl-C detaches, and the job goes on. With
    --json the job is submitted, shown, and not waited for.
    """
    script, args = ctx.meta["script"], ctx.meta["args"]
    if (file is None) == (script is None):
        problem = "a script or a job file is needed" if file is None else "a script and a job file are one too many"
        raise UsageError(problem, hint="ugro launch train.py --nodes 3, or: ugro launch -f job.yaml")
    given = {**fields, "script": script, "args": args}
    return _hand_in(session, file, given, dry_run=dry_run, detach=detach)


@click.command()
@click.argument("job", default="last")
@click.option("--exact", is_flag=True, help="Only with the very code it ran; says what else has changed since.")
@click.option("--detach", "-d", is_flag=True, help="Do not wait for it.")
@json_option
@pass_session
def retry(session: Session, job: str, exact: bool, detach: bool) -> int:
    """Run JOB, which has ended, once more: as a new job that is the same in all its settings."""
    client = session.client()
    found = client.jobs.retry(job, exact=exact)
    return _submitted(session, client, found, detach=detach)


def _hand_in(
    session: Session, file: Path | None, fields: dict[str, Any], *, dry_run: bool, detach: bool
) -> int:
    client = session.client()
    force = bool(fields.pop("force", False))
    given = {key: value for key, value in fields.items() if value is not None and value != () and value != []}
    if dry_run:
        from ugro.cli.jobs.plan import show_dry_run

        found = client.jobs.dry_run(file, fields=given, force=force)
        show_dry_run(session.output, found)
        _advise(session, client, found.spec, found.placement.nodes if found.placement else ())
        return 0
    try:
        session.output.progress("taking the code as it is now")
        job = client.jobs.submit(file, fields=given, force=force, origin=origin_of(_folder(file, given)))
    except KeyboardInterrupt:
        session.output.note("interrupted while it was submitted; whether it was: ugro status last")
        raise
    return _submitted(session, client, job, detach=detach)


def _folder(file: Path | None, fields: dict[str, Any]) -> Path:
    """Where the code is that goes along, as far as the command line tells."""
    if fields.get("workdir"):
        return Path(fields["workdir"]).expanduser()
    return file.parent if file is not None else Path()


def _submitted(session: Session, client: Client, job: Job, *, detach: bool) -> int:
    output = session.output
    if output.is_json:
        output.document({"job": job_document(job)})
        return 0
    if job.cached_from is not None:
        output.note(f"job {job.id} {job.spec.name} is {job.reason}, which did the same: ugro results {job.id}")
        return 0
    _advise(session, client, job.spec, job.placement.nodes if job.placement else (), before=job.id)
    if detach:
        output.note(f"job {job.id} {job.spec.name} is {job.state}; follow it: ugro logs {job.id} -f")
        return 0
    return attend(output, client, job)


def _advise(session: Session, client: Client, spec: JobSpec, nodes: Sequence[str], before: int | None = None) -> None:
    """Where the same was slower together than some of its nodes would have been, that is said, and nothing refused."""
    if spec.launcher is Launcher.COMMAND or session.output.is_json:
        return
    if (note := client.jobs.advice(spec, nodes=nodes, before=before)) is not None:
        session.output.note(f"note: {note}")

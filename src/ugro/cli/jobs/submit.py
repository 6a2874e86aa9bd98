"""``ugro run``, ``ugro launch`` and ``ugro retry``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ugro.cli import candidates
from ugro.cli.jobs.attach import attach
from ugro.cli.jobs.document import job_document
from ugro.cli.jobs.folders import read_folders
from ugro.cli.jobs.options import LaunchCommand, RunCommand, job_options, recipe_options
from ugro.cli.jobs.origin import code_folder, origin_of
from ugro.cli.jobs.stdin import check_input
from ugro.cli.jobs.submitting import Submitting
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.client.http import account
from ugro.features.planning.cli import BEST, best_nodes
from ugro.features.planning.model import MOST_NODES
from ugro.features.recipes.cli import apply_recipe
from ugro.features.training.operations import GetAdvice
from ugro.kernel.jobs.model import Job, JobSpec, Launcher
from ugro.kernel.jobs.operations import RetryJob
from ugro.kernel.support.errors import UsageError

_NODES = re.compile(r"^[^#\n]*\bnodes[\"']?\s*:", re.MULTILINE)
_ONE_PROCESS = ("nodes", "launcher", "balance", "train_sync")  # options that a single process has no use for


@click.command(cls=RunCommand)
@job_options(without=_ONE_PROCESS)
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=candidates.files)
@pass_session
def run(session: Session, /, command: tuple[str, ...], dry_run: bool, detach: bool, **fields: Any) -> int:
    """Run a command as a job on the best node.

    Shows the output of COMMAND and returns its exit code. COMMAND gets no input. Options of ugro stand before the
    command. Ctrl-C detaches: the job keeps running. With --json, the job is submitted and printed, and ugro does not
    wait for it.

    \b
    Examples:
      ugro run --gpus-per-node 1 python3 evaluate.py
      ugro run -d --name prepare --cpus 4 ./prepare.sh --all
    """
    return _submit(session, None, {**fields, "command": list(command)}, dry_run=dry_run, detach=detach)


@click.command(cls=LaunchCommand)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A job file (see docs/jobs.md).")
@recipe_options
@job_options()
@click.option("--max-nodes", type=click.IntRange(1, MOST_NODES), help="With --nodes best: the most nodes to use.")
@json_option
@pass_session
@click.pass_context
def launch(
    ctx: click.Context, session: Session, /, file: Path | None, dry_run: bool, detach: bool, **fields: Any
) -> int:
    """Launch a training script on one or more nodes.

    Starts SCRIPT once per GPU, or once per node without GPUs, with the environment that torchrun would set. Shows the
    output of rank 0 and returns the job's exit code. Ctrl-C detaches: the job keeps running. With --json, the job is
    submitted and printed, and ugro does not wait for it.

    The options below may stand before and after SCRIPT; all others are passed to the script. If the script has an
    option of the same name, put it behind a --. With --nodes best, the fastest set of nodes is found first, as with
    ugro plan. With --model instead of SCRIPT, a recipe trains that model; what it needs in memory is said first.

    \b
    Examples:
      ugro launch train.py --epochs 10 --nodes 2..4
      ugro launch train.py --nodes best
      ugro launch --model llama-7b --dataset wikitext --nodes 3 --epochs 3 --name experiment_v1
      ugro launch -f job.yaml --dry-run
    """
    apply_recipe(ctx, session, file, fields)
    script, args = ctx.meta["script"], ctx.meta["args"]
    if (file is None) == (script is None):
        problem = "a script or a job file is needed" if file is None else "give a script or a job file, not both"
        raise UsageError(problem, hint="ugro launch train.py --nodes 3, or: ugro launch -f job.yaml")
    given = {**fields, "script": script, "args": args}
    return _submit(session, file, given, dry_run=dry_run, detach=detach)


@click.command()
@click.argument("job", default="last", shell_complete=candidates.jobs)
@click.option("--exact", is_flag=True, help="Fail unless the job's code is still stored; report other changes since.")
@click.option("--no-put-back", is_flag=True, help="Begin without the files that the job made.")
@click.option("--detach", "-d", is_flag=True, help="Do not wait for the job.")
@json_option
@pass_session
def retry(session: Session, job: str, exact: bool, no_put_back: bool, detach: bool) -> int:
    """Run an ended job again.

    Submits a new job with the settings of JOB (default: the last job). If JOB did not succeed, the files that it made
    in its working directory are put back, so that a training goes on at its snapshot.
    """
    under_way = Submitting(session.output)
    try:
        client = under_way.client = session.client(uses_nodes=True)
        put_back = False if no_put_back else None
        found = under_way.job = client.ask(RetryJob(job, under_way.key, account(), exact, put_back))
        return _submitted(session, client, found, detach=detach)
    except KeyboardInterrupt:
        raise under_way.interrupted() from None


def _submit(
    session: Session, file: Path | None, fields: dict[str, Any], *, dry_run: bool, detach: bool
) -> int:
    force = bool(fields.pop("force", False))
    given = {key: value for key, value in fields.items() if value is not None and value != () and value != []}
    most = given.pop("max_nodes", None)
    if most is not None and given.get("nodes") != BEST:
        raise UsageError("--max-nodes is for --nodes best", hint=f"without a plan: --nodes 1..{most}")
    if given.get("nodes") == BEST:
        given = best_nodes(session, file, given, most, force=force)
    code = code_folder(session.output, file, given)
    check_input(session.output, given.get("command") or given.get("args") or ())
    if dry_run:
        return _dry_run(session, file, given, force=force)
    under_way = Submitting(session.output)
    try:
        client = session.client(uses_nodes=True)
        session.output.progress("reading the code")
        origin = origin_of(code)
        read_folders(session.output, client, file, given)
        under_way.client = client
        job = under_way.job = client.jobs.submit(file, options=given, force=force, origin=origin, key=under_way.key)
        _say_of_others(session, file, job.spec, given)
        return _submitted(session, client, job, detach=detach)
    except KeyboardInterrupt:
        raise under_way.interrupted() from None


def _dry_run(session: Session, file: Path | None, fields: dict[str, Any], *, force: bool) -> int:
    from ugro.cli.jobs.document import show_dry_run

    client = session.client(uses_nodes=True)
    read_folders(session.output, client, file, fields)
    found = client.jobs.dry_run(file, options=fields, force=force)
    show_dry_run(session.output, found)
    _say_of_others(session, file, found.spec, fields)
    _advise(session, client, found.spec, found.placement.node_names if found.placement else ())
    return 0


def _submitted(session: Session, client: Client, job: Job, *, detach: bool) -> int:
    output = session.output
    if output.is_json:
        output.document({"job": job_document(job)})
        return 0
    if job.cached_from is not None:
        output.note(f"job {job.id} {job.spec.name} is {job.reason}, an identical job: ugro results {job.id}")
        return 0
    _advise(session, client, job.spec, job.placement.node_names if job.placement else (), before=job.id)
    if detach:
        output.note(f"job {job.id} {job.spec.name} is {job.state}; follow it: ugro logs {job.id} -f")
        return 0
    return attach(output, client, job)


def _say_of_others(session: Session, file: Path | None, spec: JobSpec, given: dict[str, Any]) -> None:
    """Says that a script uses one of several nodes, if nobody has asked for one."""
    wanted = spec.resources
    is_asked = "nodes" in given or wanted.only or wanted.labels or wanted.any_of or _names_nodes(file)
    if spec.launcher is not Launcher.COMMAND and wanted.max_nodes == 1 and session.nodes > 1 and not is_asked:
        session.output.note(f"note: 1 of {session.nodes} nodes; all: --nodes all")
    if given.get("nodes") == "all" and wanted.max_nodes < session.nodes:
        session.output.note(f"note: {wanted.max_nodes} of {session.nodes} nodes can take it; see: ugro health")


def _names_nodes(file: Path | None) -> bool:
    try:
        return file is not None and _NODES.search(file.read_text()) is not None
    except (OSError, ValueError):  # the agent has read it, in a moment when it could be
        return False


def _advise(session: Session, client: Client, spec: JobSpec, nodes: Sequence[str], before: int | None = None) -> None:
    """Notes that fewer nodes were faster the last time. It refuses nothing."""
    if spec.launcher is Launcher.COMMAND or session.output.is_json:
        return
    wanted = spec.resources
    asked = GetAdvice(spec.name, before, tuple(nodes), wanted.min_nodes, wanted.max_nodes)
    if (note := client.ask(asked).note) is not None:
        session.output.note(f"note: {note}")

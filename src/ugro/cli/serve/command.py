"""``ugro serve``: puts a model or a command behind an HTTP API, over all devices; shows, scales, updates, stops it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ugro.cli import candidates
from ugro.cli.jobs.log_printer import Bytes, Documents, Printer
from ugro.cli.serve.bench import bench
from ugro.cli.serve.keys import key
from ugro.cli.serve.options import ServeCommand, ServeGroup, how_to_serve, share_of, what_to_run, wish_of
from ugro.cli.serve.show import expect_well, live, show, show_list, wait_ready
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.job_logs import LogChoice
from ugro.core.errors import NotFound, UgroError, UsageError
from ugro.core.service import ServiceReport

_EXAMPLE = "ugro serve JOB, ugro serve ./folder, or: ugro serve -- CMD --port {port}"
_name = click.argument("name", shell_complete=candidates.services)


@click.group(cls=ServeGroup)
def serve() -> None:
    """Serve a trained model, or any command, behind an HTTP API.

    All options of a new service, such as --replicas, --port, --keys and --gpus-per-node: ugro serve start --help

    \b
    Examples:
      ugro serve train --replicas all
      ugro serve ./model --port 8000 --name chat
      ugro serve --gpus-per-node 1 -- vllm serve {model} --host {host} --port {port}
      ugro serve status chat --follow
    """


@serve.command(cls=ServeCommand)
@click.argument("model", required=False, shell_complete=candidates.jobs)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A service file (docs/serving.md).")
@how_to_serve
@what_to_run(has_name=False)
@click.option("--detach", "-d", is_flag=True, help="Do not wait until it is ready.")
@json_option
@pass_session
@click.pass_context
def start(
    ctx: click.Context, session: Session, /, model: str | None, file: Path | None, detach: bool, **given: Any
) -> int:
    """Start a service: ugro serve start MODEL, or without the word start.

    MODEL is a job, whose model is served, or a folder. Each replica is a job: {port}, {host}, {model} and {name} in CMD
    are replaced, and $UGRO_PORT, $UGRO_HOST and $UGRO_MODEL say the same. Ctrl-C stops the waiting, not the service.
    """
    output = session.output
    wish = wish_of(ctx, model, given)
    if file is None and model is None and "command" not in wish.fields:
        raise UsageError("there is nothing to serve", hint=_EXAMPLE)
    client = session.client(uses_nodes=True)
    output.progress("looking at the model and the nodes")
    found = client.services.start(wish, file)
    if not detach:
        found = wait_ready(output, client, found)
    output.end_progress()
    show(output, found)
    expect_well(found)
    if not output.is_json:
        answers = "will answer" if detach else "answers"
        output.note(f"it {answers} at {found.url}; stop it: ugro serve stop {found.name}")
    return 0


@serve.command()
@click.option("--all", "everything", is_flag=True, help="Show services that have ended, too.")
@json_option
@pass_session
def ls(session: Session, everything: bool) -> None:
    """List services."""
    show_list(session.output, session.client().services.listed(everything=everything))


@serve.command()
@_name
@click.option("--follow", "-F", "follows", is_flag=True, help="Show it live until it is over.")
@json_option
@pass_session
def status(session: Session, name: str, follows: bool) -> int:
    """Show a service and its replicas."""
    client = session.client()
    found = client.services.get(name)
    if follows and not found.is_over and not session.output.is_json:
        return live(session.output, client, found)
    show(session.output, found)
    return 0


@serve.command()
@_name
@click.option("--replica", "-r", type=int, metavar="N", help="Of this replica. Default: the first.")
@click.option("--door", is_flag=True, help="Of the door.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Start with the last N lines.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing until it ends.")
@json_option
@pass_session
def logs(session: Session, name: str, replica: int | None, door: bool, tail: int | None, follow: bool) -> int:
    """Print the log of a replica, or of the door."""
    client = session.client()
    job = _job_of(client.services.get(name), replica, door)
    printer: Printer = Documents(session.output) if session.output.is_json else Bytes(session.output)
    try:
        for piece in client.jobs.logs(job, LogChoice(tail=tail, follow=follow)):
            printer.piece(piece)
    finally:
        printer.close()
    return 0


def _job_of(found: ServiceReport, replica: int | None, door: bool) -> int:
    hint = f"see: ugro serve status {found.name}"
    if door:
        number = found.door.job
    else:
        known = [one for one in found.replicas if replica in (None, one.number)]
        if not known:
            what = f"replica {replica}" if replica is not None else "replica"
            raise NotFound(f"the service {found.name} has no {what}", hint=hint)
        number = next((one.job for one in known if one.job is not None), None)
    if number is None:
        raise NotFound(f"it has not been submitted yet: {found.reason}", hint=hint)
    return number


@serve.command()
@_name
@click.argument("replicas", type=click.IntRange(0))
@click.option("--detach", "-d", is_flag=True, help="Do not wait until they are ready.")
@json_option
@pass_session
def scale(session: Session, name: str, replicas: int, detach: bool) -> int:
    """Change the number of replicas.

    Replicas that failed are replaced. Those that go finish what they have, the newest first.
    """
    client = session.client(uses_nodes=True)
    found = client.services.scale(name, replicas)
    if not detach:
        found = wait_ready(session.output, client, found)
    show(session.output, found)
    expect_well(found)
    return 0


@serve.command(cls=ServeCommand)
@_name
@click.argument("model", required=False, shell_complete=candidates.jobs)
@click.option("--canary", metavar="PERCENT", help="Give the new revision this share of requests until you decide.")
@click.option("--promote", is_flag=True, help="Replace all replicas by the canary's revision.")
@click.option("--rollback", is_flag=True, help="Undo the update.")
@what_to_run(has_name=True)
@click.option("--detach", "-d", is_flag=True, help="Do not wait for the end of the update.")
@json_option
@pass_session
@click.pass_context
def update(ctx: click.Context, session: Session, /, name: str, model: str | None, detach: bool, **given: Any) -> int:
    """Replace what a service serves, one replica after the other.

    New replicas are ready before old ones go, if there is room for both. An update whose replicas do not get ready is
    undone by itself. Resources and environment stay as they were, unless they are given.
    """
    output = session.output
    share, promotes, undoes = share_of(given.pop("canary")), given.pop("promote"), given.pop("rollback")
    wish = wish_of(ctx, model, given)
    if promotes and undoes:
        raise UsageError("--promote and --rollback are two things", hint="give one of them")
    client = session.client(uses_nodes=True)
    if promotes or undoes:
        found = client.services.decide(name, promotes=promotes)
    else:
        if model is None and "command" not in wish.fields:
            raise UsageError("there is nothing new to serve", hint=f"ugro serve update {name} JOB, or: -- CMD")
        output.progress("looking at the model")
        found = client.services.update(name, wish, canary=share)
    if not detach:
        found = wait_ready(output, client, found)
    show(output, found)
    if not detach and "rolled back" in found.note and not undoes:
        raise UgroError(found.note, hint=f"see: ugro serve logs {name}; ugro events")
    expect_well(found)
    return 0


@serve.command()
@_name
@click.option("--detach", "-d", is_flag=True, help="Do not wait until everything has ended.")
@json_option
@pass_session
def stop(session: Session, name: str, detach: bool) -> int:
    """Stop a service. Its replicas finish what they have."""
    client, output = session.client(), session.output
    found = client.services.stop(name)
    if not detach:
        found = client.services.wait_stopped(found.name, on_progress=output.progress)
        output.end_progress()
    if output.is_json:
        output.document({"service": found})
    else:
        output.note(f"the service {found.name} is {found.state}")
    return 0


serve.add_command(key)
serve.add_command(bench)

"""``ugro serve``: puts a model or a command behind an HTTP API, over all devices; shows, scales, updates, stops it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ugro.cli import candidates
from ugro.cli.jobs.logs import Bytes, Documents, Printer
from ugro.cli.jobs.options import job_options
from ugro.cli.session import Session, StartGroup, json_option, pass_session
from ugro.client.job_logs import LogChoice
from ugro.features.services.cli_bench import bench
from ugro.features.services.cli_show import expect_well, key, live, show, show_list, wait_ready
from ugro.features.services.client import ServiceWish
from ugro.features.services.model import ServiceReport
from ugro.features.services.operations import GetService, ListServices
from ugro.kernel.support.errors import NotFound, UgroError, UsageError

# --- options ----------------------------------------------------------------------------------------------------------
# What follows ``ugro serve``: its own options, which are keys of a service file, and those of its replicas' jobs.


F = TypeVar("F", bound=Callable[..., Any])

# Option → key of a service file.
_KEYS = {
    "engine": "engine",
    "path": "path",
    "replicas": "replicas",
    "port": "port",
    "bind": "bind",
    "tls_cert": "tls.cert",
    "tls_key": "tls.key",
    "keys": "keys",
    "public": "public",
    "concurrency": "concurrency",
    "health": "probes.ready.path",
    "drain": "drain",
    "door": "door",
}
# Options of jobs that services have no use for.
_NOT_OURS = (
    *("launcher", "balance", "train_sync", "nan", "nodes", "time_limit", "after", "after_any", "retries"),
    *("retry_on", "never_retry_on"),
    *("checkpoint_dir", "checkpoint_every", "lost_after", "on_lost", "output", "result_checkpoints", "result_limit"),
    *("result_workdir", "result_workdir_limit", "job_seed", "cache_input", "cache"),
)


class ServeGroup(StartGroup):
    """``ugro serve JOB …`` starts a service; ``ugro serve COMMAND`` is about services."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["JOB|DIR | -f FILE | -- CMD... | COMMAND NAME"]


class ServeCommand(click.Command):
    """Words after ``--`` are the command that a replica runs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["command"] = list(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


def what_to_run(*, has_name: bool) -> Callable[[F], F]:
    """Options that also an update has. ``has_name``: a name is an argument already."""
    left_out = (*_NOT_OURS, "notify", *(["name"] if has_name else []))
    options = [
        click.option("--engine", metavar="NAME", help="ugro, vllm, sglang, llama.cpp or tgi for a model."),
        click.option("--path", metavar="DIR", help="Where the model is in the job's results. Default: found."),
        job_options(without=left_out, submits=False),
    ]

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def how_to_serve(command: F) -> F:
    options = [
        click.option("--replicas", metavar="all|N|N..M", help="How many; a range follows the load. Default: 1."),
        click.option("--port", metavar="N", help="The port at which the service answers. Default: 8000."),
        click.option("--bind", metavar="ADDRESS", help="The address at which it answers. Default: 127.0.0.1."),
        click.option("--tls-cert", metavar="FILE", help="The certificate, for an address that other machines reach."),
        click.option("--tls-key", metavar="FILE", help="The key of the certificate."),
        click.option("--keys/--no-keys", default=None, help="Ask clients for an API key (ugro serve key)."),
        click.option("--public", is_flag=True, default=None, help="Answer everybody who reaches it."),
        click.option("--concurrency", metavar="N", help="Requests that a replica gets at once; others wait."),
        click.option("--health", metavar="PATH", help="What says that a replica is ready. Default: the engine's."),
        click.option("--drain", metavar="TIME", help="How long a replica may finish what it has. Default: 30s."),
        click.option(
            "--door", metavar="NODE", shell_complete=candidates.node_names, help="The node at which it answers."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def wish_of(ctx: click.Context, model: str | None, given: dict[str, Any]) -> ServiceWish:
    options = {key: given.pop(name) for name, key in _KEYS.items() if name in given}
    force = bool(given.pop("force", False))
    fields = {name: value for name, value in given.items() if value is not None and value not in ((), [])}
    if ctx.meta["command"]:
        fields["command"] = ctx.meta["command"]
    kept = {key: value for key, value in options.items() if value is not None}
    return ServiceWish(model, fields, kept, force)


def share_of(text: str | None) -> float | None:
    """``10%``"""
    if text is None:
        return None
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / 100
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UsageError(f"--canary: expected a share such as 10%, got {text}", hint="--canary 10%")
    return share


# --- command ----------------------------------------------------------------------------------------------------------


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
    show_list(session.output, session.client().ask(ListServices(everything)).services)


@serve.command()
@_name
@click.option("--follow", "-F", "follows", is_flag=True, help="Show it live until it is over.")
@json_option
@pass_session
def status(session: Session, name: str, follows: bool) -> int:
    """Show a service and its replicas."""
    client = session.client()
    found = client.ask(GetService(name)).service
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
    job = _job_of(client.ask(GetService(name)).service, replica, door)
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

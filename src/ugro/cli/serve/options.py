"""What follows ``ugro serve``: its own options, which are keys of a service file, and those of its replicas' jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ugro.cli import candidates
from ugro.cli.jobs.options import job_options
from ugro.cli.session import StartGroup
from ugro.client.services import ServiceWish
from ugro.core.errors import UsageError

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

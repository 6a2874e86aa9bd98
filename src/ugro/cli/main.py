"""``ugro``: the command line. Commands are loaded when they are called, so that ``ugro --help`` costs nothing."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import click

import ugro
from ugro.cli.output import Output
from ugro.cli.session import Session
from ugro.core.errors import UgroError

# name → module:attribute and the one line that `ugro --help` shows.
_COMMANDS = {
    "init": ("ugro.cli.init:init", "Write a first cluster.yaml from your SSH hosts."),
    "health": ("ugro.cli.health:health", "Probe the nodes and show how they do."),
    "doctor": ("ugro.cli.doctor:doctor", "Check everything that could be in the way, with remedies."),
    "node": ("ugro.cli.node:node", "List, show, add, remove, trust, drain and resume nodes."),
    "exec": ("ugro.cli.exec:exec_", "Run a command on nodes at once."),
    "lab": ("ugro.cli.lab:lab", "Unequal nodes on this machine, to try things."),
    "demo": ("ugro.cli.demo:demo", "Show UGRO at work on this machine alone."),
    "agent": ("ugro.cli.agent:agent", "Start, stop and look at the agent."),
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = f"did you mean: ugro {near[0]}?" if near else "see: ugro --help"
            raise click.UsageError(f"no such command: {args[0]}\nhint:  {hint}", ctx) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--cluster", type=click.Path(path_type=Path), help="The cluster file to use.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout (NDJSON for streams).")
@click.option("-q", "--quiet", is_flag=True, help="Only results, no talk on stderr.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="For the agent's log, when this command starts it.",
)
@click.version_option(ugro.__version__, prog_name="ugro", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, cluster: Path | None, as_json: bool, quiet: bool, log_level: str) -> None:
    """UGRO turns a handful of unequal machines reached by SSH into one training cluster."""
    ctx.obj = Session(cluster, log_level, Output(is_json=as_json, is_quiet=quiet))


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    output = Output(is_json="--json" in arguments)
    try:
        result: Any = cli.main(arguments, prog_name="ugro", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except UgroError as error:
        output.error(error)
        return error.exit_code
    except (click.exceptions.Exit, click.ClickException) as error:
        if isinstance(error, click.ClickException):
            output.usage_error(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough; the interpreter must not complain while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001  # the last stop: a user gets one clear line and never a traceback
        return output.crash(error)

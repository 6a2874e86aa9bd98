"""``ugro``: the command line. Commands are loaded when they are called, so that ``ugro --help`` costs nothing."""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from typing import Any

import click

import ugro
from ugro.cli.output import Output
from ugro.cli.session import CommandGroup, Session
from ugro.core.errors import UgroError

# name → module:attribute and the one line that `ugro --help` shows.
_COMMANDS = {
    "init": ("ugro.cli.init:init", "Write a first cluster.yaml from your SSH hosts."),
    "health": ("ugro.cli.health:health", "Probe the nodes and show how they do."),
    "top": ("ugro.cli.top.command:top", "Show all nodes, GPUs, jobs and alerts, live."),
    "doctor": ("ugro.cli.doctor:doctor", "Check everything that could be in the way, with remedies."),
    "node": ("ugro.cli.node:node", "List, show, add, remove, trust, drain and resume nodes."),
    "exec": ("ugro.cli.exec:exec_", "Run a command on nodes at once."),
    "run": ("ugro.cli.jobs.submit:run", "Run a command as a job on the best node."),
    "launch": ("ugro.cli.jobs.submit:launch", "Launch a training on several nodes at once."),
    "sync": ("ugro.cli.sync:sync", "Send code to the nodes, or say what would travel."),
    "status": ("ugro.cli.jobs.show:status", "Show the jobs, or all about one of them."),
    "why": ("ugro.cli.jobs.show:why", "Say what a job waits for, where it runs, or how it ended."),
    "logs": ("ugro.cli.jobs.logs:logs", "Print what a job's ranks wrote."),
    "results": ("ugro.cli.results.show:results", "Show what a job made, copy it, or free its space."),
    "compare": ("ugro.cli.results.compare:compare", "Show what differs between jobs: code, settings, results."),
    "note": ("ugro.cli.results.note:note", "Show or write the note and tags of a job."),
    "profile": ("ugro.cli.results.profile:profile", "Show where a training's time goes, and what holds it back."),
    "wait": ("ugro.cli.jobs.end:wait", "Wait until jobs have ended."),
    "cancel": ("ugro.cli.jobs.end:cancel", "End jobs and everything they started."),
    "clone": ("ugro.cli.jobs.show:clone", "Write a job as a job file, to change it and submit it anew."),
    "retry": ("ugro.cli.jobs.submit:retry", "Run a job that has ended once more."),
    "events": ("ugro.cli.jobs.logs:events", "Print what happened."),
    "alerts": ("ugro.cli.alerts:alerts", "Show what is wrong with nodes, and try the channels."),
    "metrics": ("ugro.cli.metrics:metrics", "Print the figures that Prometheus gets."),
    "dashboard": ("ugro.cli.dashboard:dashboard", "Open the dashboard in a browser."),
    "lab": ("ugro.cli.lab:lab", "Unequal nodes on this machine, to try things."),
    "demo": ("ugro.cli.demo.command:demo", "Show UGRO at work on this machine alone."),
    "agent": ("ugro.cli.agent:agent", "Start, stop and look at the agent."),
}


class LazyGroup(CommandGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        gc.disable()  # what is loaded is no garbage, and to look for some takes a tenth of a command's start
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        finally:
            gc.enable()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderLeft from error  # click would make it a failure


class _ReaderLeft(Exception):
    """Whoever read our output has seen enough."""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--cluster", type=click.Path(), help="The cluster file to use.")
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
def cli(ctx: click.Context, cluster: str | None, as_json: bool, quiet: bool, log_level: str) -> None:
    """UGRO turns a handful of unequal machines reached by SSH into one training cluster."""
    from pathlib import Path  # `ugro --help` does without

    output = ctx.obj if isinstance(ctx.obj, Output) else Output()
    output.is_json, output.is_quiet = output.is_json or as_json, quiet
    ctx.obj = Session(Path(cluster) if cluster else None, log_level, output)


def main() -> None:
    _mend_streams()
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:
        _drop_streams()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    # What follows "--" is another program's.
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    output = Output(is_json="--json" in ours)
    try:
        result: Any = cli.main(arguments, prog_name="ugro", standalone_mode=False, obj=output)
        return result if isinstance(result, int) else 0
    except UgroError as error:
        output.error(error)
        return error.exit_code
    except click.ClickException as error:
        output.usage_error(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except _ReaderLeft:
        _drop_streams()
        return 0
    except Exception as error:  # noqa: BLE001  # the last stop: a user gets one clear line and never a traceback
        return output.crash(error)
    finally:
        output.end_progress()


def _mend_streams() -> None:
    """A stream that was closed before us is read by nobody; a letter that a terminal does not know is no failure."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # for as long as we live
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_streams() -> None:
    """The interpreter must not complain that nobody reads while it closes them."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())

"""``ugro``: the command line. A command's module is loaded when it is called, so that ``ugro --help`` stays fast."""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

import click

import ugro
from ugro.cli.output import Output
from ugro.cli.session import COMPLETION_VARIABLE, CommandGroup, Session
from ugro.kernel.support.errors import UgroError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# By heading of `ugro --help`: name → module:attribute, and the first line of the command's own help.
_GROUPS = {
    "Cluster": {
        "init": (
            "ugro.features.discovery.cli_init:init",
            "Write the cluster file from your SSH hosts, or add hosts to it.",
        ),
        "allow": ("ugro.cli.access:allow", "Allow a cluster file that was found in a folder."),
        "deny": ("ugro.cli.access:deny", "Withdraw the allowance of a cluster file."),
        "node": ("ugro.cli.node:node", "Manage nodes: list, show, add, trust, drain, set up, measure."),
        "health": ("ugro.cli.health:health", "Check the health of nodes."),
        "doctor": ("ugro.features.health.cli:doctor", "Find problems on nodes and between them, with remedies."),
        "exec": ("ugro.features.exec.cli:exec_", "Run a command on several nodes at once."),
        "env": ("ugro.features.environments.cli:env", "List, show and remove the Python environments on nodes."),
        "cluster": ("ugro.features.ray.cli:cluster", "Run Ray clusters on the nodes: start, scale, stop."),
        "sync": ("ugro.cli.jobs.files:sync", "Send code to nodes."),
        "agent": ("ugro.cli.agent:agent", "Start, stop and inspect the agent."),
        "token": ("ugro.cli.access:token", "Create, list and revoke tokens for programs."),
        "login": ("ugro.features.remote_access.cli:login", "Use the agent of another machine from now on."),
        "logout": ("ugro.features.remote_access.cli:logout", "Use this machine's own agent again."),
        "relay": (
            "ugro.features.remote_access.cli_relay:relay",
            "Carry the connections of a client on another machine.",
        ),
        "store": ("ugro.cli.store:store", "Show where the agent's state is kept, or move it."),
        "completion": ("ugro.cli.candidates:completion", "Print a shell completion script."),
    },
    "Jobs": {
        "run": ("ugro.cli.jobs.submit:run", "Run a command as a job on the best node."),
        "launch": ("ugro.cli.jobs.submit:launch", "Launch a training script on one or more nodes."),
        "plan": ("ugro.features.planning.cli:plan", "Predict how fast a training is on each set of nodes."),
        "sweep": ("ugro.features.sweeps.cli:sweep", "Search for the best settings of a training."),
        "experiment": (
            "ugro.features.experiments.cli:experiment",
            "Compare ways to train on your nodes, with a report.",
        ),
        "serve": ("ugro.features.services.cli:serve", "Serve a trained model, or any command, behind an HTTP API."),
        "recipe": ("ugro.features.recipes.cli:recipe", "List, show and copy the built-in training recipes."),
        "map": ("ugro.features.batches.cli:map_", "Run a function over many items, in batches that need no tuning."),
        "estimate": ("ugro.features.batches.cli:estimate", "Predict how long a map takes, here and on a cluster."),
        "status": ("ugro.cli.jobs.status:status", "List jobs, or show one."),
        "why": ("ugro.cli.jobs.status:why", "Explain why a job waits, where it runs, or how it ended."),
        "logs": ("ugro.cli.jobs.logs:logs", "Print the logs of a job."),
        "wait": ("ugro.cli.jobs.status:wait", "Wait until jobs have ended."),
        "cancel": ("ugro.cli.jobs.status:cancel", "Stop jobs and all their processes."),
        "retry": ("ugro.cli.jobs.submit:retry", "Run an ended job again."),
        "clone": ("ugro.cli.jobs.status:clone", "Print a job as a job file, to edit and submit again."),
        "export": ("ugro.features.export.cli:export", "Write a job for Slurm, Kubernetes or torchrun."),
    },
    "Results": {
        "results": ("ugro.cli.jobs.files:results", "Show, fetch, copy or delete the files of a job."),
        "compare": ("ugro.features.experiments.cli:compare", "Show what differs between jobs."),
        "note": ("ugro.features.experiments.cli:note", "Show or change the note and tags of a job."),
        "profile": ("ugro.features.training.cli:profile", "Show where a training's time goes."),
    },
    "Observe": {
        "top": ("ugro.cli.top:top", "Show nodes, GPUs, jobs, services and alerts, live."),
        "dashboard": ("ugro.cli.dashboard:dashboard", "Open the web dashboard."),
        "events": ("ugro.cli.jobs.logs:events", "Print the history of events."),
        "usage": ("ugro.features.quotas.cli:usage", "Show what users and groups have used, against their quotas."),
        "audit": ("ugro.cli.access:audit", "Show who did what, through commands and the dashboard."),
        "alerts": ("ugro.features.alerts.cli:alerts", "Show alerts about nodes, and test notification channels."),
        "hooks": ("ugro.features.hooks.cli:hooks", "Show and test what is called when something happens."),
        "metrics": ("ugro.cli.dashboard:metrics", "Print metrics in Prometheus format."),
    },
    "Try it": {
        "demo": ("ugro.lab.cli_demo:demo", "Train on three unequal simulated nodes on this machine."),
        "lab": ("ugro.lab.cli:lab", "Create simulated nodes on this machine."),
    },
}
# They are about files and processes of this machine.
_HERE_ONLY = frozenset({"init", "allow", "deny", "lab", "demo"})
COMMANDS = {name: command for commands in _GROUPS.values() for name, command in commands.items()}


class LazyGroup(CommandGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        gc.disable()  # modules are no garbage; a collection takes a tenth of the start-up time
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        finally:
            gc.enable()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, COMMANDS))
        for heading, commands in _GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(longest), text) for name, (_, text) in commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Loads no command for it."""
        from click.shell_completion import CompletionItem

        found = [(name, text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=text) for name, text in found), *options]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderLeft from error  # click would make it a failure


class _ReaderLeft(Exception):
    """The reader of our output has closed it."""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--cluster", type=click.Path(), help="Use this cluster file.")
@click.option("--master", metavar="[USER@]HOST", help="Use the agent of that machine, over ssh; `local`: this one.")
@click.option("--master-ugro", metavar="PATH", help="Path of ugro there, if it is not in the PATH.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout (NDJSON for streams).")
@click.option("-q", "--quiet", is_flag=True, help="Print only results, no messages.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="Log level of the agent, if this command starts it.",
)
@click.version_option(ugro.__version__, prog_name="ugro", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, /, cluster: str | None, as_json: bool, quiet: bool, **options: str | None) -> None:
    """Turn machines that you reach by SSH into one training cluster.

    \b
    Examples:
      ugro demo                           try it on this machine
      ugro init                           make a cluster of your SSH hosts
      ugro launch train.py --nodes 3      train on three nodes
    """
    from pathlib import Path  # `ugro --help` does without

    _expect_directory()
    output = ctx.obj if isinstance(ctx.obj, Output) else Output()
    output.is_json, output.is_quiet = output.is_json or as_json, quiet
    ctx.obj = session = Session(
        Path(cluster) if cluster else None,
        options["log_level"] or "info",
        output,
        named_master=options["master"],
        named_command=options["master_ugro"],
    )
    if ctx.invoked_subcommand in _HERE_ONLY:
        session.expect_local(ctx.invoked_subcommand)


def _expect_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the current directory no longer exists", hint="cd to another one") from error


def main() -> None:
    _mend_streams()
    if COMPLETION_VARIABLE in os.environ:
        from ugro.cli.candidates import answer

        sys.exit(answer(cli))
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
    except Exception as error:  # noqa: BLE001  # the top of the program: a user gets one clear line, never a traceback
        return output.crash(error)
    finally:
        output.close()


def _mend_streams() -> None:
    """Replaces closed streams; a character that the terminal cannot show is escaped."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # open until we exit
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_streams() -> None:
    """Keeps the interpreter from reporting a closed pipe when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())

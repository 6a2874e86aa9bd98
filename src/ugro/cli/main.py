"""``ugro``: the command line. A command's module is loaded when it is called, so that ``ugro --help`` stays fast."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

import ugro
from ugro.cli.output import Output
from ugro.cli.session import COMPLETION_VARIABLE, CommandGroup, Session, added_below, loaded
from ugro.kernel.feature import Command
from ugro.kernel.support.errors import UgroError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# By heading of `ugro --help`: what is there without any feature.
_GROUPS: Mapping[str, Mapping[str, Command]] = {
    "Cluster": {
        "allow": Command(
            "ugro.cli.access:allow", "Allow a cluster file that was found in a folder.", is_here_only=True
        ),
        "deny": Command("ugro.cli.access:deny", "Withdraw the allowance of a cluster file.", is_here_only=True),
        "node": Command("ugro.cli.node:node", "Manage nodes: list, show, add, trust, drain, set up, measure."),
        "health": Command("ugro.cli.health:health", "Check the health of nodes."),
        "sync": Command("ugro.cli.jobs.files:sync", "Send code to nodes."),
        "agent": Command("ugro.cli.agent:agent", "Start, stop and inspect the agent."),
        "token": Command("ugro.cli.access:token", "Create, list and revoke tokens for programs."),
        "store": Command("ugro.cli.store:store", "Show where the agent's state is kept, or move it."),
        "completion": Command("ugro.cli.candidates:completion", "Print a shell completion script."),
    },
    "Jobs": {
        "run": Command("ugro.cli.jobs.submit:run", "Run a command as a job on the best node."),
        "launch": Command("ugro.cli.jobs.submit:launch", "Launch a training script on one or more nodes."),
        "status": Command("ugro.cli.jobs.status:status", "List jobs, or show one."),
        "why": Command("ugro.cli.jobs.status:why", "Explain why a job waits, where it runs, or how it ended."),
        "logs": Command("ugro.cli.jobs.logs:logs", "Print the logs of a job."),
        "wait": Command("ugro.cli.jobs.status:wait", "Wait until jobs have ended."),
        "cancel": Command("ugro.cli.jobs.status:cancel", "Stop jobs and all their processes."),
        "retry": Command("ugro.cli.jobs.submit:retry", "Run an ended job again."),
        "clone": Command("ugro.cli.jobs.status:clone", "Print a job as a job file, to edit and submit again."),
    },
    "Results": {
        "results": Command("ugro.cli.jobs.files:results", "Show, fetch, copy or delete the files of a job."),
    },
    "Observe": {
        "top": Command("ugro.cli.top:top", "Show nodes, GPUs, jobs, services and alerts, live."),
        "dashboard": Command("ugro.cli.dashboard:dashboard", "Open the web dashboard."),
        "events": Command("ugro.cli.jobs.logs:events", "Print the history of events."),
        "audit": Command("ugro.cli.access:audit", "Show who did what, through commands and the dashboard."),
        "metrics": Command("ugro.cli.dashboard:metrics", "Print metrics in Prometheus format."),
    },
    "Try it": {
        "demo": Command(
            "ugro.lab.cli_demo:demo", "Train on three unequal simulated nodes on this machine.", is_here_only=True
        ),
        "lab": Command("ugro.lab.cli:lab", "Create simulated nodes on this machine.", is_here_only=True),
    },
}

_OWN = {name: replace(one, heading=heading) for heading, group in _GROUPS.items() for name, one in group.items()}


def commands() -> dict[str, Command]:
    """Returns every command, by heading, our own first."""
    order = list(_GROUPS)
    found = {**_OWN, **added_below("")}
    return dict(sorted(found.items(), key=lambda one: order.index(one[1].heading)))


class LazyGroup(CommandGroup):
    """All commands: those above, and those of features, which are only read if it is none of those above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = _OWN.get(cmd_name) or added_below("").get(cmd_name)
        return None if command is None else loaded(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, commands()))
        for heading in _GROUPS:
            with formatter.section(heading):
                here = [(name, one.summary) for name, one in commands().items() if one.heading == heading]
                formatter.write_dl([(name.ljust(longest), text) for name, text in here])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Loads no command for it."""
        from click.shell_completion import CompletionItem

        found = [(name, one.summary) for name, one in commands().items() if name.startswith(incomplete)]
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
    called = ctx.invoked_subcommand or ""
    command = _OWN.get(called) or added_below("").get(called)
    if command is not None and command.is_here_only:
        session.expect_local(called)


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

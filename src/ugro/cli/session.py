"""What every command gets: the global options, a client and the output."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ugro.cli.output import Output, command_meant
from ugro.kernel.feature import Command, import_object, installed

if TYPE_CHECKING:
    from pathlib import Path

    from ugro.client.client import Client
    from ugro.client.reach import OwnWish, Reach
    from ugro.features.remote_access.client.master import Master
    from ugro.features.safe_mode.model import SafeMode
    from ugro.kernel.support.errors import Unallowed

F = TypeVar("F", bound=Callable[..., Any])

COMPLETION_VARIABLE = "_UGRO_COMPLETE"  # set by a shell that asks for candidates


@dataclass(slots=True)
class Session:
    cluster: Path | None
    log_level: str
    output: Output
    safe_mode: SafeMode | None = field(default=None, kw_only=True)  # of the agent, once it was asked
    nodes: int = field(default=0, kw_only=True)  # of the cluster, once the agent was asked
    named_master: str | None = field(default=None, kw_only=True)
    named_command: str | None = field(default=None, kw_only=True)  # the path of ugro there

    def client(self, *, uses_nodes: bool = False, shows_safe_mode: bool = False) -> Client:
        """A client with a running agent. Says what the user may not expect of the agent's configuration.

        ``uses_nodes``: the user may expect other machines than this one. ``shows_safe_mode``: the command itself does.
        """
        client = self.new_client()
        agent = client.agent()
        if agent.config_error:
            self.output.warn(f"{agent.config_error} (the last valid configuration stays in use)", agent.config_hint)
        self.safe_mode, self.nodes = agent.safe_mode, agent.nodes
        if agent.safe_mode is not None and not shows_safe_mode:
            warn_of_safe_mode(self.output, agent.safe_mode)
        if agent.ignored_variables:
            names = ", ".join(agent.ignored_variables)
            self._remark(f"the agent was started with another value of {names}; to apply yours: ugro agent restart")
        if uses_nodes and agent.cluster_file is None and client.master is None:
            self._remark("there is no cluster file, so this machine alone is used; to use others: ugro init")
        return client

    def _ask_to_allow(self, error: Unallowed) -> bool:
        """False also where nobody can be asked."""
        return self.output.can_ask and self.output.confirm(allowance_facts(error), "Allow it?")

    def _remark(self, text: str) -> None:
        if self.output.is_json and not self.output.is_quiet:
            self.output.warn(text)  # on stderr: a program's document stays as it is
        else:
            self.output.note(f"note: {text}")

    @property
    def master(self) -> Master | None:
        """The other machine whose agent is used; None: this one."""
        from ugro.features.remote_access.client.master import chosen_master
        from ugro.kernel.support.state_dir import StateDir

        home = StateDir.find(os.environ)
        return chosen_master(os.environ, home, named=self.named_master, command=self.named_command)

    def expect_local(self, what: str) -> None:
        """Raises NotAllowed if another machine's agent is used."""
        if (master := self.master) is not None:
            from ugro.kernel.support.errors import NotAllowed

            hint = f"for this machine: ugro --master local {what}; for that one: ssh {master}"
            raise NotAllowed(f"ugro {what} does not work from another machine (the master is {master})", hint=hint)

    def new_client(self, *, any_cluster: bool = False) -> Client:
        from ugro.client.reach import chosen_reach

        if self.cluster is not None:
            self.expect_local(f"--cluster {self.cluster}")
        named = {"named": self.named_master, "command": self.named_command}
        return self._closing(chosen_reach(self._wish(any_cluster), **named, on_link=self.output.warn))

    def own_client(self) -> Client:
        """Of this account's agent on this machine, whatever master or team is chosen."""
        from ugro.client.reach import OwnAgent
        from ugro.kernel.support.state_dir import StateDir

        return self._closing(OwnAgent(StateDir.find(os.environ), self._wish(any_cluster=False)))

    def _closing(self, reach: Reach) -> Client:
        from ugro.client.client import Client

        client = Client.through(reach)
        click.get_current_context().call_on_close(client.close)
        return client

    def _wish(self, any_cluster: bool) -> OwnWish:
        from ugro.client.reach import OwnWish

        return OwnWish(self.cluster, any_cluster, self.log_level, self.output.progress, self._ask_to_allow)


def warn_of_safe_mode(output: Output, mode: SafeMode) -> None:
    from ugro.features.safe_mode.model import REMEDY

    stale = "what is shown of jobs may be out of date"
    output.warn(f"safe mode, nothing is started or ended: {mode.reasons[0]}; {stale}", REMEDY)


def allowance_facts(error: Unallowed) -> list[str]:
    if error.before is None:
        first = f"{error.file} is not allowed yet. If somebody else wrote it, read it first. It says:"
    else:
        first = f"{error.file} was edited since you allowed it. What it changes (+ new, - gone):"
    # Commands on this machine last, right above the question: a long list must not push them off the screen.
    return [first, *(f"    {line}" for line in reversed(error.news))]


pass_session = click.make_pass_decorator(Session)


class CommandGroup(click.Group):
    """Without a command it shows its help; for a misspelt one it suggests the nearest."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"no_args_is_help": False, **settings})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        session = ctx.find_object(Session)
        is_for_a_program = session is not None and session.output.is_json  # help is not JSON
        return super().parse_args(ctx, args if args or is_for_a_program else ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is not None or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        import difflib

        if ctx.parent is None and (meant := command_meant(args[0])) is not None:
            raise click.UsageError(f"no such command: {args[0]}\nhint:  {meant}", ctx)
        near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
        hint = f"did you mean: {ctx.command_path} {near[0]}?" if near else f"see: {ctx.command_path} --help"
        raise click.UsageError(f"no such command: {args[0]}\nhint:  {hint}", ctx)


def added_below(words: str) -> dict[str, Command]:
    """Returns the commands that features add below this one, by their names there."""
    start = f"{words} " if words else ""
    added = ((name, one) for feature in installed() for name, one in feature.commands.items())
    return {name.removeprefix(start): one for name, one in added if name.rpartition(" ")[0] == words}


def loaded(command: Command) -> click.Command:
    gc.disable()  # modules are no garbage; a collection takes a tenth of the start-up time
    try:
        found: click.Command = import_object(command.target)
    finally:
        gc.enable()
    return found


class ExtendedGroup(CommandGroup):
    """Its own commands, and those that features add below it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *added_below(self.name or "")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        added = None if own else added_below(self.name or "").get(cmd_name)
        return own if added is None else loaded(added)


class StartGroup(CommandGroup):
    """What is none of its commands is for its command ``start``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((word for word in args if word != "--json"), None)
        if first is not None and first not in self.commands and first not in ("-h", "--help"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


def json_option(command: F) -> F:
    """``--json``, which may also stand before the command."""

    def remember(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            ctx.find_object(Session).output.is_json = True  # type: ignore[union-attr]  # set by the group

    return click.option("--json", is_flag=True, expose_value=False, callback=remember, help="Print JSON on stdout.")(
        command
    )

"""What every command gets: the global options, one client, one output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ugro.cli.output import Output

if TYPE_CHECKING:
    from ugro.client import Client

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class Session:
    cluster: Path | None
    log_level: str
    output: Output

    def client(self) -> Client:
        """A client whose agent runs and has been asked for trouble with its configuration."""
        client = self.new_client()
        agent = client.agent()
        if agent.config_error:
            self.output.warn(f"{agent.config_error} (the last good configuration stays in force)", agent.config_hint)
        return client

    def new_client(self) -> Client:
        from ugro.client import Client

        return Client(cluster=self.cluster, log_level=self.log_level, on_wait=self.output.progress)


pass_session = click.make_pass_decorator(Session)


def json_option(command: F) -> F:
    """``--json`` after the command as well as before it."""

    def remember(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            ctx.find_object(Session).output.is_json = True  # type: ignore[union-attr]  # set by the group

    return click.option(
        "--json", is_flag=True, expose_value=False, callback=remember, help="One JSON document on stdout."
    )(command)

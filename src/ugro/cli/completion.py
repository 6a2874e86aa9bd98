"""``ugro completion``: prints the script with which a shell asks ``ugro`` for candidates, and answers it."""

from __future__ import annotations

import os

import click
from click.shell_completion import (
    BashComplete,
    ShellComplete,
    add_completion_class,
    get_completion_class,
    shell_complete,
)

from ugro.cli.session import COMPLETION_VARIABLE, Session, pass_session


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@pass_session
@click.pass_context
def completion(ctx: click.Context, session: Session, shell: str) -> None:
    """Print a shell completion script.

    It completes commands, options and files; and nodes, labels and jobs while the agent runs. In zsh, compinit must run
    before it.

    \b
    Install it for your shell:
      bash: echo 'eval "$(ugro completion bash)"' >> ~/.bashrc
      zsh:  echo 'eval "$(ugro completion zsh)"' >> ~/.zshrc
      fish: ugro completion fish > ~/.config/fish/completions/ugro.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, shell
    # Not the class's own source(): bash's starts another bash to ask for its version, each time a shell starts.
    session.output.block(ShellComplete.source(kind(ctx.find_root().command, {}, "ugro", COMPLETION_VARIABLE)))


class Bash(BashComplete):
    """Bash splits @label into two words, and replaces both."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        if args and args[-1] == "@":
            return args[:-1], f"@{incomplete}"
        return args, incomplete


def answer(command: click.Command) -> int:
    """Prints the candidates for the word that a shell asks about."""
    add_completion_class(Bash)
    asked = os.environ[COMPLETION_VARIABLE]
    try:
        return shell_complete(command, {}, "ugro", COMPLETION_VARIABLE, asked)
    except Exception:  # noqa: BLE001  # a message would land in the line that the user types
        return 1

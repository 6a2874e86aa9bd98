"""What a shell may complete a word to: nodes, labels, jobs and environments, asked of a running agent, and files.

It never starts an agent. When there is none, or when it does not answer at once, there are no candidates.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import (
    BashComplete,
    ShellComplete,
    add_completion_class,
    get_completion_class,
    shell_complete,
)

from ugro.cli.session import COMPLETION_VARIABLE, Session, pass_session

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


_PATIENCE_S = 0.5
_MOST_JOBS = 50

Items = list["CompletionItem[str]"]
Completer = Callable[[click.Context, click.Parameter, str], Items]


def node_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    return _items(incomplete, ((node["name"], node["status"]) for node in _nodes()), _given(ctx, parameter))


def nodes(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Names, @all and @label."""
    if not incomplete.startswith("@"):
        return node_names(ctx, parameter, incomplete)
    groups = {"all": "all nodes"} | {word: "label" for node in _nodes() for word in (*node["labels"], node["role"])}
    return _items(incomplete, ((f"@{word}", text) for word, text in groups.items()))


def labels(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    return _items(incomplete, dict.fromkeys((label for node in _nodes() for label in node["labels"]), "").items())


def jobs(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    return _job_items(ctx, parameter, incomplete)


def live_jobs(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    from ugro.kernel.jobs.model import FINAL_STATES, JobState

    return _job_items(ctx, parameter, incomplete, [state for state in JobState if state not in FINAL_STATES])


def environments(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Their whole names: a name that is cut may become ambiguous."""
    found = _ask("/v1/environments").get("environments", [])
    known = ((one["name"], ", ".join(" ".join(package) for package in one["packages"][:3])) for one in found)
    return _items(incomplete, known, _given(ctx, parameter))


def sweeps(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    found = _ask("/v1/sweeps").get("sweeps", [])
    return _items(incomplete, ((one["name"], one["state"]) for one in found), _given(ctx, parameter))


def services(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    found = _ask("/v1/services").get("services", [])
    return _items(incomplete, ((one["name"], one["state"]) for one in found), _given(ctx, parameter))


def files(ctx: click.Context, parameter: click.Parameter | None, incomplete: str) -> Items:
    return _item(incomplete, type="file")


def directories(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    return _item(incomplete, type="dir")


def words(choices: Sequence[str]) -> Completer:
    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
        return _items(incomplete, ((word, "") for word in choices))

    return complete


def _job_items(
    ctx: click.Context, parameter: click.Parameter, incomplete: str, states: Sequence[str] = ()
) -> Items:
    """Ids, the newest first, then names; a number completes to ids only."""
    found = _ask(f"/v1/jobs?limit={_MOST_JOBS}" + "".join(f"&state={state}" for state in states)).get("jobs", [])
    ids = [(str(job["id"]), f"{job['spec']['name']} ({job['state']})") for job in found]
    names = {job["spec"]["name"]: "the newest job of this name" for job in reversed(found)}
    last = {"last": "the newest job"} if found else {}
    return _items(incomplete, [*ids, *last.items(), *names.items()], _given(ctx, parameter))


def _nodes() -> list[dict[str, Any]]:
    from ugro.kernel.links.model import by_name

    return sorted(_ask("/v1/nodes").get("nodes", []), key=lambda node: by_name(node["name"]))


def _items(incomplete: str, words: Iterable[tuple[str, str]], given: Sequence[str] = ()) -> Items:
    found = [(word, text) for word, text in words if word.startswith(incomplete) and word not in given]
    return [item for word, text in found for item in _item(word, help=text or None)]


def _item(word: str, **about: Any) -> Items:
    from click.shell_completion import CompletionItem  # only a completion needs it

    return [CompletionItem(word, **about)]


def _given(ctx: click.Context, parameter: click.Parameter) -> tuple[str, ...]:
    """What the command line has already of an argument that takes several."""
    given = ctx.params.get(parameter.name or "")
    return tuple(given) if isinstance(given, tuple | list) else ()


def _ask(path: str) -> Mapping[str, Any]:
    from ugro.client.http import Connection
    from ugro.features.remote_access.client.master import chosen_master
    from ugro.kernel.support.errors import UgroError
    from ugro.kernel.support.state_dir import StateDir, chosen_socket

    home = StateDir.find(os.environ)
    connection = Connection(chosen_socket(os.environ) or home.socket)
    with contextlib.suppress(UgroError, OSError, ValueError):
        if chosen_master(os.environ, home) is not None:
            return {}  # an ssh would take longer than one waits for a completion
        answer = connection.ask("GET", path, timeout_s=_PATIENCE_S)
        if isinstance(answer, dict):
            return answer
    return {}


# --- completion -------------------------------------------------------------------------------------------------------
# ``ugro completion``: prints the script with which a shell asks ``ugro`` for candidates, and answers it.


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

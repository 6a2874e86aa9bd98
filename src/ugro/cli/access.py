"""``ugro allow`` and ``deny`` a cluster file; ``ugro audit``; ``ugro token``: tokens for programs."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import click

from ugro.cli import candidates
from ugro.cli.jobs.describe import local_time
from ugro.cli.jobs.logs import MOMENT, SINCE
from ugro.cli.output import Cell, Output, Style
from ugro.cli.session import CommandGroup, Session, allowance_facts, json_option, pass_session
from ugro.kernel.access.model import ApiToken, Role
from ugro.kernel.access.operations import CreateToken, ListAuditEntries, ListTokens, RevokeToken
from ugro.kernel.agent.operations import ReloadClusterFile
from ugro.kernel.support.errors import NotFound, Unallowed, UsageError
from ugro.kernel.support.quantities import DURATION_EXAMPLES, parse_duration

# --- allow ------------------------------------------------------------------------------------------------------------
# ``ugro allow`` and ``ugro deny``: whether a cluster file that was found in a folder is used.


_FILE = click.argument("file", required=False, type=click.Path(path_type=Path), shell_complete=candidates.files)


@click.command()
@_FILE
@click.option("--yes", "-y", is_flag=True, help="Allow it without asking.")
@json_option
@pass_session
def allow(session: Session, file: Path | None, yes: bool) -> int:
    """Allow a cluster file that was found in a folder.

    Shows which commands FILE runs on this machine, which hosts it sends code to, and what else it opens or deletes,
    and asks. FILE is by default the one for the current folder.

    A file that comes with a repository may be somebody else's work: it is not used until you allow it. After an edit of
    those parts, the last allowed configuration stays in use until you allow the new one. Your own ~/.ugro/cluster.yaml,
    a file that you name with --cluster or UGRO_CLUSTER, and one that ugro init wrote need no allowance.

    With --json there is no question: without --yes it is printed and not allowed, with exit code 2.
    """
    from ugro.client.before_agent import allow as record
    from ugro.client.before_agent import require

    client = session.new_client(any_cluster=True)
    path = _path(session, file)
    try:
        lines, was_allowed = require(client.home, path), True
    except Unallowed as error:
        if not _is_wanted(session.output, error, yes=yes):
            return error.exit_code
        record(client.home, error)
        lines, was_allowed = error.lines, False
    if client.running_agent() is not None:
        client.ask(ReloadClusterFile())
    if session.output.is_json:
        session.output.document({"cluster_file": {"path": str(path), "allowed": True, "effects": lines}})
    session.output.note(f"{path} {'was already allowed' if was_allowed else 'is allowed; undo with: ugro deny'}")
    return 0


@click.command()
@_FILE
@json_option
@pass_session
def deny(session: Session, file: Path | None) -> None:
    """Withdraw the allowance of a cluster file.

    FILE is by default the one for the current folder. A running agent that uses it keeps its configuration until it is
    stopped.
    """
    from ugro.client.before_agent import deny as withdraw

    client = session.new_client(any_cluster=True)
    path = _path(session, file)
    was_allowed = withdraw(client.home, path)
    if session.output.is_json:
        session.output.document({"cluster_file": {"path": str(path), "allowed": False}})
    session.output.note(f"{path} {'is no longer allowed' if was_allowed else 'was not allowed'}")
    agent = client.running_agent()
    if agent is not None and agent.cluster_file and path.exists() and os.path.samefile(path, agent.cluster_file):
        session.output.note("the running agent still uses it; to stop it: ugro agent stop")


def _is_wanted(output: Output, error: Unallowed, *, yes: bool) -> bool:
    if yes:
        output.note(*allowance_facts(error))
        return True
    if output.is_json:
        document = {"path": error.file, "allowed": False, "effects": error.lines, "news": error.news}
        output.document({"cluster_file": document})
        output.complain(error)
        return False
    if not output.can_ask:
        output.note(*allowance_facts(error))
        raise UsageError("cannot ask here: stdin is not a terminal", hint="allow it without asking: --yes")
    if not output.confirm(allowance_facts(error), "Allow it?"):
        output.note("not allowed; nothing was changed")
        return False
    return True


def _path(session: Session, file: Path | None) -> Path:
    from ugro.client.launcher import nearest_cluster_file
    from ugro.kernel.support.state_dir import StateDir

    if (named := file or session.cluster) is not None:
        return named.expanduser().absolute()
    found = nearest_cluster_file(os.environ, Path.cwd(), StateDir.find(os.environ))
    if found.path is None or not found.is_found:
        raise NotFound("there is no cluster file in this folder or above it", hint="name it: ugro allow FILE")
    return found.path


# --- audit ------------------------------------------------------------------------------------------------------------
# ``ugro audit``: who did what.


@click.command()
@click.option("--since", type=MOMENT, metavar="TIME", help=SINCE)
@click.option("--user", help="Show only what this user did.")
@click.option("-n", "--limit", type=click.IntRange(1, 10_000), metavar="N", default=1000, help="Print the newest N.")
@json_option
@pass_session
def audit(session: Session, since: float | None, user: str | None, limit: int) -> None:
    """Show who did what, through commands and the dashboard.

    Each call that changes something has an entry: jobs that were submitted, cancelled or retried, commands on nodes,
    changed nodes and settings, sign-ins to the dashboard, also those that failed. The oldest first.

    \b
    Example:
      ugro audit --since 1d --user ann
    """
    output = session.output
    entries = session.client().ask(ListAuditEntries(since=since or 0, user=user, limit=limit)).audit
    if output.is_json:
        output.document({"audit": entries})
        return
    if not entries:
        output.note("no entries")
        return
    rows = [
        [
            Cell(local_time(one.at) if output.is_terminal else one.at),
            Cell(one.user, "id"),
            Cell(one.via),
            Cell(one.action, "bold"),
            Cell(one.subject),
            Cell(one.outcome, "" if one.outcome == "done" else "warn"),
        ]
        for one in entries
    ]
    output.table(("TIME", "USER", "VIA", "ACTION", "SUBJECT", "OUTCOME"), rows, spare=("VIA",))


# --- token ------------------------------------------------------------------------------------------------------------


@click.group(cls=CommandGroup)
def token() -> None:
    """Create, list and revoke tokens for programs.

    A token acts for you, with the role that you give it and never with more than your own. The HTTPS API accepts it
    (api in the cluster file).
    """


@token.command()
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    default=Role.VIEWER.value,
    show_default=True,
    help="What its bearer may do.",
)
@click.option("--expires", metavar="TIME", default="30d", show_default=True, help="How long it is valid.")
@click.option("--name", metavar="NAME", default="", help="A name, to tell it from others. Without it, one is made up.")
@json_option
@pass_session
def create(session: Session, role: str, expires: str, name: str) -> None:
    """Create a token. It is shown once, and cannot be shown again.

    \b
    Examples:
      ugro token create --role viewer --expires 30d --name grafana
      curl -H "Authorization: Bearer ugro_…" https://gpu-master:8443/api/v1/jobs
    """
    created = session.client().ask(CreateToken(Role(role), _seconds(expires), name))
    if session.output.is_json:
        session.output.document(created)
        return
    made = created.token
    session.output.text(created.secret)
    session.output.note(
        f"token {made.name} of {made.user}: {made.role}, until {local_time(made.expires_at)}",
        "keep it now: it cannot be shown again",
    )


@token.command("ls")
@json_option
@pass_session
def list_(session: Session) -> None:
    """List your tokens; for an admin, everybody's."""
    found = session.client().ask(ListTokens()).tokens
    if session.output.is_json:
        session.output.document({"tokens": found})
    elif found:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        header = ("ID", "NAME", "USER", "ROLE", "STATE", "EXPIRES", "LAST USE", "FROM")
        session.output.table(header, [_row(one, now) for one in found])
    else:
        session.output.note("there are no tokens; to create one: ugro token create")


@token.command()
@click.argument("word", metavar="TOKEN")
@json_option
@pass_session
def revoke(session: Session, word: str) -> None:
    """Revoke a token, by its id or name. It is refused from now on.

    \b
    Example:
      ugro token revoke grafana
    """
    revoked = session.client().ask(RevokeToken(word)).token
    if session.output.is_json:
        session.output.document({"token": revoked})
    else:
        session.output.note(f"token {revoked.name} of {revoked.user} is revoked")


def _row(one: ApiToken, now: str) -> list[Cell]:
    state, style = _state(one, now)
    return [
        Cell(str(one.id), "id", is_number=True),
        Cell(one.name, "bold"),
        Cell(one.user),
        Cell(one.role),
        Cell(state, style),
        Cell(local_time(one.expires_at)),
        Cell(local_time(one.last_used_at) if one.last_used_at else "never"),
        Cell(one.last_used_by),
    ]


def _state(one: ApiToken, now: str) -> tuple[str, Style]:
    if one.revoked_at is not None:
        return "revoked", "bad"
    return ("valid", "good") if one.is_valid(now) else ("expired", "warn")


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--expires: not a time: {text}", hint=f"for example: {DURATION_EXAMPLES}, 30d") from error

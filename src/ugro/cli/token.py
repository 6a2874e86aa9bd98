"""``ugro token``: tokens with which programs use the HTTPS API."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from ugro.cli.jobs.describe import local_time
from ugro.cli.output import Cell, Style
from ugro.cli.session import CommandGroup, Session, json_option, pass_session
from ugro.core.errors import UsageError
from ugro.core.identity import ApiToken, Role
from ugro.core.support.quantity import DURATION_EXAMPLES, parse_duration
from ugro.kernel.access.operations import CreateToken, ListTokens, RevokeToken


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

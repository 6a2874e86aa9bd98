"""``ugro serve key``: API keys of a service."""

from __future__ import annotations

import click

from ugro.cli import candidates
from ugro.cli.output import Cell
from ugro.cli.session import CommandGroup, Session, json_option, pass_session

_name = click.argument("name", shell_complete=candidates.services)


@click.group(cls=CommandGroup)
def key() -> None:
    """Create, list and revoke the API keys of a service.

    Only hashes of keys are kept. A key that is revoked is refused at once.
    """


@key.command()
@_name
@click.option("--label", default="", help="What it is for.")
@json_option
@pass_session
def create(session: Session, name: str, label: str) -> None:
    """Create a key, and print it this once."""
    made, secret = session.client().services.create_key(name, label)
    if session.output.is_json:
        session.output.document({"key": {"id": made.id, "label": made.label, "secret": secret}})
        return
    session.output.text(secret)
    session.output.note(f"this is key {made.id}; it is not shown again. Clients send it as: Authorization: Bearer KEY")


@key.command()
@_name
@json_option
@pass_session
def ls(session: Session, name: str) -> None:
    """List keys, without the keys themselves."""
    found = session.client().services.keys(name)
    if session.output.is_json:
        session.output.document({"keys": found})
    elif found:
        rows = [[Cell(one.id, "id"), Cell(one.label), Cell(one.made_at)] for one in found]
        session.output.table(("KEY", "LABEL", "CREATED"), rows)
    else:
        session.output.note(f"no keys; create one: ugro serve key create {name}")


@key.command()
@_name
@click.argument("key_id", metavar="KEY")
@pass_session
def revoke(session: Session, name: str, key_id: str) -> None:
    """Revoke a key, by its id."""
    session.client().services.revoke_key(name, key_id)
    session.output.note(f"key {key_id} of {name} is revoked")

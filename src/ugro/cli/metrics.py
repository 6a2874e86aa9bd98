"""``ugro metrics``: the page that Prometheus scrapes."""

from __future__ import annotations

import click

from ugro.cli.session import Session, json_option, pass_session


@click.command()
@json_option
@pass_session
def metrics(session: Session) -> None:
    """Print metrics in Prometheus format.

    The same text that Prometheus scrapes. With --json: {"text": …}.
    """
    page = session.client().metrics_page()
    if session.output.is_json:
        session.output.document({"text": page.decode()})
    else:
        session.output.raw(page)

"""``ugro dashboard``: opens the dashboard in a browser with a link that works once."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ugro.cli.session import Session, json_option, pass_session
from ugro.kernel.agent.operations import CreateDashboardLink
from ugro.kernel.support.quantities import format_duration

if TYPE_CHECKING:
    from ugro.client.client import Client
    from ugro.kernel.agent.model import DashboardLink


@click.command()
@click.option("--no-open", is_flag=True, help="Print the link; do not open a browser.")
@json_option
@pass_session
def dashboard(session: Session, no_open: bool) -> None:
    """Open the web dashboard.

    Prints a link that works once, and opens it in a browser if there is one. With a master on another machine, a port
    of this machine is forwarded to it until Ctrl-C.

    \b
    Example:
      ugro --master ann@gpu-master dashboard
    """
    output = session.output
    client = session.client()
    link = client.ask(CreateDashboardLink())
    if link.warning:
        output.warn(link.warning, "set dashboard.certificate_file, or use: ssh -L 8099:127.0.0.1:8099 MACHINE")
    if client.is_elsewhere:
        _forward(session, client, link, is_to_open=not no_open)
        return
    if output.is_json:
        output.document({"dashboard": link})
        return
    output.text(link.url)
    output.note(f"the link works once, for {format_duration(link.expires_s)}")
    if not no_open and _has_screen():
        _open(link.url, client.home.path / "dashboard.html")


def _forward(session: Session, client: Client, link: DashboardLink, *, is_to_open: bool) -> None:
    from ugro.features.remote_access.client.agent import RemoteAgent
    from ugro.features.remote_access.client.link import DashboardForward, MasterLink

    assert isinstance(client.reach, RemoteAgent)
    assert isinstance(client.reach.link, MasterLink)
    output = session.output
    with DashboardForward(client.reach.link, link.url) as forward:
        if output.is_json:
            output.document({"dashboard": replace(link, url=forward.url)})
        else:
            output.text(forward.url)
            output.note(f"the link works once, for {format_duration(link.expires_s)}")
        if forward.url.startswith("https:"):
            output.note("its certificate is for another name than 127.0.0.1, as your browser will say")
        output.note(f"forwarding this port to {client.master} until Ctrl-C")
        if is_to_open and _has_screen():
            _open(forward.url, client.home.path / "dashboard.html")
        forward.serve()


def _has_screen() -> bool:
    """False over ssh and in a script: no window may open there."""
    is_graphical = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return is_graphical and sys.stdout.isatty() and "SSH_CONNECTION" not in os.environ


def _open(url: str, page: Path) -> None:
    """Through a private file: other users can read a browser's command line."""
    import webbrowser
    from html import escape

    page.unlink(missing_ok=True)
    descriptor = os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><title>UGRO</title><meta http-equiv="refresh" content="0;url={escape(url)}">\n')
    webbrowser.open(page.as_uri())


# --- metrics ----------------------------------------------------------------------------------------------------------
# ``ugro metrics``: the page that Prometheus scrapes.


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

"""``ugro dashboard``: opens the dashboard in a browser with a link that works once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from ugro.cli.session import Session, json_option, pass_session
from ugro.core.support.quantity import format_duration


@click.command()
@click.option("--no-open", is_flag=True, help="Print the link; do not open a browser.")
@json_option
@pass_session
def dashboard(session: Session, no_open: bool) -> None:
    """Open the web dashboard.

    Prints a link that works once, and opens it in a browser if there is one. To open it from another machine, forward
    the port and use the printed link.

    \b
    Example:
      ssh -L 8099:127.0.0.1:8099 MACHINE
    """
    output = session.output
    client = session.client()
    link = client.dashboard()
    if link.warning:
        output.warn(link.warning, "set dashboard.certificate_file, or use: ssh -L 8099:127.0.0.1:8099 MACHINE")
    if output.is_json:
        output.document({"dashboard": link})
        return
    output.text(link.url)
    output.note(f"the link works once, for {format_duration(link.expires_s)}")
    if not no_open and _has_screen():
        _open(link.url, client.home.path / "dashboard.html")


def _has_screen() -> bool:
    """False over ssh and in a script: no window may open there."""
    is_graphical = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return is_graphical and sys.stdout.isatty() and "SSH_CONNECTION" not in os.environ


def _open(url: str, page: Path) -> None:
    """Through a private file: other users can read a browser's command line."""
    import webbrowser

    page.unlink(missing_ok=True)
    descriptor = os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><title>UGRO</title><meta http-equiv="refresh" content="0;url={url}">\n')
    webbrowser.open(page.as_uri())

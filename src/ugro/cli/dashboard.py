"""``ugro dashboard``: a link that lets one browser in, opened where there is one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from ugro.cli.session import Session, json_option, pass_session
from ugro.core.support.quantity import format_duration


@click.command()
@click.option("--no-open", is_flag=True, help="Only print the link.")
@json_option
@pass_session
def dashboard(session: Session, no_open: bool) -> None:
    """Open the dashboard in a browser, and print a link that works once.

    On a machine without a browser, print the link; from elsewhere: ssh -L 8099:127.0.0.1:8099 MACHINE.
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
    """Not over ssh, and not in a script: nothing must pop up there."""
    is_graphical = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return is_graphical and sys.stdout.isatty() and "SSH_CONNECTION" not in os.environ


def _open(url: str, page: Path) -> None:
    """By way of a file of the user's own: what a browser is started with can be read by everybody on the machine."""
    import webbrowser

    page.unlink(missing_ok=True)
    descriptor = os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><title>UGRO</title><meta http-equiv="refresh" content="0;url={url}">\n')
    webbrowser.open(page.as_uri())

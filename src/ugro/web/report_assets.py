"""Reads the style sheets and ES modules of the dashboard of which HTML files are made that need no server."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from ugro.web.report import Assets, bundle, needed

_ENTRY = "/static/sweep/report.js"
_SHEETS = ("/static/ugro.css", "/static/chart.css", "/static/sweeps.css")


def assets(entry: str = _ENTRY, sheets: Sequence[str] = _SHEETS) -> Assets:
    """By default those of a sweep."""
    return Assets("".join(_text(sheet) for sheet in sheets), bundle(entry, modules(entry)))


def modules(entry: str) -> dict[str, str]:
    """The module of that address and all that it imports, by address."""
    found: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        address = waiting.pop()
        if address not in found:
            found[address] = _text(address)
            waiting += needed(found[address])
    return found


def _text(address: str) -> str:
    """As a file of the package: the client does not import the web server."""
    return resources.files("ugro").joinpath("web", *address.strip("/").split("/")).read_text(encoding="utf-8")

"""Parts of an HTML file that needs no server and loads nothing. Pure; every text is escaped."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True, slots=True)
class Assets:
    """What the dashboard's pages load, as texts."""

    style: str
    script: str


def whole(title: str, main: str, shown: tuple[str, Any], assets: Assets) -> str:
    """``shown``: the id of an element and the document in it, which the script reads."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style data-complete>{assets.style}</style>"
    )
    # In JSON as it is written here, no tag can begin.
    document = json.dumps(shown[1]).replace("<", "\\u003c")
    scripts = (
        f'<script type="application/json" id="{shown[0]}">{document}</script>'
        f'<script type="module">{assets.script}</script>'
    )
    body = f'<main id="main"><div class="head"><h1>{escape(title)}</h1></div>{main}</main>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}{scripts}</body></html>\n'


def csv_text(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def csv_button(name: str, rows: Iterable[Sequence[str]]) -> str:
    link = f"data:text/csv;base64,{base64.b64encode(csv_text(rows).encode()).decode()}"
    return f'<a class="button" download="{escape(name)}.csv" href="{link}">Download as CSV</a>'


def table(label: str, lines: Iterable[Sequence[str]], key: str = "") -> str:
    """``key``: the name of an attribute of each row, which gets its first cell."""
    header, *body = lines
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    rows = "".join(f"<tr{_marked(key, row)}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _marked(key: str, row: Sequence[str]) -> str:
    return f' {key}="{escape(row[0])}"' if key else ""


# --- script -----------------------------------------------------------------------------------------------------------
# Several ES modules as one script, for a file that loads nothing. Pure.
#
# Each module becomes a function of its own, so that their names do not meet. It knows the form in which our modules are
# written: named imports and exports at the beginning of a line, and no default export.


_IMPORT = re.compile(r'^import (?:(\{[^}]*\}) from )?"([^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|function\*?|class) (\w+))", re.MULTILINE)
_OTHER = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)
_COMMENT = re.compile(r"^// .*\n", re.MULTILINE)


def bundle(entry: str, modules: Mapping[str, str]) -> str:
    """The module of that address with all that it imports, each after those that it needs."""
    order: list[str] = []
    _collect(entry, modules, order, ())
    names = {address: f"module{number}" for number, address in enumerate(order)}
    parts = (_part(names[address], modules[address], names) for address in order)
    # A browser ends a script at this tag, even within a string.
    return "".join(parts).replace("</script", "<\\/script")


def needed(text: str) -> list[str]:
    """The addresses that a module imports."""
    return [found[2] for found in _IMPORT.finditer(text)]


def _collect(address: str, modules: Mapping[str, str], order: list[str], above: tuple[str, ...]) -> None:
    if address in above:
        raise ValueError(f"{address} imports itself, through {', '.join(above)}")
    if address in order:
        return
    for other in needed(modules[address]):
        _collect(other, modules, order, (*above, address))
    order.append(address)


def _part(name: str, text: str, names: Mapping[str, str]) -> str:
    exported = _EXPORT.findall(text)
    text = _COMMENT.sub("", text)
    text = _IMPORT.sub(lambda found: f"const {found[1]} = {names[found[2]]};" if found[1] else "", text)
    text = _EXPORT.sub("", text)
    if (other := _OTHER.search(text)) is not None:
        raise ValueError(f"a form of import or export that is not known: {other[0]}")
    return f"const {name} = (() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})();\n"

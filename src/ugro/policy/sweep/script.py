"""Several ES modules as one script, for a file that loads nothing. Pure.

Each module becomes a function of its own, so that their names do not meet. It knows the form in which our modules are
written: named imports and exports at the beginning of a line, and no default export.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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

"""The variables in which uv and pip find package indexes, on nodes and on the agent's machine alike.

Variables, because addresses may hold passwords: others can read a process's arguments, but not its environment.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Sequence


class _Names(NamedTuple):
    main: str
    extra: str
    links: str
    between_links: str


_NAMES = {
    "uv": _Names("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", ","),
    "pip": _Names("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", " "),
}


def index_variables(
    tool: str, index_url: Optional[str], extra_index_urls: Sequence[str], find_links: Sequence[str]
) -> Dict[str, str]:
    """``tool``: uv or pip. What is not given is not set: the tool has a default."""
    names = _NAMES[tool]
    found = {
        names.main: index_url or "",
        names.extra: " ".join(extra_index_urls),
        names.links: names.between_links.join(find_links),
    }
    return {name: value for name, value in found.items() if value}

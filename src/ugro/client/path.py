"""The path of a request about something that a user has named."""

from __future__ import annotations

from urllib.parse import quote

from ugro.core.errors import NotFound

# What the things below a path are called, and the command that lists them.
_KINDS = {
    "environments": ("environment", "ugro env ls"),
    "hooks": ("hook", "ugro hooks ls"),
    "jobs": ("job", "ugro status"),
    "nodes": ("node", "ugro node ls"),
    "ray-clusters": ("Ray cluster", "ugro cluster status --all"),
    "services": ("service", "ugro serve ls"),
    "sweeps": ("sweep", "ugro sweep ls"),
    "tokens": ("token", "ugro token ls"),
}


def path_of(kind: str, word: str | int) -> str:
    """Raises NotFound for a word that would lead to another path: nothing has such a name."""
    text = str(word)
    if text in ("", ".", "..") or "/" in text:
        what, lists = _KINDS[kind]
        raise NotFound(f"there is no {what} {text!r:.80}", hint=f"see: {lists}")
    return f"/v1/{kind}/{quote(text, safe='')}"

"""A destination as people write it for ssh: NAME, USER@HOST, USER@HOST:PORT; brackets around IPv6 with a port.

Only splits it; names are validated with the cluster file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ugro.core.errors import UsageError

_PLACES = (
    re.compile(r"\[([^\[\]@]+)\](?::([0-9]{1,5}))?"),
    re.compile(r"([^:\[\]@]+)(?::([0-9]{1,5}))?"),
    re.compile(r"([0-9A-Fa-f:.]+(?:%\w+)?)()"),
)


@dataclass(frozen=True, slots=True)
class Destination:
    host: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, word: str) -> Destination:
        user, at, place = word.rpartition("@")
        found = next((match for form in _PLACES if (match := form.fullmatch(place))), None)
        is_user = not at or (user and "\n" not in user)
        if found is None or not is_user or (found[2] and not 1 <= int(found[2]) <= 65535):
            raise UsageError(f"{word!r} is not a host", hint="give NAME, USER@HOST or USER@HOST:PORT")
        return cls(found[1], user or None, int(found[2]) if found[2] else None)

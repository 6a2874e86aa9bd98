"""A destination as people write it for ssh: NAME, USER@HOST, USER@HOST:PORT; brackets around IPv6 with a port.

Only splits it; names are validated with the cluster file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ugro.core.errors import UsageError

_USER = r"(?:(.+)@)?"
_FORMS = (
    re.compile(_USER + r"\[([^\[\]@]+)\](?::([0-9]{1,5}))?"),
    re.compile(_USER + r"([^:\[\]@]+)(?::([0-9]{1,5}))?"),
    re.compile(_USER + r"([0-9A-Fa-f:.]+(?:%\w+)?)()"),
)


@dataclass(frozen=True, slots=True)
class Destination:
    host: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, word: str) -> Destination:
        found = next((match for form in _FORMS if (match := form.fullmatch(word))), None)
        if found is None or (found[3] and not 1 <= int(found[3]) <= 65535):
            raise UsageError(f"{word!r} is not a host", hint="give NAME, USER@HOST or USER@HOST:PORT")
        return cls(found[2], found[1], int(found[3]) if found[3] else None)

"""The account of this process."""

from __future__ import annotations

import os
import pwd


def account() -> str:
    """The account, whatever its environment says; its number if it has no name, as in some containers."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())

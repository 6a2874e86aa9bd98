"""Which machine this is, and under which node name the agent reached it.

Several machines may have one folder on a file server, and several node names may lead to one machine. What belongs to
one node is kept under its key, so that none of them reads another's files and every lock is one machine's own: some
file servers do not pass locks on to other machines.
"""

from __future__ import annotations

import os
import pwd

_ID_CHARACTERS = 12


def machine_id() -> str:
    """Stays the same when the machine restarts; its host name where it has no id, as in some containers."""
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            found = file.read().strip()[:_ID_CHARACTERS]
    except (OSError, ValueError):
        found = ""
    return found or file_name(os.uname().nodename)


def node_key(node: str) -> str:
    """The name of everything on disk that belongs to this node alone."""
    return "%s@%s" % (file_name(node), machine_id())


def file_name(text: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in text)


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

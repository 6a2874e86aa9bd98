"""A host that need not be part of the cluster, as a user writes it."""

from __future__ import annotations

from ugro.config.names import is_host, is_user
from ugro.core.errors import UsageError
from ugro.core.node import NodeSpec
from ugro.core.support.destination import Destination


def host_spec(word: str, remote_root: str) -> NodeSpec:
    to = Destination.parse(word)
    if not is_host(to.host) or (to.user and not is_user(to.user)):
        raise UsageError(f"{word!r} is not a host", hint="give NAME, USER@HOST or USER@HOST:PORT")
    return NodeSpec(name=word, host=to.host, user=to.user, port=to.port, remote_root=remote_root)

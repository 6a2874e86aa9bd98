"""Which agent a client uses: that of a master, of a team, or of this account."""

from __future__ import annotations

import os

from ugro.client.own_agent import OwnAgent, OwnWish
from ugro.client.reach import Reach, Say
from ugro.client.remote.master import chosen_master
from ugro.core.errors import NotAllowed
from ugro.core.support.state_dir import StateDir, chosen_socket


def chosen_reach(
    wish: OwnWish, *, named: str | None = None, command: str | None = None, on_link: Say | None = None
) -> Reach:
    """``named``: a master, before all others; ``command``: the path of ugro there.

    ``on_link``: told when the link to it breaks, and when it is back.
    """
    home = StateDir.find(os.environ)
    master = chosen_master(os.environ, home, named=named, command=command)
    if master is not None:
        from ugro.client.remote.agent import RemoteAgent

        if wish.cluster is not None:
            hint = f"for this machine: --master local, or unset UGRO_MASTER; for that one: ssh {master}"
            raise NotAllowed(f"{wish.cluster} is a file of this machine, and the agent of {master} is used", hint=hint)
        return RemoteAgent(master, home, on_wait=wish.on_wait, on_link=on_link)
    if (path := chosen_socket(os.environ)) is not None:
        from ugro.client.remote.team import TeamAgent

        return TeamAgent(path, home, on_wait=wish.on_wait)
    return OwnAgent(home, wish)

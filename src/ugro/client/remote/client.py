"""``ugro.RemoteClient``: the Python API for an agent on another machine, which is named.

Everything that ``ugro.Client`` does works the same. Paths are those of this machine: code, folders and job files are
read here and sent, results are written here.
"""

from __future__ import annotations

import os
from pathlib import Path

from ugro.client.client import Client
from ugro.client.reach import Say
from ugro.client.remote.agent import RemoteAgent
from ugro.client.remote.master import Master
from ugro.core.support.state_dir import StateDir


class RemoteClient(Client):
    def __init__(
        self,
        master: str | Master,
        *,
        home: Path | str | None = None,
        on_wait: Say | None = None,
        on_link: Say | None = None,
    ) -> None:
        """``home``: this machine's state directory. ``on_link``: told when the link breaks, and when it is back."""
        own = StateDir(Path(home).absolute()) if home else StateDir.find(os.environ)
        to = Master(master) if isinstance(master, str) else master
        self.reach = RemoteAgent(to, own, on_wait=on_wait, on_link=on_link)

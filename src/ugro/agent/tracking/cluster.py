"""The current configuration and its nodes. Edits are applied while the agent runs; an invalid one is only reported."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from ugro.config.load import load_config
from ugro.config.schema import Config
from ugro.core.errors import ConfigError, NotAllowed
from ugro.nodes.inventory import Inventory

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_Stamp = tuple[int, int, int] | None


class Cluster:
    def __init__(self, path: Path | None) -> None:
        self.error: ConfigError | None = None
        self._environment: dict[str, str] = {}
        self.inventory = Inventory(lambda: self._environment)
        self._stamp = _stamp(path)
        self.config: Config = load_config(path, os.environ)
        self._changing = asyncio.Lock()

    async def start(self) -> None:
        await self.inventory.apply(self.config)

    @property
    def path(self) -> Path | None:
        return self.config.path

    def remember_environment(self, environment: Mapping[str, str]) -> None:
        """Sets the environment for new ssh connections: the ssh-agent socket of the user's newest command."""
        self._environment.update(environment)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look_again()

    async def look_again(self) -> None:
        """Applies an edit of the file, if there is one."""
        async with self._changing:
            stamp = _stamp(self.path)
            if stamp != self._stamp:
                self._stamp = stamp
                await self._reload(self.path)

    async def switch(self, path: Path | None) -> None:
        """Uses another file. Allowed only if the agent has none, or is given none."""
        async with self._changing:
            if path == self.path:
                return
            if path is not None and self.path is not None:
                raise NotAllowed(
                    f"this agent serves {self.path}, not {path}",
                    hint="stop it first: ugro agent stop; or use both at once: UGRO_HOME=DIR ugro …",
                )
            config = await asyncio.to_thread(load_config, path, os.environ)
            self._stamp = _stamp(path)
            await self._apply(config)

    async def _reload(self, path: Path | None) -> None:
        try:
            config = await asyncio.to_thread(load_config, path, os.environ)
        except ConfigError as error:
            self.error = error
            log.error("the edited configuration is not used: %s", error)
            return
        await self._apply(config)

    async def _apply(self, config: Config) -> None:
        self.config, self.error = config, None
        change = await self.inventory.apply(config)
        log.info(
            "configuration taken up: added %s, removed %s, redialled %s",
            list(change.added), list(change.removed), list(change.redialled),
        )


def _stamp(path: Path | None) -> _Stamp:
    if path is None:
        return None
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino

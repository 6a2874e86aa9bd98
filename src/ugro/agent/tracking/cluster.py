"""The current configuration and its nodes. Edits are applied while the agent runs; an invalid one is only reported.

So is one of a file that was found in a folder, if it changes what is executed and the user has not allowed that.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ugro.config.allowance import Allowances, Effects
from ugro.config.edit import write_atomically
from ugro.config.load import load_config, parse_config, read_text
from ugro.config.schema import Config
from ugro.core.errors import ConfigError, NotAllowed
from ugro.core.node import NodeSpec
from ugro.nodes.inventory import Inventory

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_Stamp = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Guard:
    """For a file that was found, not named: only what the user has allowed is used."""

    allowances: Allowances
    ssh_config: Path  # where the allowed content of an ssh configuration is copied to

    def admit(self, text: str, path: Path) -> Effects:
        """Raises Unallowed."""
        effects = Effects.of(text, path)
        self.allowances.require(effects)
        return effects


@dataclass(frozen=True, slots=True)
class _Loaded:
    config: Config
    ssh_config: str | None = None  # the copy to use


class Cluster:
    def __init__(self, path: Path | None, guard: Guard | None = None) -> None:
        self.error: ConfigError | None = None
        self.guard = guard
        self._environment: dict[str, str] = {}
        self.inventory = Inventory(lambda: self._environment)
        self._stamps = [_stamp(path)]
        loaded = _load(path, guard)
        self.config: Config = loaded.config
        self.inventory.ssh_config = loaded.ssh_config
        self.found: Callable[[Config], Sequence[NodeSpec]] = lambda config: ()  # nodes that joined by themselves
        # Waits a little for machines that may be about to join.
        self.settled: Callable[[], Awaitable[None]] = _is_settled
        self._changing = asyncio.Lock()

    async def start(self) -> None:
        await self.inventory.apply(self.config, self.found(self.config))

    async def take_up_found(self) -> None:
        """After a change of what ``found`` returns."""
        async with self._changing:
            await self._apply(_Loaded(self.config, self.inventory.ssh_config), self.error)

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
        """Applies an edit of the file, if there is one, and if it is allowed."""
        async with self._changing:
            stamps = [_stamp(path) for path in self._watched()]
            if stamps != self._stamps:
                self._stamps = stamps
                await self._reload()

    async def switch(self, path: Path | None, guard: Guard | None = None) -> None:
        """Uses another file. Allowed only if the agent has none, or is given none."""
        async with self._changing:
            if path == self.path:
                return
            if path is not None and self.path is not None:
                raise NotAllowed(
                    f"this agent serves {self.path}, not {path}",
                    hint="stop it first: ugro agent stop; or use both at once: UGRO_HOME=DIR ugro …",
                )
            loaded = await asyncio.to_thread(_load, path, guard)
            self.guard, self._stamps = guard, [_stamp(path)]
            await self._apply(loaded)

    def _watched(self) -> list[Path | None]:
        """The file; and if it must be allowed: what was allowed, and its ssh configuration."""
        if self.guard is None:
            return [self.path]
        ssh_config = self.config.ssh.config_file
        return [self.path, self.guard.allowances.path, Path(ssh_config) if ssh_config else None]

    async def _reload(self) -> None:
        try:
            loaded = await asyncio.to_thread(_load, self.path, self.guard)
        except ConfigError as error:
            self.error = error
            log.error("the edited configuration is not used: %s", error)
            return
        await self._apply(loaded)

    async def _apply(self, loaded: _Loaded, error: ConfigError | None = None) -> None:
        self.config, self.error = loaded.config, error
        self.inventory.ssh_config = loaded.ssh_config
        change = await self.inventory.apply(loaded.config, self.found(loaded.config))
        log.info(
            "configuration taken up: added %s, removed %s, redialled %s",
            list(change.added), list(change.removed), list(change.redialled),
        )


async def _is_settled() -> None:
    pass


def _load(path: Path | None, guard: Guard | None) -> _Loaded:
    if path is None or guard is None:
        return _Loaded(load_config(path, os.environ))
    text = read_text(path)  # once: what is looked at is what is used
    config = parse_config(text, path, os.environ)
    effects = guard.admit(text, path)
    if effects.ssh_config is None or config.ssh.config_file != effects.ssh_config_file:
        return _Loaded(config)  # it names none, or the user's environment names another one
    # ssh reads its file at each connection: the copy stays as it was allowed.
    write_atomically(guard.ssh_config, effects.ssh_config, mode=0o600)
    return _Loaded(config, str(guard.ssh_config))


def _stamp(path: Path | None) -> _Stamp:
    if path is None:
        return None
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino

"""The current configuration and its nodes. Edits are applied while the agent runs; an invalid one is only reported.

So is one of a file that was found in a folder, if it changes what is executed and the user has not allowed that.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ugro.kernel.access.model import account_of, node_of
from ugro.kernel.config.allowance import Allowances, Effects
from ugro.kernel.config.edit import write_atomically
from ugro.kernel.config.load import load_config, parse_config, read_text
from ugro.kernel.config.schema import Config
from ugro.kernel.links.model import NodeSpec, Role
from ugro.kernel.links.node import Dialling, Node
from ugro.kernel.links.transport import SshOptions
from ugro.kernel.support.aio import ChangeSignal
from ugro.kernel.support.errors import ConfigError, NotAllowed, NotFound

# --- the nodes and their links ----------------------------------------------------------------------------------------
# A new configuration only affects nodes that differ.
#
# Beside the nodes are logins: links to the same nodes as one person each, for the jobs of that person
# (``kernel.access.model``). They are no nodes of their own: they are found by their names, and nothing else lists them.


@dataclass(frozen=True, slots=True)
class Change:
    added: tuple[str, ...]
    removed: tuple[str, ...]
    redialled: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.redialled)


@dataclass(frozen=True, slots=True)
class KnownLogins:
    """The logins that jobs were started through; they change as jobs come and go."""

    used: set[str] = field(default_factory=set)  # each is opened when it is asked for
    unclear: set[str] = field(default_factory=set)  # those of them that may have something of a job


class Inventory:
    def __init__(self, environment: Callable[[], Mapping[str, str]], ssh_config: str | None = None) -> None:
        self._environment = environment
        self.ssh_config = ssh_config  # used instead of the file that the configuration names
        self._nodes: dict[str, Node] = {}
        self._logins: dict[str, Node] = {}
        self.known_logins = KnownLogins()
        self._dialling: Dialling | None = None

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    async def apply(self, config: Config, found: Sequence[NodeSpec] = ()) -> Change:
        """Opens links to new nodes, closes links to removed ones, and leaves unchanged ones alone.

        ``found``: nodes that are not in the file; a name that is in the file means the node there.
        """
        dialling = self.dialling(config)
        same_way = self._dialling is not None and self._dialling.options == dialling.options
        specs = {spec.name: spec for spec in config.nodes}
        specs |= {spec.name: spec for spec in found if spec.name not in specs}
        kept = {
            name: node
            for name, node in self._nodes.items()
            if name in specs and _reach(node.spec) == _reach(specs[name]) and (same_way or node.spec.transport != "ssh")
        }
        gone = [node for name, node in self._nodes.items() if name not in kept]
        old = set(self._nodes)
        self._dialling = dialling
        for name, node in kept.items():
            node.spec, node.dialling = specs[name], dialling
        await asyncio.gather(*(node.close() for node in gone))
        self._nodes = {name: kept.get(name) or Node(spec, dialling) for name, spec in specs.items()}
        await self._redial_logins(same_way)
        return Change(
            added=tuple(sorted(set(specs) - old)),
            removed=tuple(sorted(old - set(specs))),
            redialled=tuple(sorted((set(specs) & old) - set(kept))),
        )

    def dialling(self, config: Config) -> Dialling:
        ssh = config.ssh
        key_file = str(ssh.key_file) if ssh.key_file else None
        config_file = (self.ssh_config or str(ssh.config_file)) if ssh.config_file else None
        return Dialling(
            options=SshOptions(ssh.connect_timeout, key_file, config_file),
            quick_retries=ssh.max_retries,
            slots=asyncio.Semaphore(ssh.pool_size),
            environment=self._environment,
        )

    def find(self, name: str) -> Node | None:
        """A node, or a login that is open or can be opened again."""
        if (node := self._nodes.get(name) or self._logins.get(name)) is not None:
            return node
        return self.open_login(name) if name in self.known_logins.used else None

    def get(self, name: str) -> Node:
        return self.find(name) or self.named(name)

    def named(self, word: str) -> Node:
        """By a word of a person, who names nodes: through a login, only the job that was placed there is reached."""
        if (node := self._nodes.get(word)) is not None:
            return node
        near = difflib.get_close_matches(word, self._nodes, n=1)
        raise NotFound(
            f"no node {word!r} in this cluster",
            hint=f"did you mean {near[0]}?" if near else "see: ugro node ls",
        )

    def select(self, words: Sequence[str]) -> list[Node]:
        """Nodes by name, ``@all`` or ``@label``, each once, in the cluster's order; without arguments, all nodes."""
        if not words:
            return list(self)
        wanted: set[str] = set()
        for word in words:
            wanted |= self._names(word)
        return [node for node in self if node.spec.name in wanted]

    def _names(self, word: str) -> set[str]:
        if word == "all" and word not in self._nodes:
            raise NotFound("there is no node named all", hint="did you mean @all?")
        if not word.startswith("@"):
            return {self.named(word).spec.name}
        if word == "@all":
            return set(self._nodes)
        found = {node.spec.name for node in self if word[1:] in _groups(node.spec)}
        if not found:
            groups = sorted({group for node in self for group in _groups(node.spec)})
            raise NotFound(f"no node has the label {word}", hint=f"labels: @all @{' @'.join(groups)}")
        return found

    async def close(self) -> None:
        await asyncio.gather(*(node.close() for node in (*self._nodes.values(), *self._logins.values())))
        self._nodes, self._logins = {}, {}

    # --- logins -----------------------------------------------------------------------------------------------------

    @property
    def logins(self) -> tuple[Node, ...]:
        return tuple(self._logins.values())

    @property
    def linked(self) -> list[Node]:
        """The nodes and logins that can be asked now."""
        return [node for node in (*self, *self.logins) if node.link is not None]

    def opened_login(self, name: str) -> Node | None:
        """None if it is not dialled now. It stays so."""
        return self._logins.get(name)

    def open_login(self, name: str) -> Node | None:
        """Dials as that account, unless the link is there. None if its node is not in this cluster, or not by ssh."""
        if (known := self._logins.get(name)) is not None:
            return known
        base = self._nodes.get(node_of(name))
        if base is None or base.spec.transport != "ssh" or self._dialling is None:
            return None
        login = self._logins[name] = Node(base.spec.login(account_of(name)), self._dialling)
        return login

    async def close_login(self, name: str) -> None:
        if (node := self._logins.pop(name, None)) is not None:
            await node.close()

    async def _redial_logins(self, same_way: bool) -> None:
        """Those that differ are closed, at once. What still needs them opens them again."""
        stale: list[str] = []
        for name, login in list(self._logins.items()):
            base = self._nodes.get(node_of(name))
            wanted = base.spec.login(account_of(name)) if base is not None else None
            if wanted is None or not same_way or _reach(login.spec) != _reach(wanted):
                stale.append(name)
            else:
                login.spec, login.dialling = wanted, self._nodes[node_of(name)].dialling
        await asyncio.gather(*map(self.close_login, stale))


def _reach(spec: NodeSpec) -> NodeSpec:
    """Everything that a link depends on: a changed label is no reason to close it."""
    found_by = "found" if spec.found_by else None
    notes = replace(spec, role=Role.WORKER, gpu=None, vram_bytes=None, labels=())
    return replace(notes, owner=None, power=None, found_by=found_by, account=None)


def _groups(spec: NodeSpec) -> set[str]:
    return {*spec.labels, spec.role.value}


# --- the configuration in use -----------------------------------------------------------------------------------------


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
    def __init__(
        self,
        path: Path | None,
        guard: Guard | None = None,
        found: Callable[[Config], Sequence[NodeSpec]] = lambda config: (),
    ) -> None:
        """``found`` returns the nodes that joined by themselves."""
        self.error: ConfigError | None = None
        self.guard = guard
        self._environment: dict[str, str] = {}
        self._stamps = [_stamp(path)]
        loaded = _load(path, guard)
        self.config: Config = loaded.config
        self.inventory = Inventory(lambda: self._environment, loaded.ssh_config)
        self._found = found
        self._changing = asyncio.Lock()
        self.changed = ChangeSignal()  # another configuration is used

    async def start(self) -> None:
        await self.inventory.apply(self.config, self._found(self.config))

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
        change = await self.inventory.apply(loaded.config, self._found(loaded.config))
        self.changed.notify()
        log.info(
            "configuration taken up: added %s, removed %s, redialled %s",
            list(change.added), list(change.removed), list(change.redialled),
        )


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

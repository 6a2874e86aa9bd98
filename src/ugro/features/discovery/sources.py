"""The sources that a configuration names."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import ipaddress
import os
import re
import shlex
import signal
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ugro.features.discovery.candidates import Offer, Offers, Source, SourceDown
from ugro.features.discovery.config import DiscoverySection
from ugro.features.discovery.registries import ConsulSource, ZooKeeperSource
from ugro.kernel.agent.model import Destination
from ugro.kernel.config.schema import Config
from ugro.kernel.config.section import is_host
from ugro.kernel.support.errors import UsageError
from ugro.kernel.support.process import inherited
from ugro.node import foreign
from ugro.node.globs import Glob

if TYPE_CHECKING:
    from ifaddr import Adapter
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncZeroconf


# --- command ----------------------------------------------------------------------------------------------------------
# Machines that a program of the user's prints as JSON: a list, a map of names, or an Ansible inventory.


_MOST_BYTES = 4 * 1024 * 1024
_SHAPE = 'it must print a list such as ["gpu1", {"name": "gpu2", "host": "10.0.0.2"}], or a map of names'
_ALL = ("all", "ungrouped")  # groups that every inventory has


@dataclass(frozen=True, slots=True)
class CommandSource:
    argv: tuple[str, ...]
    folder: Path  # that of the cluster file
    interval_s: float
    timeout_s: float
    name = "command"
    is_polled = True
    may_name_users = True  # the user wrote it, or allowed it

    @property
    def place(self) -> str:
        return " ".join(self.argv)

    async def watch(self) -> AsyncGenerator[Offers]:
        while True:
            yield offers_in(await self._output())
            await asyncio.sleep(self.interval_s)

    async def _output(self) -> bytes:
        program = self.argv[0]
        try:
            process = await asyncio.create_subprocess_exec(
                *self.argv,
                cwd=self.folder,
                env=inherited(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            hint = "correct discovery.command"
            raise SourceDown(f"{program} cannot be started: {reason.lower()}", hint=hint) from error
        try:
            async with asyncio.timeout(self.timeout_s):
                output, said = await asyncio.gather(_bounded(process.stdout), _bounded(process.stderr))
                code = await process.wait()
        except TimeoutError:
            hint = "discovery.timeout sets the limit"
            raise SourceDown(f"{program} did not end within {self.timeout_s:g} s", hint=hint) from None
        finally:
            await _end(process)
        if code != 0:
            last = (said.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:200]
            raise SourceDown(f"{program} ended with exit code {code}" + (f": {last}" if last else ""))
        if len(output) > _MOST_BYTES:
            raise SourceDown(f"{program} printed more than {_MOST_BYTES // 2**20} MiB")
        return output


def offers_in(text: bytes) -> Offers:
    """Raises SourceDown for what is no inventory; single machines are checked later."""
    try:
        tree = foreign.parsed(text, _MOST_BYTES)
    except ValueError as error:
        raise SourceDown("its output is not JSON", hint=_SHAPE) from error
    if isinstance(tree, list):
        return [_offer(one) for one in tree]
    if not isinstance(tree, dict):
        raise SourceDown("its output is neither a list nor a map", hint=_SHAPE)
    if "_meta" in tree or any(isinstance(one, dict) and "hosts" in one for one in tree.values()):
        return _ansible(tree)
    return [_offer({"name": name, **(fields if isinstance(fields, dict) else {})}) for name, fields in tree.items()]


def _offer(one: object) -> Offer:
    if not isinstance(one, dict):
        return Offer(one)
    host = one.get("host", one.get("ip"))
    return Offer(one.get("name", host), host, one.get("user"), one.get("port"), one.get("labels", ()))


def _ansible(tree: Mapping[str, object]) -> Offers:
    """What ``--list`` of an Ansible inventory prints; a host's groups are its labels."""
    groups = {name: group for name, group in tree.items() if name != "_meta"}
    members = {name: _members(name, groups, frozenset()) for name in groups}
    hosts = list(dict.fromkeys(host for found in members.values() for host in found))
    meta = tree.get("_meta")
    found = meta.get("hostvars") if isinstance(meta, dict) else None
    variables = found if isinstance(found, dict) else {}
    return [_ansible_host(host, variables.get(host), members) for host in hosts]


def _ansible_host(host: str, variables: object, members: Mapping[str, list[str]]) -> Offer:
    of = variables if isinstance(variables, dict) else {}
    labels = [name for name, hosts in members.items() if name not in _ALL and host in hosts]
    user = of.get("ansible_user", of.get("ansible_ssh_user"))
    return Offer(host, of.get("ansible_host"), user, of.get("ansible_port"), labels)


def _members(name: str, groups: Mapping[str, object], above: frozenset[str]) -> list[str]:
    """With those of the groups below it."""
    group = groups.get(name)
    if isinstance(group, list):  # the short form of a group without variables
        group = {"hosts": group}
    if not isinstance(group, dict) or name in above:
        return []
    own, children = group.get("hosts"), group.get("children")
    found = [host for host in own if isinstance(host, str)] if isinstance(own, list) else []
    for child in children if isinstance(children, list) else []:
        if isinstance(child, str):
            found += _members(child, groups, above | {name})
    return found


async def _bounded(stream: asyncio.StreamReader | None) -> bytes:
    """At most a little more than is allowed; the rest is read and thrown away, so that the program can end."""
    assert stream is not None
    kept = b""
    while part := await stream.read(64 * 1024):
        if len(kept) <= _MOST_BYTES:
            kept += part
    return kept


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


# --- mdns -------------------------------------------------------------------------------------------------------------
# Machines that announce a service in the local network, such as _ssh._tcp, by multicast DNS (python-zeroconf).
#
# Without a network nobody can be heard, which says nothing about the machines: the source is down then. The library
# listens at the addresses that this machine has when it begins, so a change of them ends the watch, and a new one
# begins.


# Machines answer a first question within about a second; then the list is taken as whole.
_FIRST_S = 1.5
_RESOLVE_MS = 3000
_MOST_SERVICES = 1000
_LOOK_S = 5.0  # between two looks at the addresses of this machine
_INTERFACES = Path("/sys/class/net")
_NO_CARRIER = ("down", "lowerlayerdown", "notpresent", "dormant")  # the kernel's words; "unknown" works


@dataclass(frozen=True, slots=True)
class MdnsSource:
    service: str
    first_s: float = _FIRST_S
    look_s: float = _LOOK_S
    name = "mdns"
    is_polled = False
    may_name_users = False  # anybody in the network can announce anything

    @property
    def place(self) -> str:
        return f"{self.service} in the local network"

    async def watch(self) -> AsyncGenerator[Offers]:
        try:
            from zeroconf import IPVersion
            from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf
        except ImportError as error:
            hint = "install it where the agent runs: pip install 'ugro[mdns]'; then: ugro agent restart"
            raise SourceDown("the package zeroconf is not installed", hint=hint) from error
        addresses = _addresses()
        try:
            network = AsyncZeroconf(ip_version=IPVersion.V4Only)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise SourceDown(f"multicast does not work on this machine: {reason}") from error
        listening = _Listening(network)
        browser = AsyncServiceBrowser(network.zeroconf, f"{self.service}.local.", handlers=[listening.changed])
        try:
            await asyncio.sleep(self.first_s)
            while _addresses() == addresses:
                listening.news.clear()
                yield list(listening.offers.values())
                await self._news_or_other_addresses(listening, addresses)
        finally:
            listening.close()
            await browser.async_cancel()
            await network.async_close()

    async def _news_or_other_addresses(self, listening: _Listening, addresses: frozenset[str]) -> None:
        while not listening.news.is_set() and _addresses() == addresses:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.look_s):
                    await listening.news.wait()


@dataclass(slots=True)
class _Listening:
    network: AsyncZeroconf
    news: asyncio.Event = field(default_factory=asyncio.Event)
    offers: dict[str, Offer] = field(default_factory=dict)  # by the full name of the announcement
    resolving: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        """Called in the loop; the names of the arguments are the library's."""
        if (task := self.resolving.pop(name, None)) is not None:
            task.cancel()
        if state_change.name == "Removed":
            if self.offers.pop(name, None) is not None:
                self.news.set()
        elif name in self.offers or len(self.offers) + len(self.resolving) < _MOST_SERVICES:
            self.resolving[name] = asyncio.create_task(self._resolve(service_type, name), name=f"resolve {name}")

    def close(self) -> None:
        for task in self.resolving.values():
            task.cancel()

    async def _resolve(self, service_type: str, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        service = AsyncServiceInfo(service_type, name)
        if await service.async_request(self.network.zeroconf, _RESOLVE_MS):
            offer = offer_of(name.removesuffix(f".{service_type}"), service.parsed_scoped_addresses(), service)
            if offer is not None and self.offers.get(name) != offer:
                self.offers[name] = offer
                self.news.set()
        self.resolving.pop(name, None)


def _addresses() -> frozenset[str]:
    """Of this machine in networks. Raises SourceDown if it is in none."""
    import ifaddr

    found = network_addresses(ifaddr.get_adapters(), _INTERFACES)
    if not found:
        raise SourceDown("this machine is in no network", hint="connect it; its addresses: ip -4 address")
    return found


def network_addresses(adapters: Iterable[Adapter], interfaces: Path) -> frozenset[str]:
    """IPv4 addresses that others could hear; a bridge for containers has one without anybody at the other end."""
    # "eth0:1" is a second address of eth0.
    connected = [one for one in adapters if _state(interfaces / one.name.partition(":")[0]) not in _NO_CARRIER]
    found = [ip.ip for one in connected for ip in one.ips if isinstance(ip.ip, str)]
    return frozenset(ip for ip in found if not ipaddress.ip_address(ip).is_loopback)


def _state(interface: Path) -> str | None:
    try:
        return (interface / "operstate").read_text().strip()
    except OSError:  # not Linux, or it has just gone
        return None


def offer_of(instance: str, addresses: list[str], service: Any) -> Offer | None:
    """``service`` has what was resolved: ``port``, ``server`` and ``decoded_properties``."""
    host = best_address(addresses)
    if host is None:
        return None
    # "gpu1", "gpu1 [aa:bb:cc:dd:ee:ff]" and "The GPU box": the first becomes its name as it is.
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", instance.partition(" [")[0]).strip("-._")[:64]
    short = str(service.server or "").partition(".")[0]
    labels = (service.decoded_properties or {}).get("labels") or ()
    return Offer(word or short, host, None, service.port, labels)


def best_address(addresses: list[str]) -> str | None:
    """IPv4 before IPv6, a routable address before one of the link."""

    def rank(address: str) -> tuple[bool, bool]:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        return parsed.is_link_local, parsed.version == 6

    usable = [one for one in addresses if not ipaddress.ip_address(one.partition("%")[0]).is_loopback]
    return min(usable or addresses, key=rank, default=None)


# --- ssh config -------------------------------------------------------------------------------------------------------
# Finds the machines that the user's ssh configuration already names.


_MAX_INCLUDE_DEPTH = 8


@dataclass(frozen=True, slots=True)
class SshConfigSource:
    path: Path
    pattern: str
    interval_s: float
    name = "ssh_config"
    is_polled = True
    may_name_users = False  # ssh reads them itself

    @property
    def place(self) -> str:
        return f"{self.path}: {self.pattern}"

    async def watch(self) -> AsyncGenerator[Offers]:
        while True:
            yield self._offers()
            await asyncio.sleep(self.interval_s)

    def _offers(self) -> Offers:
        try:
            self.path.expanduser().open("rb").close()
        except OSError as error:
            raise SourceDown(f"{self.path} cannot be read: {(error.strerror or 'unknown').lower()}") from error
        pattern = Glob(self.pattern)
        return [Offer(host) for host in ssh_config_hosts(self.path) if pattern.fits(host)]


def ssh_config_hosts(path: Path) -> list[str]:
    """The plain names of all Host blocks, in order, without patterns and code-hosting logins (User git)."""
    hosts: list[str] = []
    skipped: set[str] = set()
    block: list[str] = []
    for key, words in _settings(path, _MAX_INCLUDE_DEPTH):
        if key == "match":
            block = []
        elif key == "host":
            block = [word for word in words if _is_machine(word)]
            hosts += [word for word in block if word not in hosts]
        elif key == "user" and words == ["git"]:
            skipped.update(block)
    return [host for host in hosts if host not in skipped]


def _is_machine(word: str) -> bool:
    """Neither a pattern nor a name that no other file could contain, such as one with a space."""
    if set(word) & set("*?!") or not is_host(word):
        return False
    try:
        return Destination.parse(word).host == word
    except UsageError:
        return False


def _settings(path: Path, depth: int) -> Iterator[tuple[str, list[str]]]:
    try:
        text = path.expanduser().read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        words = _words(line)
        if len(words) < 2:
            continue
        key = words[0].lower()
        if key == "include" and depth:
            for pattern in words[1:]:
                for file in _included(pattern):
                    yield from _settings(file, depth - 1)
        else:
            yield key, words[1:]


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split = True
    lexer.whitespace += "="  # "Host=name" means the same as "Host name"
    try:
        return list(lexer)
    except ValueError:  # an unclosed quote; ssh itself reports it
        return []


def _included(pattern: str) -> list[Path]:
    # As ssh does: relative to ~/.ssh, wherever the including file is.
    whole = Path("~/.ssh").expanduser() / Path(pattern).expanduser()
    return [Path(name) for name in sorted(glob.glob(str(whole)))]


# --- sources ----------------------------------------------------------------------------------------------------------


_SSH_CONFIG = "~/.ssh/config"


def sources_of(config: Config, ssh_config: str | None) -> tuple[Source, ...]:
    """Equal settings give equal sources. ``ssh_config``: a file to use instead of the one that is configured."""
    section = config.section(DiscoverySection)
    found: list[Source] = []
    if section.ssh_config:
        file = (ssh_config or config.ssh.config_file) if config.ssh.config_file else _SSH_CONFIG
        found.append(SshConfigSource(Path(file or _SSH_CONFIG), section.ssh_config, section.interval))
    if section.mdns:
        found.append(MdnsSource(section.mdns))
    if (zookeeper := section.zookeeper) is not None:
        found.append(ZooKeeperSource(zookeeper.hosts, zookeeper.path, section.timeout, section.accept_users))
    if (consul := section.consul) is not None:
        found.append(
            ConsulSource(
                consul.url, consul.service, section.timeout, consul.tag, consul.token_env, consul.token_file
            )
        )
    if section.command:
        folder = config.path.absolute().parent if config.path else Path.home()
        found.append(CommandSource(section.command, folder, section.interval, section.timeout))
    return tuple(found)

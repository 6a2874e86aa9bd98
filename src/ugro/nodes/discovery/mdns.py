"""Machines that announce a service in the local network, such as _ssh._tcp, by multicast DNS (python-zeroconf).

Without a network nobody can be heard, which says nothing about the machines: the source is down then. The library
listens at the addresses that this machine has when it begins, so a change of them ends the watch, and a new one begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ugro.nodes.discovery.source import Offer, Offers, SourceDown

if TYPE_CHECKING:
    from ifaddr import Adapter
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncZeroconf

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

"""Machines that are registered in ZooKeeper: the children of one folder, usually ephemeral ones (kazoo).

The library works in threads of its own. A lost connection ends the watch, and the next one makes a new session: nothing
is written, so nothing of an old session is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ugro.nodes.discovery.candidates import MOST_OFFERS
from ugro.nodes.discovery.source import Offer, Offers, SourceDown
from ugro.remote import foreign

if TYPE_CHECKING:
    from kazoo.client import KazooClient

_MOST_BYTES = 64 * 1024  # of one entry


@dataclass(frozen=True, slots=True)
class ZooKeeperSource:
    hosts: str
    path: str
    timeout_s: float
    may_name_users: bool = False
    name = "zookeeper"
    is_polled = False

    @property
    def place(self) -> str:
        return f"{self.hosts}{self.path}"

    async def watch(self) -> AsyncGenerator[Offers]:
        loop = asyncio.get_running_loop()
        news = asyncio.Event()

        def on_event(event: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before the library's threads
                loop.call_soon_threadsafe(news.set)

        client = self._client()
        client.add_listener(on_event)
        client.start_async()
        try:
            await self._until_connected(client, news)
            while True:
                news.clear()
                yield await self._read_all(client, on_event)
                await news.wait()
                if not client.connected:
                    raise SourceDown(f"the connection to {self.hosts} is lost")
        finally:
            # Nobody waits for it: with a server that is silent, the library takes as long as a session lasts.
            threading.Thread(target=_close, args=(client,), name="close ZooKeeper", daemon=True).start()

    def _client(self) -> KazooClient:
        try:
            from kazoo.client import KazooClient
        except ImportError as error:
            hint = "install it where the agent runs: pip install 'ugro[zookeeper]'; then: ugro agent restart"
            raise SourceDown("the package kazoo is not installed", hint=hint) from error
        quiet = logging.getLogger("ugro.kazoo")
        quiet.setLevel(logging.CRITICAL)  # we report a lost connection ourselves, once
        return KazooClient(hosts=self.hosts, timeout=self.timeout_s, read_only=True, logger=quiet)

    async def _until_connected(self, client: KazooClient, news: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                while not client.connected:
                    await news.wait()
                    news.clear()
        except TimeoutError:
            raise SourceDown(f"no server of {self.hosts} answers within {self.timeout_s:g} s") from None

    async def _read_all(self, client: KazooClient, on_event: Callable[[object], None]) -> Offers:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.to_thread(self._read, client, on_event)
        except TimeoutError:
            raise SourceDown(f"{self.hosts} did not answer within {self.timeout_s:g} s") from None

    def _read(self, client: KazooClient, on_event: Callable[[object], None]) -> Offers:
        """All entries, with a watch on each, so that the next change of any of them is noticed."""
        from kazoo.exceptions import ConnectionLoss, KazooException, NoAuthError, NoNodeError, SessionExpiredError

        try:
            offers: list[Offer] = []
            for child in sorted(client.get_children(self.path, watch=on_event))[: MOST_OFFERS + 1]:
                try:
                    content, _ = client.get(f"{self.path.rstrip('/')}/{child}", watch=on_event)
                except NoNodeError:
                    continue  # it left a moment ago; the watch on the folder fires
                offers.append(offer_of(child, content))
        except NoNodeError as error:
            hint = "correct discovery.zookeeper.path, or create it"
            raise SourceDown(f"there is no {self.path} in ZooKeeper", hint=hint) from error
        except NoAuthError as error:
            raise SourceDown(f"ZooKeeper does not allow to read {self.path}") from error
        except (ConnectionLoss, SessionExpiredError) as error:
            raise SourceDown(f"the connection to {self.hosts} is lost") from error
        except KazooException as error:
            raise SourceDown(f"ZooKeeper: {type(error).__name__}") from error
        return offers


def offer_of(child: str, content: bytes) -> Offer:
    """An entry without content is a machine that is reached by its name."""
    if not content.strip():
        return Offer(child)
    found = _parsed(content)
    if not isinstance(found, dict):
        return Offer(child, host=[])  # refused, and said so: a content that is no map is a mistake
    return Offer(found.get("name", child), found.get("host"), found.get("user"), found.get("port"), found.get("labels"))


def _parsed(content: bytes) -> Any:
    try:
        return foreign.parsed(content, _MOST_BYTES)
    except ValueError:
        return None


def _close(client: KazooClient) -> None:
    client.stop()
    client.close()

"""Machines that are registered in Consul: the healthy instances of one service, by blocking queries of its HTTP API.

A blocking query is answered when something has changed, or after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import logging
import os
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

import ugro
from ugro.features.discovery.candidates import MOST_OFFERS, Offer, Offers, SourceDown
from ugro.node import foreign

if TYPE_CHECKING:
    from kazoo.client import KazooClient


_WAIT_S = 60
_MOST_BYTES = 16 * 1024 * 1024
# A server that answers at once, although nothing has changed, is not asked more often than this.
_LEAST_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class ConsulSource:
    url: str
    service: str
    timeout_s: float
    tag: str | None = None
    token_env: str | None = None
    token_file: str | None = None
    wait_s: int = _WAIT_S
    name = "consul"
    is_polled = False
    may_name_users = False

    @property
    def place(self) -> str:
        return f"{self.url}, service {self.service}" + (f", tag {self.tag}" if self.tag else "")

    async def watch(self) -> AsyncGenerator[Offers]:
        index, before = 0, None
        while True:
            answer = await self._ask(index)
            # As Consul's documentation asks: an index that went back, or is 0, starts over.
            index = answer.index if answer.index >= max(index, 1) else 0
            if answer.offers != before:
                before = answer.offers
                yield before
            await asyncio.sleep(_LEAST_PAUSE_S)

    async def _ask(self, index: int) -> _Answer:
        request = self._request(index)
        try:
            async with asyncio.timeout(self.timeout_s):
                reader, writer = await self._connect()
            try:
                writer.write(request)
                # A blocking query may take up to a sixteenth longer than it was asked to.
                async with asyncio.timeout(self.wait_s * 17 / 16 + self.timeout_s):
                    status, headers, body = _parsed(await _to_the_end(reader))
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        except (OSError, http.client.HTTPException) as error:
            raise SourceDown(f"{self.url}: {_cause(error)}") from error
        if status != 200:
            raise _refusal(self.url, status, body)
        return _Answer(_index(headers.get("X-Consul-Index")), offers_in(body))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        is_tls = parts.scheme == "https"
        context = ssl.create_default_context() if is_tls else None
        return await asyncio.open_connection(parts.hostname, parts.port or (443 if is_tls else 80), ssl=context)

    def _request(self, index: int) -> bytes:
        # Without keep-alive: the end of the connection is the end of the answer.
        headers = {"Host": urlsplit(self.url).netloc, "Connection": "close", **self.headers()}
        lines = [f"GET {self.path(index)} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def path(self, index: int) -> str:
        query = {"passing": "1", "index": str(index), "wait": f"{self.wait_s}s"}
        if self.tag:
            query["tag"] = self.tag
        prefix = urlsplit(self.url).path.rstrip("/")
        return f"{prefix}/v1/health/service/{quote(self.service, safe='')}?{urlencode(query)}"

    def headers(self) -> dict[str, str]:
        token = self._token()
        own = {"X-Consul-Token": token} if token else {}
        return {"User-Agent": f"ugro/{ugro.__version__}", "Accept": "application/json", **own}

    def _token(self) -> str | None:
        if self.token_env is not None:
            if not (token := os.environ.get(self.token_env, "").strip()):
                hint = "export it, then: ugro agent restart; or use discovery.consul.token_file"
                raise SourceDown(f"{self.token_env} is not set in the environment of the agent", hint=hint)
        elif self.token_file is not None:
            try:
                with open(self.token_file, encoding="utf-8") as file:
                    token = file.read(4096).strip()
            except (OSError, ValueError) as error:
                raise SourceDown(f"{self.token_file} cannot be read") from error
        else:
            return None
        if not token.isascii() or not token.isprintable():
            raise SourceDown("the token is not one line of text")
        return token


@dataclass(frozen=True, slots=True)
class _Answer:
    index: int
    offers: Offers


class _Received:
    """An answer that was read to its end, as the library's parser takes it: in place of a socket."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._content)


async def _to_the_end(reader: asyncio.StreamReader) -> bytes:
    content = b""
    while part := await reader.read(256 * 1024):
        content += part
        if len(content) > _MOST_BYTES:
            raise SourceDown(f"Consul's answer is larger than {_MOST_BYTES // 2**20} MiB")
    return content


def _parsed(content: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
    response = http.client.HTTPResponse(_Received(content))  # type: ignore[arg-type]
    response.begin()
    return response.status, response.headers, response.read()


def offers_in(body: bytes) -> Offers:
    """The answer of ``/v1/health/service``. An instance without an address has that of its node."""
    try:
        tree = foreign.parsed(body, _MOST_BYTES)
    except ValueError as error:
        raise SourceDown("Consul's answer is not JSON") from error
    if not isinstance(tree, list):
        raise SourceDown("Consul's answer is not a list of instances")
    return [_offer(_map(one)) for one in tree]


def _offer(instance: Mapping[str, Any]) -> Offer:
    node, service = _map(instance.get("Node")), _map(instance.get("Service"))
    host = service.get("Address") or node.get("Address")
    return Offer(node.get("Node"), host, None, service.get("Port"), service.get("Tags"))


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _index(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 20 else 0


def _refusal(url: str, status: int, body: bytes) -> SourceDown:
    text = " ".join(body[:200].decode("utf-8", "replace").split())
    said = f": {text}" if text.isprintable() and text else ""
    hint = "give a token that may read it: discovery.consul.token_env" if status in (401, 403) else None
    return SourceDown(f"{url} answered {status}{said}", hint=hint)


def _cause(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its certificate is not trusted"
    if isinstance(error, TimeoutError):
        return "did not answer in time"
    if isinstance(error, socket.gaierror):
        return "no such host name"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "closed the connection" if isinstance(error, http.client.HTTPException) else str(error) or "no answer"


# --- zookeeper --------------------------------------------------------------------------------------------------------
# Machines that are registered in ZooKeeper: the children of one folder, usually ephemeral ones (kazoo).
#
# The library works in threads of its own. A lost connection ends the watch, and the next one makes a new session:
# nothing is written, so nothing of an old session is needed.


_ZOOKEEPER_MOST_BYTES = 64 * 1024  # of one entry


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
    found = _zookeeper_parsed(content)
    if not isinstance(found, dict):
        return Offer(child, host=[])  # refused, and said so: a content that is no map is a mistake
    return Offer(found.get("name", child), found.get("host"), found.get("user"), found.get("port"), found.get("labels"))


def _zookeeper_parsed(content: bytes) -> Any:
    try:
        return foreign.parsed(content, _ZOOKEEPER_MOST_BYTES)
    except ValueError:
        return None


def _close(client: KazooClient) -> None:
    client.stop()
    client.close()

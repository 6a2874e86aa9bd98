"""Machines that are registered in Consul: the healthy instances of one service, by blocking queries of its HTTP API.

A blocking query is answered when something has changed, or after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import ugro
from ugro.nodes.discovery.source import Offer, Offers, SourceDown
from ugro.remote import foreign

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

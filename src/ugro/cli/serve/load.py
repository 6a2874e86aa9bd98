"""A bounded load on an HTTP address: so many requests, by so many clients at once, each with its own connection."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field

_CONNECT_S = 10.0
_MOST_HEADER = 64 * 1024


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    request: bytes  # the whole of it
    has_tls: bool = False
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Bounds:
    requests: int | None = None
    seconds: float | None = None
    clients: int = 8


@dataclass(slots=True)
class Outcome:
    times_s: list[float] = field(default_factory=list)  # of requests that were answered well
    failures: dict[str, int] = field(default_factory=dict)  # by what went wrong
    took_s: float = 0.0

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def rate(self) -> float:
        return len(self.times_s) / self.took_s if self.took_s else 0.0

    def percentile_s(self, share: float) -> float | None:
        if not self.times_s:
            return None
        ordered = sorted(self.times_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def note(self, what: str) -> None:
        self.failures[what] = self.failures.get(what, 0) + 1


class Load:
    def __init__(self, target: Target, bounds: Bounds) -> None:
        self._target = target
        self._bounds = bounds
        self._begun = 0
        self._deadline = float("inf")
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        began = time.monotonic()
        if self._bounds.seconds is not None:
            self._deadline = began + self._bounds.seconds
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._bounds.clients):
                    group.create_task(self._client(), name=f"client {number}")
        finally:
            self.outcome.took_s = time.monotonic() - began
        return self.outcome

    def _may_begin(self) -> bool:
        most = self._bounds.requests
        if time.monotonic() >= self._deadline or (most is not None and self._begun >= most):
            return False
        self._begun += 1
        return True

    async def _client(self) -> None:
        connection = Connection(self._target)
        while self._may_begin():
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._target.timeout_s):
                    status = await connection.ask()
            except (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError) as error:
                connection.close()
                self.outcome.note(str(error) or type(error).__name__)
                continue
            if status < 400:
                self.outcome.times_s.append(time.monotonic() - began)
            else:
                self.outcome.note(f"status {status}")
        connection.close()


class Connection:
    """HTTP/1.1, one request after the other."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def ask(self) -> int:
        """The status of an answer that has been read to its end."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await self._open()
        self._writer.write(self._target.request)
        await self._writer.drain()
        status, headers = await self._head(self._reader)
        await self._body(self._reader, headers)
        if headers.get("connection", "").lower() == "close":
            self.close()
        return status

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = self._target
        context = ssl.create_default_context() if target.has_tls else None
        async with asyncio.timeout(_CONNECT_S):
            return await asyncio.open_connection(target.host, target.port, limit=_MOST_HEADER, ssl=context)

    async def _head(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *rest = text.split("\r\n")
        headers = {}
        for line in rest:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(first.split()[1]), headers

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> None:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await reader.readline()).split(b";")[0], 16):
                await reader.readexactly(size + 2)
            await reader.readuntil(b"\r\n")
        elif "content-length" in headers:
            await reader.readexactly(int(headers["content-length"]))
        else:
            await reader.read()
            self.close()


def request_bytes(method: str, path: str, host: str, body: bytes = b"", key: str | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "User-Agent: ugro-bench"]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode() + body

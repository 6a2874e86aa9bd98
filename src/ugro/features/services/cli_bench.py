"""A bounded load on an HTTP address: so many requests, by so many clients at once, each with its own connection."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import click

from ugro.cli import candidates
from ugro.cli.output import Cell, Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.features.services.model import ENGINE_COMMAND, ServiceReport
from ugro.features.services.operations import GetService
from ugro.kernel.support.errors import NotAllowed, UgroError
from ugro.kernel.support.quantities import format_duration

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


# --- bench ------------------------------------------------------------------------------------------------------------
# ``ugro serve bench``: a bounded load through the door of a service.


KEY_VARIABLE = "UGRO_SERVICE_KEY"
_REQUESTS = 200
_FIGURES_S = 20.0  # the agent asks the door every second, if the machine has time for that
_CHAT = "/v1/chat/completions"
_REFUSED = "status 401"


@click.command()
@click.argument("name", shell_complete=candidates.services)
@click.option("--requests", "-n", type=click.IntRange(1, 10_000_000), help="How many in all. Default: 200.")
@click.option("--seconds", "-s", type=click.FloatRange(min=0, max=3600, min_open=True), help="For so long instead.")
@click.option("--clients", "-c", type=click.IntRange(1, 1000), default=8, show_default=True, help="At once.")
@click.option("--prompt", default="Tell me about clusters.", help="What to ask a model.")
@click.option("--max-tokens", type=click.IntRange(1, 100_000), default=16, show_default=True, help="Of each answer.")
@click.option("--url-path", metavar="PATH", help="Ask for this with GET, instead of a chat.")
@json_option
@pass_session
def bench(
    session: Session,
    /,
    name: str,
    requests: int | None,
    seconds: float | None,
    clients: int,
    **what: str | int | None,
) -> int:
    """Load a service, and print throughput and latencies.

    Sends chat requests to a model, and GET to a command. A key is taken from $UGRO_SERVICE_KEY.
    """
    client, output = session.client(), session.output
    before = client.ask(GetService(name)).service
    if before.is_over:
        raise NotAllowed(f"the service {name} is {before.state}", hint="see: ugro serve ls")
    bounds = Bounds(requests if requests or seconds else _REQUESTS, seconds, clients)
    with ExitStack() as stack:
        target = _target(client, before, _request(before, what), stack)
        outcome = _run(output, Load(target, bounds))
    shares = _shares(client, before, len(outcome.times_s))
    _show(output, outcome, shares)
    if outcome.failed:
        worst = max(outcome.failures, key=lambda text: outcome.failures[text])
        hint = f"set UGRO_SERVICE_KEY to a key of {name}" if worst == _REFUSED else f"ugro serve status {name}"
        raise UgroError(f"{outcome.failed} requests failed, most with: {worst}", hint=hint)
    return 0


def _run(output: Output, load: Load) -> Outcome:
    async def both() -> Outcome:
        work = asyncio.create_task(load.run())
        while not work.done():
            done = len(load.outcome.times_s)
            output.progress(f"{done} requests answered, {load.outcome.failed} failed")
            await asyncio.wait([work], timeout=0.5)
        return work.result()

    try:
        return asyncio.run(both())
    except KeyboardInterrupt:  # what was measured so far is shown
        return load.outcome
    finally:
        output.end_progress()


def _target(client: Client, found: ServiceReport, request: bytes, stack: ExitStack) -> Target:
    """Directly, if the door is on this machine or open to others; else through UGRO's connection to its node."""
    port = int(found.url.rpartition(":")[2])
    if found.door.is_here or found.is_open:
        host = found.url.partition("://")[2].rpartition(":")[0].strip("[]")
        return Target(host, port, request, found.has_tls)
    local = stack.enter_context(client.tunnel(found.door.node, port))
    return Target("127.0.0.1", local, request, found.has_tls)


def _request(found: ServiceReport, what: dict[str, str | int | None]) -> bytes:
    host, key = found.url.partition("://")[2], os.environ.get(KEY_VARIABLE)
    path = what["url_path"] or ("/" if found.engine == ENGINE_COMMAND else None)
    if path is not None:
        return request_bytes("GET", str(path), host, key=key)
    messages = [{"role": "user", "content": what["prompt"]}]
    body = {"model": found.model, "messages": messages, "max_tokens": what["max_tokens"]}
    return request_bytes("POST", _CHAT, host, json.dumps(body).encode(), key)


def _shares(client: Client, before: ServiceReport, wanted: int) -> dict[int, int]:
    """How many requests each replica got, as the door counted them; its figures are up to two seconds old."""
    known = {one.number: one.traffic.requests for one in before.replicas}
    deadline = time.monotonic() + _FIGURES_S
    while True:
        after = client.ask(GetService(before.name)).service
        found = {one.number: max(0, one.traffic.requests - known.get(one.number, 0)) for one in after.replicas}
        if sum(found.values()) >= wanted or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _show(output: Output, outcome: Outcome, shares: dict[int, int]) -> None:
    times = {f"p{int(100 * share)}_s": outcome.percentile_s(share) for share in (0.5, 0.9, 0.99)}
    if output.is_json:
        own = {"requests": len(outcome.times_s), "failed": outcome.failed, "seconds": outcome.took_s}
        output.document({"bench": {**own, "rate": outcome.rate, **times, "replicas": shares}})
        return
    took = format_duration(outcome.took_s)
    output.text(f"{len(outcome.times_s)} requests in {took}: {outcome.rate:.1f} per second, {outcome.failed} failed")
    shown = ", ".join(f"{name[:-2]} {format_duration(value)}" for name, value in times.items() if value is not None)
    if shown:
        output.text(shown)
    total = sum(shares.values()) or 1
    rows = [
        [Cell(str(number), "id", is_number=True), Cell(str(count), is_number=True), Cell(f"{100 * count / total:.0f}%")]
        for number, count in shares.items()
    ]
    output.table(("REPLICA", "REQUESTS", "SHARE"), rows)

"""A service's door as its job runs it, but without an agent: real HAProxy, real replicas, and requests to them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rig import replica
from tests.rig.netns import Cable
from tests.rig.ports import free_port
from tests.rig.sshd import command
from tests.rig.waiting import descendants, is_alive, name_of, wait_until_dead
from ugro.features.services.model import DoorSettings, DoorStats, NewServer, Server
from ugro.features.services.node.door_machine import RefusedError, find_haproxy
from ugro.features.services.service.door import DoorClient, door_argv, door_env
from ugro.kernel.support.errors import UgroError

_START_S = 60.0
_LIMIT_S = 60.0


def missing_haproxy() -> str | None:
    """Why there is none."""
    try:
        find_haproxy()
    except RefusedError as error:
        return str(error)
    return None


class DoorRig:
    """One door, its replicas, and everything ended in the end."""

    def __init__(self, settings: Mapping[str, Any], secret: str, haproxy: str | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="d"))
        self.port = free_port()
        given = {"name": "try", "port": self.port, "state_folder": str(self.folder / "state"), **settings}
        self.settings = DoorSettings(**given)
        self._env = {**os.environ, **door_env(self.settings, secret), "UGRO_RUN_DIR": str(self.folder)}
        if haproxy is not None:
            self._env["UGRO_HAPROXY"] = haproxy
        self._replicas: dict[str, subprocess.Popen[bytes]] = {}
        self.log = self.folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                door_argv(sys.executable, "try"), env=self._env, stdout=log, stderr=subprocess.STDOUT
            )
        self.door = DoorClient(self._ask, "try")

    async def _ask(self, line: bytes) -> bytes:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self.folder / "door" / "control"))
        except OSError as error:
            raise UgroError(f"the door is not there: {error}") from error
        try:
            writer.write(line)
            writer.write_eof()
            return await reader.read(-1)
        finally:
            writer.close()

    async def opened(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            with suppress(UgroError):
                await self.door.servers()
                return
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            await asyncio.sleep(0.02)

    @property
    def haproxy_pid(self) -> int:
        [found] = [pid for pid in descendants([self.process.pid]) if name_of(pid) == "haproxy"]
        return found

    @property
    def middle_pid(self) -> int:
        """The process that has HAProxy run."""
        return descendants([self.process.pid])[0]

    async def start_replica(
        self, name: str, seconds: float = 0.0, *words: str, cable: Cable | None = None
    ) -> NewServer:
        """It listens; behind a cable, if one is given."""
        address, port = cable.node_address if cable else "127.0.0.1", free_port()
        self._spawn(cable, f"{address}:{port}", name, str(seconds), *words)
        deadline = time.monotonic() + _START_S
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(address, port)
                writer.close()
                return NewServer(name, address, port)
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    def _spawn(self, cable: Cable | None, place: str, name: str, *words: str) -> None:
        inside = [command("ip"), "netns", "exec", cable.namespace] if cable else []
        argv = [*inside, sys.executable, "-S", replica.__file__, place, name, *words]
        self._replicas[name] = subprocess.Popen(argv)

    async def add_replica(self, name: str, seconds: float = 0.0, *words: str) -> NewServer:
        server = await self.start_replica(name, seconds, *words)
        await self.door.add(server)
        return server

    def signal_replica(self, name: str, number: signal.Signals) -> None:
        self._replicas[name].send_signal(number)

    def kill_replica(self, name: str) -> None:
        process = self._replicas.pop(name)
        process.kill()
        process.wait()

    async def until(self, is_so: Callable[[DoorStats, dict[str, Server]], bool]) -> DoorStats:
        """The first figures for which it is so."""
        deadline = time.monotonic() + _LIMIT_S
        while True:
            seen, servers = await self.door.stats(), await self.door.servers()
            if is_so(seen, servers):
                return seen
            assert time.monotonic() < deadline, (seen, servers)
            await asyncio.sleep(0.02)

    async def request(self, path: str = "/", **options: Any) -> Answer:
        return await request(self.port, path, **options)

    def close(self) -> None:
        below = [self.process.pid, *descendants([self.process.pid])]
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        self.process.kill()
        self.process.wait()
        for name in list(self._replicas):
            self.kill_replica(name)
        try:
            wait_until_dead([pid for pid in below if is_alive(pid)])
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


@asynccontextmanager
async def open_door(secret: str = "", haproxy: str | None = None, **settings: Any) -> AsyncIterator[DoorRig]:
    rig = DoorRig({"drain_s": 3.0, **settings}, secret, haproxy)
    try:
        await rig.opened()
        yield rig
    finally:
        rig.close()


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def name(self) -> str:
        """Of the replica."""
        return str(self.document["name"])


async def request(
    port: int, path: str = "/", *, method: str = "GET", body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Answer:
    """A connection of its own. Raises OSError, also if the answer is cut off."""
    began = time.monotonic()
    async with asyncio.timeout(_LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            given = {"host": "try", "connection": "close", **({"content-length": str(len(body))} if body else {})}
            lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in {**given, **(headers or {})}.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            text = await reader.read(-1)
        finally:
            writer.close()
    return _answer(text, time.monotonic() - began)


def _answer(text: bytes, seconds: float) -> Answer:
    head, separator, body = text.partition(b"\r\n\r\n")
    if not separator:
        raise ConnectionError(f"no whole answer: {text[:200]!r}")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {key.lower(): value for key, value in (line.split(": ", 1) for line in lines)}
    if "chunked" in headers.get("transfer-encoding", ""):
        body = _joined(body)
    elif len(body) != int(headers.get("content-length", 0)):
        raise ConnectionError(f"{len(body)} bytes of {headers.get('content-length')}")
    return Answer(int(first.split(" ")[1]), headers, body, seconds)


def _joined(chunks: bytes) -> bytes:
    found = b""
    while True:
        size, separator, rest = chunks.partition(b"\r\n")
        if not separator:
            raise ConnectionError("the stream was cut off")
        if not (length := int(size, 16)):
            return found
        found, chunks = found + rest[:length], rest[length + 2 :]


@dataclass(slots=True)
class Load:
    """Requests at random moments, so many a second on average, whatever becomes of them."""

    port: int
    per_s: float
    seed: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    names: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    under_way: int = 0
    is_enough: bool = False  # it ends with the next request

    async def run(self, seconds: float) -> None:
        chance = random.Random(self.seed)
        at_s, began = 0.0, time.monotonic()
        async with asyncio.TaskGroup() as group:
            while (at_s := at_s + chance.expovariate(self.per_s)) < seconds and not self.is_enough:
                await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
                group.create_task(self._one(began + at_s), name="a request")

    async def _one(self, due: float) -> None:
        """Counted from when it was due: a load that lags behind does not look quick."""
        self.under_way += 1
        try:
            answer = await request(self.port, **self.options)
        except (OSError, TimeoutError) as error:
            self.failures.append(repr(error))
            return
        finally:
            self.under_way -= 1
        if answer.status != 200:
            self.failures.append(f"{answer.status} {answer.body[:200]!r}")
            return
        self.seconds.append(time.monotonic() - due)
        self.names[answer.name] += 1

    async def more(self, count: int) -> None:
        """Until so many more were answered."""
        wanted, deadline = len(self.seconds) + count, time.monotonic() + _LIMIT_S
        while len(self.seconds) < wanted:
            assert time.monotonic() < deadline, (len(self.seconds), self.failures)
            await asyncio.sleep(0.02)

    def quantile_s(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

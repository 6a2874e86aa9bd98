"""A replica that is an application of Ray Serve: has it deployed, relays requests to it, watches it, has it deleted.

It is no driver of Ray itself, so it outlives the cluster's head: Serve comes back with that, and its applications too.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ugro.inference.main import LASTING
from ugro.inference.ray_serve.application import IMPORTED, PROXY, claim_of
from ugro.inference.ray_serve.relay import Relay

TOKEN = "UGRO_RAY_TOKEN"
_LOOK_S = 1.0
_ANSWER_S = 5.0
_MOST_ROUTES = 1 << 20
_GONE_S = 120.0  # without its path in Serve's proxy, it is deployed again


def main(argv: Sequence[str]) -> int:
    """``MODULE:APP``; ``RAY_ADDRESS`` says where."""
    own = Application(argv[0], os.environ)
    return asyncio.run(own.run())


class Application:
    def __init__(self, target: str, env: Mapping[str, str]) -> None:
        self._target = target
        self.name = f"{env['UGRO_RAY_SERVE']}-{env['UGRO_REPLICA']}"
        self._address = env["RAY_ADDRESS"]
        self._place = (env["UGRO_HOST"], int(env["UGRO_PORT"]))
        self._secret = _read(env.get("UGRO_SERVICE_KEY_FILE"))
        self._token_file = os.path.join(env["UGRO_RUN_DIR"], "ray-token")
        _write(self._token_file, env[TOKEN])
        more = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self._token_file, "RAY_USAGE_STATS_ENABLED": "0"}
        self._env = {**{name: value for name, value in env.items() if name != TOKEN}, **more}
        self._port = 0  # of Serve's proxy
        self._seen_at = time.monotonic()  # its path, there
        self._problem: str | None = "the application is deployed"
        self._ending = asyncio.Event()
        self._claim = claim_of(self.name)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        try:
            await self._reached()
            code = None if self._ending.is_set() else await self._deployed()
            if code is None and not self._ending.is_set():
                code = await self._serve()
            if self._ending.is_set():
                await self._delete()
            return code or 0
        finally:
            os.unlink(self._token_file)

    async def _reached(self) -> None:
        """The cluster may be starting, or its head be on its way back."""
        is_said = False
        while not self._ending.is_set() and not await asyncio.to_thread(_is_open, self._address):
            if not is_said:
                _say(f"waiting for the Ray cluster at {self._address}")
                is_said = True
            await self._pause(_LOOK_S)

    async def _deployed(self) -> int | None:
        """None: it runs, or we are to end; else the exit code."""
        said, lines, code = await self._visit("deploy", self.name, self._target)
        if PROXY in said or self._ending.is_set():
            self._port = int(said.get(PROXY, 0))
            return None
        last = lines[-1] if lines else f"exit code {code}"
        if IMPORTED not in said:
            _say(f"error: {self._target} cannot be imported: {last}")
            return LASTING
        _say(f"error: Ray Serve did not start {self._target}: {last}")
        return 1

    async def _serve(self) -> int | None:
        relay = Relay(f"/{self.name}", self._port, self._secret, lambda: self._problem)
        server = await relay.start(*self._place)
        _say(f"{self._target} is deployed as {self.name}; requests at {self._place[0]}:{self._place[1]}")
        self._seen_at = time.monotonic()
        try:
            while not self._ending.is_set():
                await self._look()
                if time.monotonic() - self._seen_at > _GONE_S:
                    _say(f"error: {self._problem} for {_GONE_S:g} s")
                    return 1
                await self._pause(_LOOK_S)
        finally:
            server.close()
        return None

    async def _look(self) -> None:
        try:
            routes = await asyncio.to_thread(_routes, self._port)
        except (OSError, ValueError, http.client.HTTPException):
            self._problem = "Serve's proxy does not answer"
            return
        if f"/{self.name}" in routes:
            self._seen_at, self._problem = time.monotonic(), None
        else:
            self._problem = "Serve has no such application now"

    async def _delete(self) -> None:
        """A cluster that is gone has nothing to delete."""
        if await asyncio.to_thread(_is_open, self._address):
            _, lines, code = await self._visit("delete", self.name)
            if code:
                _say(f"error: {self.name} was not deleted from the cluster: {lines[-1] if lines else code}")

    async def _visit(self, *words: str) -> tuple[dict[str, Any], list[str], int]:
        """What it said, its last lines, and its exit code. A deployment is given up when we are to end."""
        argv = [sys.executable, "-m", "ugro.inference.ray_serve.application", *words]
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*argv, env=self._env, stdout=pipe, stderr=pipe, limit=1 << 20)
        assert child.stdout is not None
        assert child.stderr is not None
        said: dict[str, Any] = {}
        lines: deque[str] = deque(maxlen=20)
        reading = asyncio.gather(_facts(child.stdout, said), _words(child.stderr, lines))
        ending = asyncio.create_task(self._ending.wait(), name="wait for the end")
        wait = asyncio.create_task(child.wait(), name="wait for a visit")
        await asyncio.wait([wait] if words[0] == "delete" else [wait, ending], return_when=asyncio.FIRST_COMPLETED)
        if not wait.done():
            child.kill()
        code = await wait
        ending.cancel()
        await reading
        return said, list(lines), code

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()


async def _facts(stream: asyncio.StreamReader, said: dict[str, Any]) -> None:
    """Lines of JSON; all others are the application's own and go to the log."""
    async for line in stream:
        text = line.decode("utf-8", "replace").rstrip()
        try:
            found = json.loads(text)
            said.update(found if isinstance(found, dict) else {})
        except ValueError:
            _say(text)


async def _words(stream: asyncio.StreamReader, lines: deque[str]) -> None:
    async for line in stream:
        text = line.decode("utf-8", "replace").rstrip()
        _say(text)
        if text:
            lines.append(text.strip())


def _routes(port: int) -> dict[str, Any]:
    """Of Serve's proxy: path → application, of those that are ready. Blocks."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    try:
        connection.request("GET", "/-/routes", headers={"Connection": "close"})
        answer = connection.getresponse()
        found = json.loads(answer.read(_MOST_ROUTES)) if answer.status == 200 else {}
        return found if isinstance(found, dict) else {}
    finally:
        connection.close()


def _is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except OSError:
        return False
    return True


def _read(path: str | None) -> str:
    if not path:
        return ""
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def _write(path: str, token: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()

"""The door's processes. The first makes the sockets and starts the second again, which does the same for HAProxy.

A process that is killed takes those below it with it and is back in a moment, with the same servers, at the same port:
who connects meanwhile waits. Settings are JSON in ``UGRO_DOOR``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

from ugro.features.services.node.door_config import WHOLE
from ugro.features.services.node.door_machine import (
    LASTING,
    RefusedError,
    Sockets,
    TimedOutError,
    WaitingRoom,
    connections_allowed,
    end_with,
    enter_folder,
    expect_words,
    find_haproxy,
    make_state_folder,
)
from ugro.features.services.node.door_records import (
    WINDOW_S,
    InvalidError,
    Measures,
    Records,
    Rows,
    checked_keys,
    front,
    is_up,
    number,
    waiting,
    weight_of,
)
from ugro.features.services.node.haproxy import FailedError, HAProxy
from ugro.node.process.processes import say

# --- control ----------------------------------------------------------------------------------------------------------
# What the agent asks of a door: lines of JSON over a socket of its run's folder, one answer to each.


_MOST_LINE = 1 << 20
_IDLE_S = 60.0
Request = Mapping[str, Any]


class BusyError(Exception):
    """Not now; in words."""


class Control:
    """One request at a time. What HAProxy was not given is not recorded: the agent sees that, and asks again."""

    def __init__(self, records: Records, haproxy: HAProxy, measures: Measures, room: WaitingRoom) -> None:
        self._records = records
        self._haproxy = haproxy
        self._measures = measures
        self._room = room
        self._lock = asyncio.Lock()
        self._verbs: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "servers": self._servers,
            "add": self._add,
            "weight": self._weight,
            "drain": self._drain,
            "ready": self._ready,
            "remove": self._remove,
            "share": self._share,
            "keys": self._keys,
            "stats": self._stats,
        }

    @property
    def lock(self) -> asyncio.Lock:
        """Held while HAProxy is started again: it then gets all that was recorded."""
        return self._lock

    async def run(self, listener: socket.socket) -> None:
        server = await asyncio.start_unix_server(self._serve, sock=listener, limit=_MOST_LINE)
        try:
            await server.serve_forever()
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await asyncio.wait_for(reader.readline(), _IDLE_S):
                writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
                await asyncio.wait_for(writer.drain(), _IDLE_S)
        except (OSError, ValueError, TimedOutError):
            pass
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            async with self._lock:
                return {"result": await self._verbs[request["do"]](request)}
        except (InvalidError, BusyError, FailedError) as error:
            kinds = {InvalidError: "invalid", BusyError: "busy"}
            return {"error": str(error), "kind": kinds.get(type(error), "failed")}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            return {"error": f"no request of a door: {type(error).__name__} {error}", "kind": "invalid"}
        except (OSError, TimedOutError) as error:
            return {"error": f"HAProxy or the door's folder does not answer: {error}", "kind": "failed"}

    # --- servers ---------------------------------------------------------------------------------------------------

    async def _servers(self, request: Request) -> dict[str, Any]:
        rows = await self._haproxy.rows()
        return {name: self._seen(server, rows) for name, server in self._records.servers.items()}

    def _seen(self, server: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
        name = server["name"]
        state = "drain" if server["is_draining"] else "ready" if is_up(rows, server) else "down"
        kept = {key: server[key] for key in ("name", "address", "port", "weight", "limit", "canary")}
        return {**kept, "state": state, "sessions": number(rows, name, "scur"), "queued": number(rows, name, "qcur")}

    async def _add(self, request: Request) -> None:
        known = self._records.servers.get(str(request["name"]))
        if known is not None:
            await self._change(known, request)
            return
        try:
            await self._haproxy.add(self._records.add(request))
        except (FailedError, OSError, TimedOutError):
            self._records.drop(str(request["name"]))
            raise

    async def _change(self, known: dict[str, Any], request: Request) -> None:
        same = ("address", "port", "canary")
        if any(known[key] != request[key] for key in same):
            raise InvalidError(f"there is a server {known['name']} at {known['address']}:{known['port']} already")
        limit = int(request["limit"])
        await self._haproxy.set_limit({**known, "limit": limit})
        known["limit"] = limit
        await self._weight(request)

    async def _weight(self, request: Request) -> None:
        server, weight = self._known(request), weight_of(request)
        await self._haproxy.set_weight({**server, "weight": weight})
        server["weight"] = weight
        self._records.save()

    async def _drain(self, request: Request) -> None:
        await self._turn(self._known(request), is_draining=True)

    async def _ready(self, request: Request) -> None:
        await self._turn(self._known(request), is_draining=False)

    async def _turn(self, server: dict[str, Any], *, is_draining: bool) -> None:
        await self._haproxy.set_state(server, "drain" if is_draining else "ready")
        server["is_draining"] = is_draining
        self._records.save()

    async def _remove(self, request: Request) -> None:
        server = self._records.servers.get(str(request["name"]))
        if server is None:
            return
        rows = await self._haproxy.rows()
        if left := number(rows, server["name"], "scur") + number(rows, server["name"], "qcur"):
            raise BusyError(f"{server['name']} has {left} requests; drain it first")
        await self._haproxy.remove(server)
        self._records.drop(server["name"])
        self._measures.forget(server["name"])

    def _known(self, request: Request) -> dict[str, Any]:
        name = str(request["name"])
        if name not in self._records.servers:
            raise InvalidError(f"there is no server {name[:80]!r}")
        return self._records.servers[name]

    # --- all of it -------------------------------------------------------------------------------------------------

    async def _share(self, request: Request) -> None:
        share = round(float(request["share"]) * WHOLE)
        if not 0 <= share <= WHOLE:
            raise InvalidError("a share is between 0 and 1")
        await self._haproxy.set_share(share)
        self._records.share = share
        self._records.save()

    async def _keys(self, request: Request) -> None:
        keys = checked_keys(dict(request["keys"]))
        await self._haproxy.set_keys(keys)
        self._records.set_keys(keys)

    async def _stats(self, request: Request) -> dict[str, Any]:
        rows = await self._haproxy.rows()
        servers = {name: self._of_server(name, rows) for name in self._records.servers}
        queued = waiting(rows) + sum(int(one["queued"]) for one in servers.values())
        is_any_ready = any(is_up(rows, server) for server in self._records.servers.values())
        denied = front(rows, "hrsp_4xx") - sum(number(rows, name, "hrsp_4xx") for name in servers)
        return {
            "requests": front(rows, "req_tot"),
            "errors": front(rows, "hrsp_5xx"),
            "denied": max(0, denied),
            "sessions": queued + self._room.count + sum(int(one["sessions"]) for one in servers.values()),
            "queued": queued + self._room.count,
            "held": 0 if is_any_ready else queued + self._room.count,
            "latency": self._measures.latency(),
            "window_s": WINDOW_S,
            "sampled_share": self._measures.sampled_share,
            "started_at": self._haproxy.started_at,
            "servers": servers,
        }

    def _of_server(self, name: str, rows: Rows) -> dict[str, Any]:
        return {
            "requests": number(rows, name, "stot"),
            "errors": number(rows, name, "hrsp_5xx"),
            "retries": number(rows, name, "wretr") + number(rows, name, "wredis"),
            "sessions": number(rows, name, "scur"),
            "queued": number(rows, name, "qcur"),
            "latency": self._measures.latency(name),
            "pace": self._measures.pace(name),
        }


# --- main -------------------------------------------------------------------------------------------------------------


_CALM_S = 10.0  # who lived longer than that is started again at once
_LONGEST_PAUSE_S = 5.0
_MOST_FAILURES = 12  # in a row, which takes less than a minute: then the job fails, with the last reason
_HELD_S = 60.0  # who lived longer than that does not count as one of them
_READ_LOG_S = 0.05
_CERTIFICATE_S = 10.0
_LOOK_S = 2.0
_KEPT_S = 2.0  # beyond what requests get at the end
_ENDING = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    settings = json.loads(os.environ.pop("UGRO_DOOR"))
    secret = os.environ.pop("UGRO_DOOR_SECRET", "")
    try:
        expect_words(settings)
        program = find_haproxy()
        settings["most_connections"] = connections_allowed(settings["most_connections"])
        enter_folder()
        settings["state_folder"] = make_state_folder(str(settings["state_folder"]))
        sockets = Sockets(settings)
    except RefusedError as error:
        say(str(error))
        return LASTING
    return First(program, settings, secret, sockets).run()


class First:
    """Does as little as it can: nothing brings it back but UGRO."""

    def __init__(self, program: str, settings: Mapping[str, Any], secret: str, sockets: Sockets) -> None:
        self._given = (program, settings, secret, sockets)
        self._child = 0
        self._is_ending = False

    def run(self) -> int:
        for one in _ENDING:
            signal.signal(one, self._ask_to_end)
        pause_s, failures = 0.0, 0
        while not self._is_ending:
            began = time.monotonic()
            code = self._second()
            lived_s = time.monotonic() - began
            failures = 0 if lived_s > _HELD_S else failures + (code > 0)
            if self._is_ending or code == LASTING or failures >= _MOST_FAILURES:
                return 0 if self._is_ending else LASTING
            say("the door's process ended; it is started again")
            pause_s = 0.0 if lived_s > _CALM_S else min(_LONGEST_PAUSE_S, pause_s * 2 + 0.1)
            time.sleep(pause_s)
        return 0

    def _second(self) -> int:
        """Returns the exit code of a child that does all the rest; of one that was killed, less than 0."""
        parent = os.getpid()
        # Held back until the child's number is known: one that comes in between would not reach it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        if self._is_ending:
            return 0
        self._child = os.fork()
        if self._child == 0:
            end_with(parent)
            _second(*self._given)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        status = os.waitpid(self._child, 0)[1]
        self._child = 0
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)

    def _ask_to_end(self, number: int, frame: object) -> None:
        self._is_ending = True
        self._given[3].listener.close()
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGTERM)


def _second(program: str, settings: Mapping[str, Any], secret: str, sockets: Sockets) -> NoReturn:
    for one in _ENDING:
        signal.signal(one, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    code = 1
    try:
        code = asyncio.run(_run(program, settings, secret, sockets))
    except (RefusedError, InvalidError, FailedError) as error:
        say(str(error))
        code = LASTING if isinstance(error, RefusedError) else 1
    except OSError as error:  # of its folder, its sockets or its processes
        say(f"the door cannot go on: {error}")
    finally:
        if sys.exc_info()[0] is not None:  # a bug: the next line ends it without a word
            traceback.print_exc()
        os._exit(code)


async def _run(program: str, settings: Mapping[str, Any], secret: str, sockets: Sockets) -> int:
    """Made in its loop: before Python 3.10, locks belong to the one in which they are made."""
    return await Second(program, settings, secret, sockets).run()


class Second:
    """Serves the agent and the waiting room, reads the log, and has HAProxy run."""

    def __init__(self, program: str, settings: Mapping[str, Any], secret: str, sockets: Sockets) -> None:
        self._settings = settings
        self._sockets = sockets
        self._log, log = os.pipe()
        os.set_blocking(self._log, False)
        os.set_blocking(log, False)  # a full pipe costs a line of the log and holds nothing up
        self._records = Records(str(settings["state_folder"]))
        self._haproxy = HAProxy(program, settings, secret, sockets, log)
        self._measures = Measures()
        self._room = WaitingRoom(sockets.waiting, self._is_any_ready)
        self._control = Control(self._records, self._haproxy, self._measures, self._room)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        ending = asyncio.Event()
        for one in _ENDING:
            loop.add_signal_handler(one, ending.set)
        await self._haproxy.start(self._records)
        say(f"the door {self._settings['name']} is open at {self._settings['address']}:{self._settings['port']}")
        loop.add_reader(self._log, self._read_log)
        tasks: list[asyncio.Task[Any]] = [
            loop.create_task(ending.wait()),
            loop.create_task(self._keep_running()),
            loop.create_task(self._watch()),
            loop.create_task(self._control.run(self._sockets.control)),
        ]
        if self._settings["wait_s"]:
            tasks.append(loop.create_task(self._room.run()))
        if self._settings["certificate"]:
            tasks.append(loop.create_task(self._renew_certificate()))
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if ending.is_set():
            self._sockets.listener.close()
            await self._haproxy.end(float(self._settings["drain_s"]) + _KEPT_S)
            say("ending")
            return 0
        await self._haproxy.end(0.0)  # else the thread that waits for it keeps this process from ending
        for task in done:
            task.result()
        return 1

    async def _keep_running(self) -> None:
        pause_s = 0.0
        while True:
            began = time.monotonic()
            code = await self._haproxy.ended()
            say(f"HAProxy ended ({code}); it is started again")
            pause_s = 0.0 if time.monotonic() - began > _CALM_S else min(_LONGEST_PAUSE_S, pause_s * 2 + 0.05)
            await asyncio.sleep(pause_s)
            async with self._control.lock:
                await self._haproxy.start(self._records)

    async def _watch(self) -> None:
        """One that is stopped or hangs does not end by itself."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if (done := await self._haproxy.mend()) is not None:
                say(done)

    async def _renew_certificate(self) -> None:
        while True:
            await asyncio.sleep(_CERTIFICATE_S)
            try:
                if await self._haproxy.renew_certificate():
                    say("the certificate was renewed")
            except (RefusedError, FailedError, OSError, TimedOutError) as error:
                say(f"the new certificate is not used: {error}")

    async def _is_any_ready(self) -> bool:
        try:
            rows = await self._haproxy.rows()
        except (FailedError, OSError, TimedOutError):
            return False
        return any(is_up(rows, server) for server in self._records.servers.values())

    def _read_log(self) -> None:
        """In pieces: one read for each line would cost more than the lines."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._log)
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):
                self._measures.feed(os.read(self._log, 65536))
        loop.call_later(_READ_LOG_S, loop.add_reader, self._log, self._read_log)

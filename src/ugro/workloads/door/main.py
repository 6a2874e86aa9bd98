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
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from ugro.workloads.door.control import Control
from ugro.workloads.door.haproxy import FailedError, HAProxy
from ugro.workloads.door.machine import (
    LASTING,
    RefusedError,
    Sockets,
    TimedOutError,
    connections_allowed,
    end_with,
    enter_folder,
    expect_words,
    find_haproxy,
    make_state_folder,
)
from ugro.workloads.door.measures import Measures, is_up
from ugro.workloads.door.records import InvalidError, Records
from ugro.workloads.door.waiting import WaitingRoom
from ugro.workloads.on_node.processes import say

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
        for number in _ENDING:
            signal.signal(number, self._ask_to_end)
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
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
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
        for number in _ENDING:
            loop.add_signal_handler(number, ending.set)
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

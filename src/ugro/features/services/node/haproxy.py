"""HAProxy as a process of ours: its files, its start and end, and commands to it while it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ugro.features.services.node.door_config import (
    CERTIFICATE,
    KEYS,
    SHARE,
    SHARE_KEY,
    STATES,
    Descriptors,
    backends_of,
    configuration,
    limit,
    server_words,
    states,
)
from ugro.features.services.node.door_machine import RefusedError, Sockets, TimedOutError, end_with
from ugro.features.services.node.door_records import Records, Rows, parsed

_CONFIG = "haproxy.cfg"
_COMMAND_S = 10.0
_START_S = 20.0
_REMOVE_S = 5.0  # until connections that were kept open are closed
_PAUSE_S = 0.05
_SIGN_OF_LIFE_S = 2.0
_HUNG_S = 20.0  # more than a busy machine takes
_MOST_THREADS = 4
_NO_SERVER = "No such server"
_QUICK_S = 1.0  # in which a replica answers a check, if it is not busy


class FailedError(Exception):
    """HAProxy did not do it; its own words."""


class HAProxy:
    def __init__(self, program: str, settings: Mapping[str, Any], secret: str, sockets: Sockets, log: int) -> None:
        self._program = program
        self._settings = settings
        self._secret = secret
        self._fds = Descriptors(sockets.listener.fileno(), sockets.admin.fileno(), log, sockets.inside.fileno())
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = asyncio.Lock()
        self._is_over = asyncio.Event()  # it has ended, and was not started again yet
        self._certificate = ""
        self._has_answered = False  # since it was started
        self.started_at = 0.0

    # --- the process -----------------------------------------------------------------------------------------------

    async def start(self, records: Records) -> None:
        """Returns when it answers. Raises RefusedError if it does not accept its configuration.

        HAProxy takes every server for ready until three checks have failed. So each is checked here before.
        """
        self._has_answered = False
        wanted = [server for server in records.servers.values() if not server["is_draining"]]
        self._write(records, await self._not_ready(wanted))
        self._spawn()
        self.started_at = time.time()
        await self._wait_for_answer()
        self._has_answered = True
        for server in records.servers.values():
            if server["is_draining"]:
                await self.set_state(server, "drain")

    async def _not_ready(self, servers: Iterable[Mapping[str, Any]]) -> set[str]:
        """Returns the servers that do not pass a check now; they get requests when they pass one of HAProxy's.

        One that takes longer than the others is not waited for, unless there is no other.
        """
        checks = {asyncio.create_task(_passes(self._settings, one)): str(one["name"]) for one in servers}
        if not checks:
            return set()
        done, waiting = await asyncio.wait(checks, timeout=_QUICK_S)
        while waiting and not any(check.result() for check in done):
            more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        for check in waiting:
            check.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return {name for check, name in checks.items() if check in waiting or not check.result()}

    async def ended(self) -> int:
        """Its exit code."""
        assert self._process is not None
        code = await asyncio.to_thread(self._process.wait)
        self._is_over.set()
        return code

    async def mend(self) -> str | None:
        """Continues one that was stopped, and kills one that does not answer; what was done, in words."""
        process, deadline, was_stopped = self._process, time.monotonic() + _HUNG_S, False
        if process is None or not self._has_answered:
            return None
        while not await self._lives():
            if process is not self._process or process.poll() is not None:
                return None  # it has ended, and is started again
            if time.monotonic() > deadline:
                process.kill()
                return f"HAProxy has not answered for {_HUNG_S:g} s; it is killed"
            if _is_stopped(process.pid):
                was_stopped = True
                process.send_signal(signal.SIGCONT)
            await asyncio.sleep(_PAUSE_S)
        return "HAProxy was stopped; it is continued" if was_stopped else None

    async def _lives(self) -> bool:
        """Not by ``ask``: that may wait for an answer to somebody else."""
        try:
            return bool(await asyncio.wait_for(_answer("show info"), _SIGN_OF_LIFE_S))
        except (OSError, TimedOutError):
            return False

    async def end(self, grace_s: float) -> None:
        """Requests that it has may finish."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGUSR1)
        try:
            await asyncio.wait_for(self.ended(), grace_s)
        except TimedOutError:
            self._process.kill()
            self._process.wait()

    def _spawn(self) -> None:
        """From the main thread: it is to end with that."""
        parent, fds = os.getpid(), self._fds
        self._is_over.clear()
        self._process = subprocess.Popen(
            [self._program, "-db", "-q", "-f", _CONFIG],
            stdin=subprocess.DEVNULL,
            pass_fds=(fds.listener, fds.admin, fds.log, fds.inside),
            preexec_fn=lambda: end_with(parent),
        )

    async def _wait_for_answer(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            assert self._process is not None
            if (code := self._process.poll()) is not None:
                if code < 0:  # somebody has killed it, which says nothing about its configuration
                    raise FailedError(f"HAProxy was killed by signal {-code} while it started")
                raise RefusedError(f"HAProxy ended with exit code {code}; what it said is above")
            try:
                await asyncio.wait_for(self.ask("show info"), 1.0)
                return
            except (OSError, TimedOutError, FailedError):
                if time.monotonic() > deadline:
                    self._process.kill()
                    raise FailedError("HAProxy does not answer") from None
            await asyncio.sleep(_PAUSE_S)

    def _write(self, records: Records, not_ready: Collection[str]) -> None:
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        text = configuration(self._settings, records.servers.values(), self._fds, self._secret, threads)
        _write(_CONFIG, text)
        _write(KEYS, "".join(f"{digest} {name}\n" for digest, name in records.keys.items()))
        _write(SHARE, f"{SHARE_KEY} {records.share}\n")
        _write(STATES, states([one for one in records.servers.values() if one["name"] in not_ready]))
        if self._settings["certificate"]:
            self._certificate = _pem(self._settings)
            _write(CERTIFICATE, self._certificate)

    # --- commands --------------------------------------------------------------------------------------------------

    async def ask(self, command: str) -> str:
        """One command; its answer. Its socket outlives it: nobody would answer there before it is started again."""
        async with self._asking:
            asked = asyncio.ensure_future(_answer(command))
            over = asyncio.ensure_future(self._is_over.wait())
            try:
                await asyncio.wait({asked, over}, timeout=_COMMAND_S, return_when=asyncio.FIRST_COMPLETED)
                if not asked.done() and not over.done():
                    raise TimedOutError
                answer = asked.result() if asked.done() else b""
            finally:
                asked.cancel()
                over.cancel()
        if not answer:
            raise FailedError("HAProxy has ended")
        return answer.decode("utf-8", "replace").strip()

    async def rows(self) -> Rows:
        return parsed(await self.ask("show stat"))

    async def add(self, server: Mapping[str, Any]) -> None:
        await self.remove(server)  # what is left of a try that was not answered in time
        for backend in backends_of(server):
            place = f"{backend}/{server['name']}"
            answer = await self.ask(f"add server {place} {server_words(self._settings, server, backend)}")
            if "registered" not in answer:
                raise FailedError(answer)
            await self._expect_nothing(f"enable health {place}")
            await self._expect_nothing(f"enable server {place}")

    async def set_state(self, server: Mapping[str, Any], state: str) -> None:
        await self._each(server, "set server {place} state " + state)

    async def set_weight(self, server: Mapping[str, Any]) -> None:
        await self._each(server, f"set server {{place}} weight {server['weight']}")

    async def set_limit(self, server: Mapping[str, Any]) -> None:
        await self._each(server, f"set maxconn server {{place}} {limit(self._settings, server)}")

    async def remove(self, server: Mapping[str, Any]) -> None:
        """Also if it is there in part, or not at all."""
        for backend in backends_of(server):
            place = f"{backend}/{server['name']}"
            answer = await self.ask(f"set server {place} state maint")
            if _NO_SERVER in answer:
                continue
            if answer:
                raise FailedError(answer)
            await self._delete(place)

    async def set_share(self, share: int) -> None:
        await self._expect_nothing(f"set map {SHARE} {SHARE_KEY} {share}")

    async def set_keys(self, keys: Mapping[str, str]) -> None:
        """Compared with what HAProxy has: of an earlier change, it may have been given a part."""
        if not self._settings["needs_key"]:
            return
        lines = (line.split() for line in (await self.ask(f"show map {KEYS}")).splitlines())
        known = {words[1] for words in lines if len(words) > 1}
        for digest in known - keys.keys():
            await self._expect_nothing(f"del map {KEYS} {digest}")
        for digest in keys.keys() - known:
            await self._expect_nothing(f"add map {KEYS} {digest} {keys[digest]}")

    async def renew_certificate(self) -> bool:
        """Uses the files as they are now; False: they have not changed. Connections stay."""
        if (now := _pem(self._settings)) == self._certificate:
            return False
        for command in (f"set ssl cert {CERTIFICATE} <<\n{now}", f"commit ssl cert {CERTIFICATE}"):
            answer = await self.ask(command)
            if "Success" not in answer and "transaction created" not in answer.lower():
                raise FailedError(answer)
        self._certificate = now
        return True

    async def _delete(self, place: str) -> None:
        deadline = time.monotonic() + _REMOVE_S
        while True:
            answer = await self.ask(f"del server {place}")
            if "deleted" in answer or _NO_SERVER in answer:
                return
            if time.monotonic() > deadline:
                raise FailedError(answer)
            await asyncio.sleep(_PAUSE_S)

    async def _each(self, server: Mapping[str, Any], command: str) -> None:
        for backend in backends_of(server):
            await self._expect_nothing(command.format(place=f"{backend}/{server['name']}"))

    async def _expect_nothing(self, command: str) -> None:
        if answer := await self.ask(command):
            raise FailedError(answer)


async def _answer(command: str) -> bytes:
    reader, writer = await asyncio.open_unix_connection("admin")
    try:
        writer.write(command.encode() + b"\n")
        return await reader.read(-1)
    finally:
        writer.close()


async def _passes(settings: Mapping[str, Any], server: Mapping[str, Any]) -> bool:
    """Whether it passes the check that HAProxy makes of it."""
    try:
        return bool(await asyncio.wait_for(_check(settings, server), settings["health_timeout_s"]))
    except (OSError, ValueError, TimedOutError):
        return False


async def _check(settings: Mapping[str, Any], server: Mapping[str, Any]) -> bool:
    reader, writer = await asyncio.open_connection(server["address"], server["port"])
    try:
        if not (path := settings["health_path"]):
            return True
        writer.write(f"GET {path} HTTP/1.1\r\nHost: door\r\nConnection: close\r\n\r\n".encode())
        status = int((await reader.readline()).split(None, 2)[1])
        least, most = settings["health_status"]
        return bool(int(least) <= status <= int(most))
    except IndexError:
        return False
    finally:
        writer.close()


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].startswith(b"T")
    except OSError:
        return False


def _write(path: str, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def _pem(settings: Mapping[str, Any]) -> str:
    found: list[str] = []
    for key in ("certificate", "certificate_key"):
        try:
            with open(str(settings[key]), encoding="ascii") as file:
                found.append(file.read().rstrip("\n"))
        except (OSError, ValueError) as error:
            raise RefusedError(f"the {key.replace('_', ' ')} {settings[key]} cannot be read: {error}") from error
    return "\n".join(found) + "\n"

"""Runs a command of the user's on this machine: without a shell, bounded in time and output, ended with its tree.

A guard stands between (``command_guard``), so that nothing is left either when the agent is killed. Of the agent's
environment, which may hold secrets, the command gets what every program needs, and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ugro
from ugro.features.alerts.channels import SendFailure, post, secret
from ugro.kernel.support import moments as clock
from ugro.kernel.support.errors import TimedOut, UgroError
from ugro.kernel.support.process import INHERITED

_MOST_OUTPUT = 16 * 1024
_MOST_LINE = 200
_END_S = 15.0


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    said: str  # the end of its output, both streams

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        return lines[-1][:_MOST_LINE] if lines else ""

    @property
    def complaint(self) -> str | None:
        """None if it succeeded."""
        if self.code == 0:
            return None
        return f"exit code {self.code}" + (f": {self.last_line}" if self.last_line else "")


class NotStarted(UgroError):
    """The command could not be started at all, as on a machine without memory."""


async def run(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout_s: float, content: bytes = b""
) -> Ended:
    """``env``: besides what is inherited. ``content`` is its input. Raises TimedOut, and NotStarted."""
    process = await _start(argv, env, cwd)
    try:
        async with asyncio.timeout(timeout_s):
            said, _ = await asyncio.gather(_read(process), _write(process, content))
            code = await process.wait()
    except TimeoutError as error:
        raise TimedOut(f"{Path(argv[0]).name} did not end within {timeout_s:g} s") from error
    finally:
        await _end(process)
    return Ended(code, said)


async def _start(argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "ugro.kernel.support.command_guard"),
            *(str(os.getpid()), ",".join((*INHERITED, *env))),
            *argv,
            env={**os.environ, **env},  # the guard is ours, and may need all of it to start
            cwd=cwd,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise NotStarted(f"{argv[0]} cannot be started: {(error.strerror or 'unknown').lower()}") from error


async def _read(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    kept = b""
    while part := await process.stdout.read(64 * 1024):
        kept = (kept + part)[-_MOST_OUTPUT:]
    text = kept.decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


async def _write(process: asyncio.subprocess.Process, content: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it does not want to read it
        process.stdin.write(content)
        await process.stdin.drain()
    process.stdin.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """The guard ends what the command has started, and then itself."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.wait()
            return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


# --- posts that their receiver can check ------------------------------------------------------------------------------
# Posts JSON that its receiver can check: signed with a secret that both know, and with the time of this try.
#
# ``UGRO-Signature: sha256=HEX`` is HMAC-SHA256 of the timestamp, a dot and the body. See docs/hooks.md.


_LEAST_SECRET = 16


def signature(key: bytes, timestamp: str, body: bytes) -> str:
    return "sha256=" + hmac.new(key, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def key_of(what: str, file: str | None, variable: str | None) -> bytes:
    """Read when it is needed, and never logged. Raises SendFailure."""
    text = secret(what, file) if file is not None else os.environ.get(variable or "", "").strip()
    if len(text) < _LEAST_SECRET:
        place = file if file is not None else f"the variable {variable} of the agent"
        problem = f"{what}: {place} holds no secret of at least {_LEAST_SECRET} characters"
        raise SendFailure(problem, may_pass=False, hint="make one: openssl rand -hex 32")
    return os.fsencode(text)  # a variable may hold any bytes


async def send(what: str, address: str, body: bytes, key: bytes, timeout_s: float, **names: str) -> None:
    """``names``: headers beside ``UGRO-``. Raises SendFailure."""
    timestamp = str(int(clock.now().wall_s))
    headers = {
        "User-Agent": f"ugro/{ugro.__version__}",
        "Content-Type": "application/json",
        **{f"UGRO-{name.title()}": value for name, value in names.items()},
        "UGRO-Timestamp": timestamp,
        "UGRO-Signature": signature(key, timestamp, body),
    }
    await asyncio.to_thread(post, what, address, body, headers, timeout_s)

"""The link to a master: one ssh with a relay at its other end, shared by all connections of a client.

A link that breaks is opened again, with growing pauses, when the next connection is needed: who follows a job does not
notice more than a pause.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO

from ugro.client.http import NoAgent
from ugro.client.remote.banner import MOST_BEFORE, Banner, find_banner
from ugro.client.remote.master import Master
from ugro.client.remote.mux import LinkLost, Mux
from ugro.client.remote.relay import AGENT
from ugro.client.remote.ssh import ENVIRONMENT, HUNG_UP, failure, is_shared, relay_command
from ugro.core.errors import Unreachable
from ugro.core.support.clock import boot_clock_s
from ugro.core.support.state_dir import StateDir

PATIENCE_S = 900.0  # for a link that broke
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_BANNER_S = 60.0  # the relay may have to start the agent
_MOST_SAID = 16 * 1024
_END_S = 2.0
_TRIES = 3

Say = Callable[[str], None]


class MasterLink:
    """From any thread. Opened when it is first needed."""

    def __init__(self, master: Master, home: StateDir, say: Say | None = None) -> None:
        """``say``: told when the link breaks and when it is back. ``home``: this machine's state directory."""
        self.master = master
        self.patience_s = PATIENCE_S
        self._home = home
        self._say = say or (lambda text: None)
        self._lock = threading.Lock()
        self._ssh: _Ssh | None = None
        self._was_up = False

    def open(self, to: str = AGENT) -> socket.socket:
        """A connection to the agent there, or to its dashboard."""
        for _ in range(_TRIES):
            mux = self._up()
            with contextlib.suppress(LinkLost):
                return mux.open({"to": to})
        raise NoAgent(f"the link to {self.master} keeps breaking", hint=f"try: ssh {self.master}")

    def carry(self, local: socket.socket, to: str) -> None:
        """Joins a connection of this machine with one there; closes it in any case."""
        self._up().carry(local, {"to": to})

    @property
    def banner(self) -> Banner:
        """What the relay said of itself."""
        self._up()
        assert self._ssh is not None
        return self._ssh.banner

    def close(self) -> None:
        with self._lock:
            ssh, self._ssh, self._was_up = self._ssh, None, False
        if ssh is not None:
            ssh.close()

    def _up(self) -> Mux:
        with self._lock:
            if self._ssh is None or self._ssh.mux.is_over:
                old, self._ssh = self._ssh, None
                if old is not None:
                    old.close()
                self._ssh = self._reopened(old) if self._was_up else self._first()
                self._was_up = True
            return self._ssh.mux

    def _first(self) -> _Ssh:
        was_shared = is_shared(self._home)
        try:
            return _Ssh(self.master, self._home)
        except Unreachable as error:
            if error.cause != "ssh" or not (was_shared or HUNG_UP in error.message):
                raise
            # The shared connection may be what is dead: this machine slept, or is in another network now. And what a
            # jump host's ssh says is lost with a connection that is to be kept.
            return _Ssh(self.master, self._home, is_shared=False)

    def _reopened(self, old: _Ssh | None) -> _Ssh:
        why = old.mux.problem if old is not None else None
        self._say(f"the link to {self.master} broke{f' ({why})' if why else ''}; trying again")
        deadline, pause_s, said = boot_clock_s() + self.patience_s, _FIRST_PAUSE_S, ""
        try:
            while True:
                try:
                    # Not shared: what broke may be the shared connection itself.
                    found = _Ssh(self.master, self._home, is_shared=False)
                except Unreachable as error:
                    if boot_clock_s() + pause_s > deadline:
                        raise
                    if error.message != said:
                        said = error.message
                        self._say(f"the link to {self.master} is not back yet: {said}; still trying")
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                else:
                    self._say(f"the link to {self.master} is back")
                    return found
        except KeyboardInterrupt:
            self.patience_s = 0.0  # who interrupts does not want to wait for it again
            raise


class _Ssh:
    """One ssh process, whose relay has answered."""

    def __init__(self, master: Master, home: StateDir, *, is_shared: bool = True) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # no pipe: the shared connection keeps it open
        command = relay_command(master, home, is_shared=is_shared)
        try:
            # A session of its own: Ctrl-C is for us to act on, while the link still stands.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            text = f"ssh cannot be started: {(error.strerror or str(error)).lower()}"
            raise Unreachable(text, hint="install OpenSSH's client", cause="ssh") from error
        with contextlib.ExitStack() as unless_heard:
            unless_heard.callback(self._end)
            self.banner, rest = self._hear(master)
            unless_heard.pop_all()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.mux = Mux(self._process.stdout.fileno(), self._process.stdin.fileno(), heard=rest)
        threading.Thread(target=self._run, name=f"link to {master}", daemon=True).start()

    def close(self) -> None:
        """The thread ends the process: nobody waits for that."""
        self.mux.stop()

    def _run(self) -> None:
        self.mux.run()
        self._end()

    def _hear(self, master: Master) -> tuple[Banner, bytes]:
        """The relay's first line. Raises why there is none."""
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(out, select.POLLIN)
        deadline, said = boot_clock_s() + _BANNER_S, b""
        while (left_s := deadline - boot_clock_s()) > 0:
            if not poll.poll(left_s * 1000):
                break
            if not (piece := os.read(out, 65536)):
                raise failure(master, self._code(), self._said())
            found, said = find_banner(said + piece)
            if found is not None:
                return found, said
            if len(said) > MOST_BEFORE:
                hint = f"what does it print? ssh {master} ugro --version"
                raise Unreachable("something else than a relay answers", subject=str(master), hint=hint, cause="relay")
        raise Unreachable(f"no answer within {_BANNER_S:g} s", subject=str(master), hint=f"try: ssh {master}")

    def _code(self) -> int | None:
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return None

    def _said(self) -> str:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _MOST_SAID))
        return self._errors.read(_MOST_SAID).decode("utf-8", "replace")

    def _end(self) -> None:
        """The relay ends when its input does."""
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

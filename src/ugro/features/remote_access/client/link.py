"""The link to a master: one ssh with a relay at its other end, shared by all connections of a client.

A link that breaks is opened again, with growing pauses, when the next connection is needed: who follows a job does not
notice more than a pause.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO
from urllib.parse import urlsplit, urlunsplit

from ugro.client.http import NoAgent
from ugro.features.remote_access.client.master import COMMAND_VARIABLE, Master
from ugro.features.remote_access.client.mux import LinkLost, Mux
from ugro.features.remote_access.client.relay import AGENT, DASHBOARD, MOST_BEFORE, Banner, find_banner
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError, Unreachable
from ugro.kernel.support.moments import boot_clock_s
from ugro.kernel.support.state_dir import StateDir

# --- forward ----------------------------------------------------------------------------------------------------------
# A loopback port of this machine that leads to the dashboard of a master.


log = logging.getLogger(__name__)
_BACKLOG = 64


class DashboardForward:
    """``with`` it, print ``url``, and ``serve`` until Ctrl-C."""

    def __init__(self, link: MasterLink, url: str) -> None:
        """``url``: of the dashboard, as it is on the master."""
        self._link = link
        self._there = urlsplit(url)
        self._listener = _listener(self._there.port or 0)

    @property
    def url(self) -> str:
        """The same, on this machine."""
        port = self._listener.getsockname()[1]
        return urlunsplit(self._there._replace(netloc=f"127.0.0.1:{port}"))

    def __enter__(self) -> DashboardForward:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def serve(self) -> None:
        """Until it is interrupted. A connection that fails is closed; the next one may go well."""
        while True:
            local, _ = self._listener.accept()
            try:
                local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._link.carry(local, DASHBOARD)
            except UgroError as error:
                log.warning("a connection to the dashboard failed: %s", error)


def _listener(wanted: int) -> socket.socket:
    """At the same port as there, if that is free: bookmarks stay valid."""
    for port in (wanted, 0):
        found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with contextlib.ExitStack() as unless_bound:
            unless_bound.callback(found.close)
            try:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                found.bind(("127.0.0.1", port))
                found.listen(_BACKLOG)
            except OSError:
                continue
            unless_bound.pop_all()
            return found
    raise UgroError("no loopback port is free")


# --- ssh --------------------------------------------------------------------------------------------------------------
# The ssh command that reaches a master's relay, and what its failures mean.


KEPT_S = 600  # without a command, until the shared connection ends
_CONNECT_S = 10
_LONGEST_SOCKET = 80  # ssh appends a temporary suffix of 17 bytes, and 108 are the most
_SSH_FAILED, _NOT_FOUND, _NOT_EXECUTABLE = 255, 127, 126
_DIGEST = 40  # characters of %C
# Said by ssh when the peer hangs up before the protocol starts. After another error it means a jump host's ssh.
HUNG_UP = "_exchange_identification"

# As for the link to a node: keys, names, jumps and ports come from the user's own configuration; nothing is asked,
# nothing forwarded, and host keys are checked as that configuration says.
_OPTIONS = {
    "BatchMode": "yes",
    "ClearAllForwardings": "yes",
    "ConnectTimeout": str(_CONNECT_S),
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ServerAliveCountMax": "3",
    "ServerAliveInterval": "5",
}
# A jump is another ssh, which the options above do not reach: it must not prompt either, not even in a window.
ENVIRONMENT = {"SSH_ASKPASS_REQUIRE": "never"}
# Pipx and ``pip install --user`` put ugro where the PATH of a shell without login often does not look.
_IN_PATH = 'PATH="$PATH:$HOME/.local/bin" exec ugro relay'


def relay_command(master: Master, home: StateDir, *, is_shared: bool) -> list[str]:
    """``is_shared``: over a connection that stays open for the next commands."""
    words = ["ssh"]
    if master.ssh_config:
        words += ["-F", os.path.expanduser(master.ssh_config)]
    for key, value in {**_OPTIONS, **(sharing(home) if is_shared else _ALONE)}.items():
        words += ["-o", f"{key}={value}"]
    return [*words, *master.destination, _there(master.command)]


_ALONE = {"ControlMaster": "no", "ControlPath": "none"}


def sharing(home: StateDir) -> dict[str, str]:
    """OpenSSH's own sharing, at a private path; none if that path would be too long."""
    folder = home.path / "ssh"
    if len(os.fsencode(folder)) + 1 + _DIGEST > _LONGEST_SOCKET or "%" in str(folder) or " " in str(folder):
        return _ALONE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_private = folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o077
    except OSError:
        return _ALONE
    if not is_private:
        return _ALONE
    return {"ControlMaster": "auto", "ControlPath": f"{folder}/%C", "ControlPersist": str(KEPT_S)}


def is_shared(home: StateDir) -> bool:
    """Whether a connection was left open by an earlier command."""
    try:
        return any((home.path / "ssh").iterdir())
    except OSError:
        return False


def _there(command: str | None) -> str:
    """One word for the login shell there, whichever it is."""
    if command is None:
        return f"exec sh -c {shlex.quote(_IN_PATH)}"
    path = f"$HOME/{shlex.quote(command[2:])}" if command.startswith("~/") else shlex.quote(command)
    return f"exec sh -c {shlex.quote(f'exec {path} relay')}"


def failure(master: Master, code: int | None, said: str) -> UgroError:
    """Why ssh ended before the relay spoke. ``said``: on its standard error."""
    login = f"try: ssh {' '.join(word for word in master.destination if word != '--')}"
    last = _last_line(said)
    if code == _SSH_FAILED or code is None or code < 0:
        if (refusal := _refusal(said, login)) is not None:
            message, hint = refusal
            on_the_way = "on the way to it (its jump host or proxy): " if HUNG_UP in said else ""
            return NotAllowed(on_the_way + message, subject=str(master), hint=hint)
        return Unreachable(last or "ssh ended", subject=str(master), hint=login, cause="ssh")
    if code in (_NOT_FOUND, _NOT_EXECUTABLE):
        what = master.command or "ugro"
        hint = (
            f"install it there, or name its path: ugro login {master} --master-ugro PATH, or {COMMAND_VARIABLE}=PATH; "
            f"find it: {login.removeprefix('try: ')} 'bash -lc \"command -v ugro\"'"
        )
        return NotFound(f"{what} is not in the PATH of a command there", subject=str(master), hint=hint)
    return Unreachable(
        f"its relay ended with code {code}{f': {last}' if last else ''}", subject=str(master), hint=login, cause="relay"
    )


def _refusal(said: str, login: str) -> tuple[str, str] | None:
    """What ssh or the other end did not accept, and what to try."""
    command = login.removeprefix("try: ")
    if "HOST IDENTIFICATION HAS CHANGED" in said:
        hint = f"someone may be in between; if the machine was reinstalled, this says which key to remove: {command}"
        return "its host key has changed", hint
    if "Host key verification failed" in said:
        return "its host key is not known", f"compare the fingerprint and accept it: {command}"
    if "Permission denied" in said or "Too many authentication failures" in said:
        return "login refused", login
    return None


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:300]


# --- link -------------------------------------------------------------------------------------------------------------


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

"""A replica on its node: a free port, its server, probes, restarts within a budget. Settings are JSON in a variable."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from ugro.features.services.node.probing import FiguresReader, Prober
from ugro.node.process.processes import adopt_orphans, end_all, is_free, say

# --- status -----------------------------------------------------------------------------------------------------------
# The state of a replica for the agent: a line of JSON for each change, on a socket in the run directory.


FOLDER, NAME = "serve", "status"
_MOST = 8  # connections at once
_ALIVE_S = 10.0  # an empty line: a reader that is gone is noticed


class Status:
    def __init__(self, run_dir: str) -> None:
        self.folder = os.path.join(run_dir, FOLDER)
        os.makedirs(self.folder, 0o700, exist_ok=True)
        self._now: dict[str, Any] = {"state": "starting", "reason": "", "host": "", "port": 0, "restarts": 0, "pid": 0}
        self._count = 0
        self._changed = threading.Condition()
        self._open = threading.Semaphore(_MOST)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, NAME))
        folder = os.open(self.folder, os.O_RDONLY)
        try:  # the path may be longer than the address of a socket
            self._listener.bind(f"/proc/self/fd/{folder}/{NAME}")
        finally:
            os.close(folder)
        self._listener.listen(_MOST)
        threading.Thread(target=self._serve, daemon=True, name="status").start()

    def set(self, **values: Any) -> None:
        with self._changed:
            now = {**self._now, **values}
            if now != self._now:
                self._now = now
                self._count += 1
                self._changed.notify_all()

    @property
    def state(self) -> str:
        return str(self._now["state"])

    def _serve(self) -> None:
        while True:
            self._open.acquire()
            connection, _ = self._listener.accept()
            threading.Thread(target=self._tell, args=(connection,), daemon=True).start()

    def _tell(self, connection: socket.socket) -> None:
        seen = -1
        try:
            with connection:
                connection.settimeout(30)
                while True:
                    with self._changed:
                        if self._count == seen:
                            self._changed.wait(_ALIVE_S)
                        line = json.dumps(self._now) if self._count != seen else ""
                        seen = self._count
                    connection.sendall(line.encode() + b"\n")
        except OSError:
            pass
        finally:
            self._open.release()


# --- main -------------------------------------------------------------------------------------------------------------


EXHAUSTED = 64  # as core.service says
SETTINGS, SECRET = "UGRO_REPLICA_SETTINGS", "UGRO_REPLICA_SECRET"
FIRST_PORT, END_PORT = 8700, 9999  # below what Ray, rendezvous and the kernel give out
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_END_S = 2.0
_GIVE_BACK_S = 3.0  # a port may take a moment to be free again
_MOST_MOVES = 20  # to other ports, because somebody else took ours


def main() -> int:
    settings: dict[str, Any] = json.loads(os.environ.pop(SETTINGS))
    return Replica(settings, os.environ.pop(SECRET, "")).run()


class Replica:
    def __init__(self, settings: Mapping[str, Any], secret: str) -> None:
        self.settings = settings
        self.is_ending = False
        self._status = Status(os.environ["UGRO_RUN_DIR"])
        self._key_file = _written(os.path.join(self._status.folder, "key"), secret) if secret else None
        self._host = own_host(str(settings["door"]))
        self._claim: socket.socket | None = None
        self._port = 0
        self._ends: list[float] = []  # when the program ended by itself
        self._restarts = 0
        self._moves = 0
        self._problem: str | None = None  # why it must be started again
        self._is_hopeless = False  # its program is not there, or says that another start is of no use
        self._was_ready = False
        self._woken, self._wake = os.pipe()

    def run(self) -> int:
        adopt_orphans()
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_end)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # wakes us
        while not self.is_ending:
            if not self._port:
                self._choose_port()
            problem = self._serve()
            if problem is None:
                break
            if self._may_move(problem):
                continue
            if not self._may_restart(problem):
                return EXHAUSTED
        return 0

    # --- one life of its program -------------------------------------------------------------------------------

    def _serve(self) -> str | None:
        """Why it ended; None: it was asked to."""
        self._problem = None
        argv = filled(self.settings["command"], self._words())
        try:
            child = subprocess.Popen(argv, env=self._environment(), stdin=subprocess.DEVNULL)
        except OSError as error:
            self._is_hopeless = error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR)
            return f"cannot be started: {argv[0]}: {(error.strerror or str(error)).lower()}"
        say(f"replica {self._number} of {self.settings['name']} at {self._host}:{self._port}, pid {child.pid}")
        self._status.set(state="starting", reason="", host=self._host, port=self._port, pid=child.pid)
        prober = Prober(self.settings["probes"], (self._host, self._port), self._said, self._give_up)
        figures = FiguresReader((self._host, self._port), self._key_file, lambda found: self._status.set(figures=found))
        for thread in (prober, figures):
            thread.start()
        try:
            while child.poll() is None and not self.is_ending and self._problem is None:
                self._pause(60.0)
        finally:
            prober.stop()
            figures.stop()
        return self._end(child)

    def _end(self, child: subprocess.Popen[bytes]) -> str | None:
        if self.is_ending:
            self._status.set(state="stopping", reason="")
            child.terminate()
            child.wait()  # its supervisor kills it when its time is over
            end_all(_END_S)
            return None
        problem = self._problem or f"ended with {_outcome(child.wait())}"
        is_lasting = self._problem is None and child.returncode == EXHAUSTED  # its own word for: not again
        self._is_hopeless = is_lasting and not self._was_ready
        end_all(_END_S)
        return problem

    def _said(self, state: str, reason: str) -> None:
        """By the prober."""
        if state == "ready" and self._status.state != "ready":
            say("ready")
            self._was_ready = True
        elif state == "unready" and self._status.state == "ready":
            say(reason)
        self._status.set(state=state, reason=reason)

    def _give_up(self, reason: str) -> None:
        """By the prober."""
        self._problem = reason
        os.write(self._wake, b"\0")

    def _environment(self) -> dict[str, str]:
        own = {
            "UGRO_PORT": str(self._port),
            "UGRO_HOST": self._host,
            "UGRO_SERVICE": str(self.settings["name"]),
            "UGRO_REPLICA": self._number,
            "UGRO_MODEL": self._model,
        }
        if self._key_file is not None:
            own["UGRO_SERVICE_KEY_FILE"] = self._key_file
        return {**os.environ, **own, **self._secrets()}

    def _secrets(self) -> dict[str, str]:
        """Variables in which other engines expect their key."""
        names = self.settings.get("key_variables", ())
        if self._key_file is None or not names:
            return {}
        with open(self._key_file, encoding="ascii") as file:
            return dict.fromkeys(names, file.read())

    def _words(self) -> dict[str, str]:
        base = os.environ.get("UGRO_FOLDER_BASE", "")
        words = {"port": str(self._port), "host": self._host, "name": str(self.settings["name"]), "base": base}
        return {**words, "model": self._model, "python": sys.executable, "key_file": self._key_file or ""}

    @property
    def _model(self) -> str:
        return os.environ.get("UGRO_FOLDER_MODEL") or ""

    @property
    def _number(self) -> str:
        return str(self.settings["number"])

    # --- again ---------------------------------------------------------------------------------------------------

    def _may_move(self, problem: str) -> bool:
        """Somebody else listens where it should: that is not its fault."""
        deadline = time.monotonic() + _GIVE_BACK_S
        while not is_free(self._port) and time.monotonic() < deadline and not self.is_ending:
            self._pause(0.1)
        if is_free(self._port) or self.is_ending or self._moves >= _MOST_MOVES:
            return False
        say(f"{problem}; port {self._port} is taken by another program, trying another one")
        self._moves += 1
        self._status.set(state="restarting", reason=f"port {self._port} is taken by another program")
        self._port = 0
        return True

    def _may_restart(self, problem: str) -> bool:
        rule, now = self.settings["restarts"], time.monotonic()
        self._ends = [at for at in self._ends if now - at < rule["within_s"]] + [now]
        self._restarts += 1
        say(problem)
        if self._is_hopeless:
            say("it is not started again: it would end the same way")
            self._status.set(state="failed", reason=problem, restarts=self._restarts)
            return False
        if len(self._ends) > rule["most"]:
            often = f"it ended {len(self._ends)} times within {rule['within_s']:g} s"
            say(f"{often}, the last time: {problem}")
            self._status.set(state="failed", reason=f"{problem}; {often}", restarts=self._restarts)
            return False
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (len(self._ends) - 1))
        self._status.set(state="restarting", reason=problem, restarts=self._restarts)
        deadline = time.monotonic() + pause_s
        while not self.is_ending and (left_s := deadline - time.monotonic()) > 0:
            self._pause(left_s)
        return True

    def _choose_port(self) -> None:
        """The same one for the same replica, if it is free: the door need not learn another."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None
        first = zlib.crc32(f"{self.settings['key']}-{self._number}".encode()) % (END_PORT - FIRST_PORT)
        for step in range(END_PORT - FIRST_PORT):
            port = FIRST_PORT + (first + self._moves + step) % (END_PORT - FIRST_PORT)
            claim = _claimed(port)
            if claim is not None and is_free(port):
                self._claim, self._port = claim, port
                return
            if claim is not None:
                claim.close()
        say(f"no port is free between {FIRST_PORT} and {END_PORT - 1}")
        sys.exit(1)

    # --- waiting -------------------------------------------------------------------------------------------------

    def _ask_to_end(self, number: int, frame: object) -> None:
        self.is_ending = True

    def _pause(self, pause_s: float) -> None:
        """Ends at once with a signal, or when the prober gives up."""
        if select.select([self._woken], [], [], pause_s)[0]:
            os.read(self._woken, 64)


def own_host(door: str) -> str:
    """The address of this node at which the door's node reaches it: loopback, if that is this one."""
    if door.startswith("127."):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((door, 9))  # sends nothing
        own = str(probe.getsockname()[0])
    return "127.0.0.1" if own == door else own


def filled(command: Sequence[str], words: Mapping[str, str]) -> list[str]:
    """With ``{port}`` and the like replaced; other braces stay as they are."""
    made = []
    for word in command:
        for name, value in words.items():
            word = word.replace(f"{{{name}}}", value)
        made.append(word)
    return made


def _claimed(port: int) -> socket.socket | None:
    """Kept from other replicas on this machine while it is open; it goes with this process."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        name.bind(f"\0ugro-serve-port-{port}")
    except OSError:
        name.close()
        return None
    return name


def _written(path: str, secret: str) -> str:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret)
    return path


def _outcome(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"

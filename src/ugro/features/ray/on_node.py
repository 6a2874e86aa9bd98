"""A rank: starts Ray on its node, watches it, ends all of it, and removes its files."""

from __future__ import annotations

import glob
import json
import os
import platform
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util
from typing import Any

from ugro.features.ray.on_node_start import (
    BLOCK,
    PATIENCE_S,
    Ports,
    RefusedError,
    Settings,
    available_memory,
    base_folder,
    blocks_for,
    environment,
    gpus,
    make_folder,
    remove,
    shared_memory,
    sizes,
    start_words,
    write_programs,
)
from ugro.node.process.processes import adopt_orphans, descendants, end_all, is_free, say

LOOK_S = 0.1
_CALM_S = 1.0  # between looks at what has started
_NODES_S = 3.0
_END_S = 5.0
_STOPPED_S = 30.0
_HEAD_GONE_S = 2.0
_PORT_S = 5.0  # an attempt that was killed may take a moment to give it back
_SAY_S = 10.0  # between two words about a start that takes its time
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STARTED = b"Ray runtime started."


class Rank:
    """Starts Ray on this node and stays until it ends. ``run`` returns the exit code."""

    def __init__(self, settings: Settings, token: str) -> None:
        self.settings = settings
        self.token = token
        self.is_ending = False
        self.folder = os.path.join(base_folder(), f"{settings['id']}-{settings['number']}")
        self.token_file = os.path.join(self.folder, "token")
        self.ports = Ports(blocks_for(int(settings["cpus"])))
        self._start_log = os.path.join(self.folder, "start.log")
        self._stopped_at: float | None = None
        self._seen: set[str] = set()
        self._woken, self._wake = os.pipe()

    def run(self) -> int:
        adopt_orphans()
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_end)
        try:
            self._prepare()
            own = self._own_address()
            if self.is_ending:
                return 0
            ray = self._start(own)
            return self._stay(ray)
        finally:
            end_all(_END_S)
            remove(self.folder)
            if self.settings["role"] != "head" or self.is_ending:
                self._forget()

    def _ask_to_end(self, number: int, frame: object) -> None:
        self.is_ending = True

    def _pause(self, pause_s: float) -> None:
        """Ends at once with a signal."""
        if select.select([self._woken], [], [], pause_s)[0]:
            os.read(self._woken, 64)

    def _forget(self) -> None:
        """A head that was ended in good order does not come back; one that was killed finds its state again."""
        if self.settings["role"] == "head" and self.settings.get("state"):
            remove(str(self.settings["state"]))

    def _prepare(self) -> None:
        remove(self.folder)  # of an attempt that was killed
        make_folder(self.folder)
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self.token)
        if state := self.settings.get("state"):
            os.makedirs(state, 0o700, exist_ok=True)

    def _own_address(self) -> str:
        """Where the others reach this node: the address from which it reaches the head, once that listens."""
        address, port = str(self.settings["address"]), int(self.settings["port"])
        if self.settings["role"] != "worker":
            self._wait_for_ports([port, *([self.settings["client_port"]] if "client_port" in self.settings else [])])
            return address
        is_said = False
        while not self.is_ending:
            try:
                with socket.create_connection((address, port), 2.0) as connection:
                    own = str(connection.getsockname()[0])
                    return address if own.startswith("127.") else own  # of one machine all have the same
            except OSError as error:
                if not is_said:
                    say(f"waiting for the head at {address}:{port}: {error}")
                is_said = True
                self._pause(LOOK_S)
        return ""

    def _wait_for_ports(self, ports: Sequence[int]) -> None:
        deadline = time.monotonic() + _PORT_S
        while (taken := [port for port in ports if not is_free(port)]) and not self.is_ending:
            if time.monotonic() > deadline:
                raise RefusedError(f"port {taken[0]} is taken by another program")
            self._pause(LOOK_S)

    def _start(self, own: str) -> subprocess.Popen[bytes]:
        memory = sizes(self.settings, available_memory(), shared_memory())
        words = start_words(self.settings, self.ports.first, own, self.folder, memory)
        last = self.ports.first + blocks_for(int(self.settings["cpus"])) * BLOCK - 1
        say(
            f"{self.settings['role']} {self.settings['title']} at {own}, ports {self.ports.first}-{last}, "
            f"{self.settings['cpus']} CPUs, {gpus(os.environ)} GPUs, {memory[0] >> 20} MiB for tasks, "
            f"{memory[1] >> 20} MiB for objects"
        )
        with open(self._start_log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-u", write_programs(self.folder), "start", *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.settings, os.environ, self.ports.first, self.token_file)

    def _stay(self, ray: subprocess.Popen[bytes]) -> int:
        is_ready, nodes = False, Nodes(self.settings, self.token)
        began = said_at = time.monotonic()
        while not self.is_ending:
            if is_ready and self.settings.get("is_gang") and self._head_is_gone():
                say("the driver has ended")
                return 0
            if ray.poll() is not None:
                return self._failed(f"ray start ended with exit code {ray.returncode}")
            if not is_ready and self.has_started:
                is_ready = True
                say("ready")
            if (problem := self.problem()) is not None:  # ray start would notice it later, or never
                return self._failed(problem)
            if not is_ready and time.monotonic() - said_at > _SAY_S:
                said_at = time.monotonic()
                say(f"starting for {said_at - began:.0f} s; Ray wrote: {self._last_line()}")
            if is_ready and self.settings["role"] == "head":
                nodes.look()
            self._pause(_CALM_S if is_ready else LOOK_S)
        say("ending")
        return 0

    def _last_line(self) -> str:
        with open(self._start_log, encoding="utf-8", errors="replace") as log:
            last = (log.read().strip().splitlines() or ["nothing yet"])[-1]
        return _COLOURS.sub("", last.rpartition(" -- ")[2])[-200:]

    @property
    def has_started(self) -> bool:
        with open(self._start_log, "rb") as log:
            return _STARTED in log.read()

    def problem(self) -> str | None:
        """``ray start --block`` stays for ever when the raylet ended by SIGTERM, so it is looked at itself."""
        needed = ("raylet",) if self.settings["role"] == "worker" else ("raylet", "gcs_server")
        living = {name: state for name, state in descendants().values() if name in needed}
        self._seen |= set(living)
        if gone := sorted(self._seen - set(living)):
            return f"Ray's {gone[0]} has ended"
        if "T" not in living.values():
            self._stopped_at = None
            return None
        self._stopped_at = self._stopped_at or time.monotonic()
        return "Ray was stopped by a signal" if time.monotonic() - self._stopped_at > _STOPPED_S else None

    def _head_is_gone(self) -> bool:
        deadline = time.monotonic() + _HEAD_GONE_S
        while time.monotonic() < deadline and not self.is_ending:
            try:
                with socket.create_connection((self.settings["address"], self.settings["port"]), 2.0):
                    return False
            except OSError:
                self._pause(LOOK_S)
        return True

    def _failed(self, what: str) -> int:
        with open(self._start_log, encoding="utf-8", errors="replace") as log:
            lines = log.read().splitlines()
        for line in [*lines[-25:], *raylet_complaints(self.folder)]:
            os.write(1, f"{line}\n".encode())
        say(what)
        return 1


class Nodes:
    """Ray's own view of its nodes, asked of the dashboard on this node, and said when it changes."""

    def __init__(self, settings: Settings, token: str) -> None:
        self._url = f"http://127.0.0.1:{settings.get('dashboard_port')}/api/v0/nodes?limit=10000"
        self._token = token
        self._said = ""
        self._at = 0.0

    def look(self) -> None:
        if time.monotonic() < self._at:
            return
        self._at = time.monotonic() + _NODES_S
        request = urllib.request.Request(self._url, headers={"Authorization": f"Bearer {self._token}"})
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=2) as answer:
                found = json.loads(answer.read(4 << 20))
            rows = found["data"]["result"]["result"]
            alive = sorted(str(node["node_name"]) for node in rows if node["state"] == "ALIVE")
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return  # it has not started yet, or is busy
        if (text := json.dumps({"alive": alive})) != self._said:
            self._said = text
            say(f"nodes {text}")


def raylet_complaints(folder: str) -> list[str]:
    """The last lines of Ray's own logs that say why."""
    found: list[str] = []
    for path in glob.glob(os.path.join(folder, "session_latest", "logs", "raylet.*")):
        try:
            with open(path, encoding="utf-8", errors="replace") as log:
                lines = log.read()[-8000:].splitlines()
        except OSError:
            continue
        found += [line for line in lines if " E " in line or " C " in line or "Error" in line][-5:]
    return found


# --- driver -----------------------------------------------------------------------------------------------------------
# A head with a script of the user's as its driver: the first rank of ``ugro launch --launcher ray``.


_GATHER_S = float(PATIENCE_S)
_GATHER = """
import sys, time
from ray._raylet import GcsClient
address, wanted, limit_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
client = GcsClient(address=address)
end = time.monotonic() + limit_s
while time.monotonic() < end:
    alive = [one for one in client.get_all_node_info().values() if one.state == 0]
    if len(alive) >= wanted:
        sys.exit(0)
    time.sleep(0.1)
sys.exit(1)
"""


class Driver(Rank):
    """A head with a script of the user's, which ends with that script."""

    def _stay(self, ray: subprocess.Popen[bytes]) -> int:
        while not self.is_ending and not self.has_started:
            if ray.poll() is not None:
                return self._failed(f"ray start ended with exit code {ray.returncode}")
            if (problem := self.problem()) is not None:
                return self._failed(problem)
            self._pause(LOOK_S / 2)
        address = f"{self.settings['address']}:{self.settings['port']}"
        env = {**self.environment, "RAY_ADDRESS": address, "RAY_NAMESPACE": str(self.settings.get("namespace", ""))}
        if self.is_ending or not self._gather(env, address):
            return 0 if self.is_ending else self._failed("not all nodes joined")
        driver = subprocess.Popen([sys.executable, "-u", *self.settings["argv"]], env=env)
        while driver.poll() is None and not self.is_ending:
            if (problem := self.problem()) is not None:
                return self._failed(problem)
            self._pause(LOOK_S / 2)
        code = driver.wait(0) if driver.poll() is not None else 0
        return code if code >= 0 else 128 - code

    def _gather(self, env: Mapping[str, str], address: str) -> bool:
        """Waits until every node of the job has joined."""
        wanted = int(self.settings["nodes"])
        if wanted == 1:
            return True
        waiting = subprocess.Popen([sys.executable, "-c", _GATHER, address, str(wanted), str(_GATHER_S)], env=env)
        while waiting.poll() is None and not self.is_ending:
            self._pause(LOOK_S / 2)
        return waiting.returncode == 0


# --- main -------------------------------------------------------------------------------------------------------------
# Which role this process has on its node. Its settings are JSON in ``UGRO_RAY``.


_REACH_S = 3.5
LASTING = 64  # exit code of what would go wrong again: UGRO does not try it again


def main() -> int:
    settings: Settings = json.loads(os.environ["UGRO_RAY"])
    if settings.get("cpus", 0) is None:
        settings = {**settings, "cpus": len(os.sched_getaffinity(0))}
    token = os.environ.pop("UGRO_RAY_TOKEN", "")
    role = ROLES[settings["role"]]
    try:
        return role(settings, token)
    except RefusedError as error:
        say(str(error))
        return LASTING


def look(settings: Settings) -> dict[str, Any]:
    """What is to be known of a node before anything starts on it."""
    try:
        ray: str | None = metadata.version("ray")
    except metadata.PackageNotFoundError:
        ray = None
    return {
        "python": platform.python_version(),
        "ray": ray,
        "has_dashboard": util.find_spec("aiohttp_cors") is not None,
        "shared_bytes": shared_memory(),
        "available_bytes": available_memory(),
        "taken_ports": [port for port in settings.get("ports", ()) if not is_free(port)],
        "unreached": _unreached(settings.get("reach")),
    }


def _unreached(target: Sequence[Any] | None) -> str | None:
    """Why this address and port cannot be reached."""
    if target is None:
        return None
    try:
        socket.create_connection((str(target[0]), int(target[1])), _REACH_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def clean(settings: Settings) -> dict[str, Any]:
    """Removes what killed ranks of a cluster have left. Its jobs have ended."""
    for path in glob.glob(os.path.join(base_folder(), f"{settings['id']}-*")):
        remove(path)
    if settings.get("state"):
        remove(str(settings["state"]))
    return {}


def _answer(work: Callable[[Settings], dict[str, Any]]) -> Callable[[Settings, str], int]:
    def role(settings: Settings, token: str) -> int:
        os.write(1, (json.dumps(work(settings)) + "\n").encode())
        return 0

    return role


ROLES: Mapping[str, Callable[[Settings, str], int]] = {
    "head": lambda settings, token: Rank(settings, token).run(),
    "worker": lambda settings, token: Rank(settings, token).run(),
    "driver": lambda settings, token: Driver(settings, token).run(),
    "look": _answer(look),
    "clean": _answer(clean),
}

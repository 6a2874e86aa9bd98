"""One rank of a Ray cluster: the program that runs ON a node, starts Ray there, watches it and cleans up after it.

It is sent as text and run by the Python that has Ray, so it uses the standard library alone and imports nothing of
ours, nor Ray, which would cost every rank memory. Its settings are JSON in ``UGRO_RAY``; its roles are ``ROLES``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import platform
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Settings = Mapping[str, Any]

LASTING = 64  # exit code of what would go wrong again: UGRO does not try it again
FIRST_PORT, END_PORT = 10_000, 15_000  # below what UGRO reserves for rendezvous, and what the kernel gives out
BLOCK = 128
_FIXED = 16  # ports of a block that are not for worker processes
_PORT_FLAGS = (
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
_CLIENT, _DASHBOARD_METRICS, _AUTOSCALER_METRICS = 8, 9, 10  # places in a block, for the head
LEAST_STORE = 80 << 20  # Ray accepts no less than 75 MiB
_HEAD_MEMORY = 256 << 20  # of a head that runs no tasks
_LOOK_S = 0.25
_CALM_S = 1.0  # between looks at what has started
_NODES_S = 3.0
_GATHER_S = 60.0
_END_S = 8.0
_STOPPED_S = 30.0
_HEAD_GONE_S = 2.0
_STARTED = b"Ray runtime started."
_SUBREAPER = 36
_STALE = ("RAY_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_AUTH_TOKEN", "RAY_NODE_IP_ADDRESS")


class RefusedError(Exception):
    """Why it cannot run here, in words; trying again does not help."""


# --- rules: settings in, command out -------------------------------------------------------------------------------


def blocks_for(cpus: int) -> int:
    """Blocks of ports for a node with so many CPUs: each worker process needs one, and actors may share a CPU."""
    return -(-(_FIXED + 4 * cpus + 32) // BLOCK)


def sizes(settings: Settings, available: int, shared: int) -> tuple[int, int]:
    """Memory for tasks, and for objects, in bytes. ``shared``: what is free in /dev/shm."""
    if settings["role"] == "head":
        return _HEAD_MEMORY, min(LEAST_STORE, _checked_store(LEAST_STORE, shared))
    parts = int(settings.get("parts") or 1)
    total = int(settings.get("memory") or available * 7 // 10 // parts)
    wanted = settings.get("object_store")
    store = _checked_store(int(wanted), shared) if wanted else min(total * 3 // 10, shared * 9 // 10 // parts)
    if store < LEAST_STORE:
        what = f"{total >> 20} MiB of memory" if total * 3 // 10 < LEAST_STORE else f"{shared >> 20} MiB in /dev/shm"
        raise RefusedError(f"{what}: too little for Ray, whose object store needs at least {LEAST_STORE >> 20} MiB")
    if store >= total:
        raise RefusedError(f"an object store of {store >> 20} MiB leaves nothing of {total >> 20} MiB of memory")
    return total - store, store


def _checked_store(wanted: int, shared: int) -> int:
    if wanted > shared:
        raise RefusedError(f"too little shared memory: {shared >> 20} MiB are free in /dev/shm, not {wanted >> 20} MiB")
    return wanted


def start_words(settings: Settings, first_port: int, own: str, folder: str, memory: tuple[int, int]) -> list[str]:
    """The arguments of ``ray start``."""
    cpus, count = int(settings["cpus"]), blocks_for(int(settings["cpus"]))
    words = [f"--{flag}={first_port + place}" for place, flag in enumerate(_PORT_FLAGS)]
    words += [f"--min-worker-port={first_port + _FIXED}", f"--max-worker-port={first_port + count * BLOCK - 1}"]
    words += [f"--node-ip-address={own}", f"--node-name={settings['title']}", f"--temp-dir={folder}"]
    words += [f"--num-cpus={cpus}", f"--num-gpus={gpus(os.environ)}"]
    words += [f"--memory={memory[0]}", f"--object-store-memory={memory[1]}"]
    words += [f"--resources={json.dumps(settings.get('resources') or {})}"]
    words += [f"--labels={','.join(f'{key}={value}' for key, value in (settings.get('labels') or {}).items())}"]
    words += ["--disable-usage-stats", "--block"]
    if settings["role"] == "worker":
        return [*words, f"--address={settings['address']}:{settings['port']}"]
    has_dashboard = settings["role"] == "head"
    return [
        *words,
        "--head",
        f"--port={settings['port']}",
        f"--include-dashboard={str(has_dashboard).lower()}",
        f"--dashboard-host={settings.get('dashboard_host', '127.0.0.1')}",
        f"--dashboard-port={settings.get('dashboard_port', first_port + 11)}",
        f"--ray-client-server-port={first_port + _CLIENT}",
    ]


def environment(settings: Settings, inherited: Mapping[str, str], first_port: int, token_file: str) -> dict[str, str]:
    """Of Ray and of the driver."""
    env = {name: value for name, value in inherited.items() if name not in _STALE and name != "UGRO_RAY"}
    env |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token_file,
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5" if settings.get("is_gang") else "600",
    }
    if settings.get("is_gang"):  # tasks find the job's own modules on every node
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), inherited.get("PYTHONPATH", ""))))
    if (level := settings.get("log_level", "info")) != "info":  # each process would say that it was set
        env["RAY_BACKEND_LOG_LEVEL"] = str(level)
    if settings["role"] != "worker":
        env["DASHBOARD_METRIC_PORT"] = str(first_port + _DASHBOARD_METRICS)
        env["AUTOSCALER_METRIC_PORT"] = str(first_port + _AUTOSCALER_METRICS)
    if settings["role"] == "head" and settings.get("state"):
        env |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(settings["state"])}
    return env


def gpus(env: Mapping[str, str]) -> int:
    """Those that UGRO gave."""
    return len([one for one in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if one])


# --- folders and ports ---------------------------------------------------------------------------------------------


def base_folder() -> str:
    """Short, because the path of a socket has at most 107 bytes; nobody else may have made it."""
    path = f"/tmp/ugro-ray-{os.getuid()}"
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise RefusedError(f"{path} is not a private folder of this user; remove it") from None
    return path


class Ports:
    """Consecutive blocks of free ports, kept from other ranks on this machine by locks that this process holds."""

    def __init__(self, base: str, count: int) -> None:
        self._folder = os.path.join(base, "ports")
        os.makedirs(self._folder, 0o700, exist_ok=True)
        self._held: list[int] = []
        self.first = self._take(count)

    def _take(self, count: int) -> int:
        for first in range(FIRST_PORT, END_PORT - count * BLOCK + 1, BLOCK):
            if self._lock(range(first, first + count * BLOCK, BLOCK)):
                if all(is_free(port) for port in range(first, first + count * BLOCK)):
                    return first
                self.release()
        raise RefusedError(f"no {count * BLOCK} free ports in a row between {FIRST_PORT} and {END_PORT - 1}")

    def _lock(self, blocks: Iterable[int]) -> bool:
        for block in blocks:
            descriptor = os.open(os.path.join(self._folder, str(block)), os.O_RDWR | os.O_CREAT, 0o600)
            self._held.append(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                return False
        return True

    def release(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held = []


def is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
                probe.listen(1)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                return False
    return True


# --- the processes below us ----------------------------------------------------------------------------------------


def descendants() -> dict[int, tuple[str, str]]:
    """By pid, the name and the state of every process below this one, also of those that left their session."""
    found: dict[int, tuple[int, str, str]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    text = file.read()
            except OSError:
                continue
            command, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
            found[int(name)] = (int(rest[1]), command, rest[0])
    below: dict[int, tuple[str, str]] = {}
    parents = {os.getpid()}
    while parents:
        parents = {pid for pid, (parent, _, _) in found.items() if parent in parents and pid not in below}
        below |= {pid: found[pid][1:] for pid in parents}
    return {pid: one for pid, one in below.items() if one[1] != "Z"}


def adopt_orphans() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


def end_all(grace_s: float) -> None:
    """Returns when no process below this one is left."""
    began, told = time.monotonic(), set[int]()
    while living := descendants():
        is_late = time.monotonic() - began > grace_s
        for pid in living:
            if is_late or pid not in told:
                _signal(pid, signal.SIGKILL if is_late else signal.SIGTERM)
                _signal(pid, signal.SIGCONT)
                told.add(pid)
        _reap()
        time.sleep(0.05)
    _reap()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def say(text: str) -> None:
    os.write(1, f"ugro: {text}\n".encode())


# --- a rank --------------------------------------------------------------------------------------------------------


class Rank:
    """Starts Ray on this node and stays until it ends. ``run`` returns the exit code."""

    def __init__(self, settings: Settings, token: str) -> None:
        self.settings = settings
        self.token = token
        self.is_ending = False
        self.folder = os.path.join(base_folder(), f"{settings['id']}-{settings['number']}")
        self.token_file = os.path.join(self.folder, "token")
        self.ports = Ports(base_folder(), blocks_for(int(settings["cpus"])))
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
        os.mkdir(self.folder, 0o700)
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self.token)
        if state := self.settings.get("state"):
            os.makedirs(state, 0o700, exist_ok=True)

    def _own_address(self) -> str:
        """Where the others reach this node: the address from which it reaches the head, once that listens."""
        address, port = str(self.settings["address"]), int(self.settings["port"])
        if self.settings["role"] != "worker":
            if not is_free(port):
                raise RefusedError(f"port {port} is taken by another program")
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
                self._pause(_LOOK_S)
        return ""

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
                [sys.executable, "-u", "-m", "ray.scripts.scripts", "start", *words],
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
        while not self.is_ending:
            if is_ready and self.settings.get("is_gang") and self._head_is_gone():
                say("the driver has ended")
                return 0
            if ray.poll() is not None:
                return self._failed(f"ray start ended with exit code {ray.returncode}")
            if not is_ready and self.has_started:
                is_ready = True
                say("ready")
            if is_ready and (problem := self.problem()) is not None:
                return self._failed(problem)
            if is_ready and self.settings["role"] == "head":
                nodes.look()
            self._pause(_CALM_S if is_ready else _LOOK_S)
        say("ending")
        return 0

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
                self._pause(_LOOK_S)
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
        self._url = f"http://127.0.0.1:{settings.get('dashboard_port')}/nodes?view=summary"
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
            alive = sorted(
                str(node["raylet"]["nodeName"])
                for node in found["data"]["summary"]
                if node["raylet"].get("state") == "ALIVE"
            )
        except (OSError, ValueError, KeyError, TypeError):
            return  # it has not started yet, or is busy
        if (text := json.dumps({"alive": alive})) != self._said:
            self._said = text
            say(f"nodes {text}")


class Driver(Rank):
    """A head with a script of the user's, which ends with that script."""

    def _stay(self, ray: subprocess.Popen[bytes]) -> int:
        while not self.is_ending and not self.has_started:
            if ray.poll() is not None:
                return self._failed(f"ray start ended with exit code {ray.returncode}")
            self._pause(_LOOK_S / 5)
        address = f"{self.settings['address']}:{self.settings['port']}"
        env = {**self.environment, "RAY_ADDRESS": address, "RAY_NAMESPACE": str(self.settings.get("namespace", ""))}
        if self.is_ending or not self._gather(env, address):
            return 0 if self.is_ending else self._failed("not all nodes joined")
        driver = subprocess.Popen([sys.executable, "-u", *self.settings["argv"]], env=env)
        while driver.poll() is None and not self.is_ending:
            if (problem := self.problem()) is not None:
                return self._failed(problem)
            self._pause(_LOOK_S / 5)
        code = driver.wait(0) if driver.poll() is not None else 0
        return code if code >= 0 else 128 - code

    def _gather(self, env: Mapping[str, str], address: str) -> bool:
        """Waits until every node of the job has joined."""
        wanted = int(self.settings["nodes"])
        if wanted == 1:
            return True
        waiting = subprocess.Popen([sys.executable, "-c", _GATHER, address, str(wanted), str(_GATHER_S)], env=env)
        while waiting.poll() is None and not self.is_ending:
            self._pause(_LOOK_S / 5)
        return waiting.returncode == 0


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


def raylet_complaints(folder: str) -> list[str]:
    """The last words of Ray's own logs that say why."""
    found: list[str] = []
    for path in glob.glob(os.path.join(folder, "session_latest", "logs", "raylet.*")):
        try:
            with open(path, encoding="utf-8", errors="replace") as log:
                lines = log.read()[-8000:].splitlines()
        except OSError:
            continue
        found += [line for line in lines if " E " in line or " C " in line or "Error" in line][-5:]
    return found


# --- the machine ---------------------------------------------------------------------------------------------------


def available_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))


def shared_memory() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def look(settings: Settings) -> dict[str, Any]:
    """What is to be known of a node before anything starts on it."""
    from importlib import metadata, util

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
    }


def clean(settings: Settings) -> dict[str, Any]:
    """Removes what killed ranks of a cluster have left. Its jobs have ended."""
    for path in glob.glob(os.path.join(base_folder(), f"{settings['id']}-*")):
        remove(path)
    if settings.get("state"):
        remove(str(settings["state"]))
    return {}


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


def run_as_program(words: Sequence[str]) -> None:
    sys.exit(main())


if __name__ == "__main__":
    run_as_program(sys.argv)

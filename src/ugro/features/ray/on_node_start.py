"""What a rank runs instead of ``ray start``: the same, but for three things. It is text, since Ray's Python runs it.

- Ray gives a raylet 30 seconds to be known, and the raylet gives its agent 15 to say at which port it listens, which a
  slow or busy machine exceeds. The rank itself sees a raylet that has ended, so nobody else need hurry; and the port
  is fixed, so it is written down before the raylet looks for it.
- Somebody without the cluster's token who connects by ``ray.init("ray://…")`` gets an answer that says so. Ray's own
  client takes a refusal for a server that is not ready yet, and gives up after half a minute with a timeout.
- Each client gets a process of its own on the head. All heads of a machine would look for its port from 23000 on, and
  take one that another has just found free. It ends if nobody asks it for half a minute, while gRPC pauses for longer
  and longer between its attempts to reach it.

Where a Ray has other parts than the one that this was written for, it runs as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
from collections.abc import Mapping
from typing import Any

from ugro.node.process.processes import is_free

# --- rules ------------------------------------------------------------------------------------------------------------
# What a rank of Ray gets: the words of ``ray start``, its environment, memory and ports. Settings in, command out.


Settings = Mapping[str, Any]

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
_CLIENT, _DASHBOARD_METRICS, _AUTOSCALER_METRICS, _DASHBOARD = 8, 9, 10, 11  # places in a block
LEAST_STORE = 80 << 20  # Ray accepts no less than 75 MiB
_HEAD_MEMORY = 256 << 20  # of a head that runs no tasks
PATIENCE_S = 300
# A slow or busy machine may need longer for a start than Ray waits by itself; it would then end all of it.
_PATIENCE = {
    "RAY_agent_register_timeout_ms": str(PATIENCE_S * 1000),
    "RAY_gcs_server_port_wait_time_s": str(PATIENCE_S),
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(PATIENCE_S),
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": str(PATIENCE_S),  # of the process that each client gets
}
_STALE = ("RAY_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_AUTH_TOKEN", "RAY_NODE_IP_ADDRESS")


class RefusedError(Exception):
    """Why it cannot run here, in words; trying again does not help."""


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
    # Also of a worker, which uses neither: Ray compares all ports, and the defaults may be in this block.
    words += [f"--ray-client-server-port={settings.get('client_port') or first_port + _CLIENT}"]
    words += [f"--dashboard-port={settings.get('dashboard_port') or first_port + _DASHBOARD}"]
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
    ]


def environment(settings: Settings, inherited: Mapping[str, str], first_port: int, token_file: str) -> dict[str, str]:
    """Of Ray and of the driver."""
    env = dict(_PATIENCE)
    env |= {name: value for name, value in inherited.items() if name not in _STALE and name != "UGRO_RAY"}
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


# --- machine ----------------------------------------------------------------------------------------------------------
# The node: private folders, blocks of free ports, the processes below this one, memory.


# Beyond the ports of Ray Client, below what UGRO reserves for rendezvous and what the kernel gives out.
FIRST_PORT, END_PORT = 10_112, 15_000


# --- folders and ports ---------------------------------------------------------------------------------------------


def base_folder() -> str:
    """Short, because the path of a socket has at most 107 bytes."""
    return f"/tmp/ugro-ray-{os.getuid()}"


def make_folder(path: str) -> None:
    """In the base folder, which nobody else may have made. Another rank that ends may remove that, if it is empty."""
    base = base_folder()
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(base, 0o700)
        try:
            found = os.lstat(base)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise RefusedError(f"{base} is not a private folder of this user; remove it")
            os.mkdir(path, 0o700)
            return
        except FileNotFoundError:
            continue


class Ports:
    """Consecutive blocks of free ports, kept from other ranks on this machine while this process lives.

    By names of sockets without files: like ports, each is there once in a network, and goes with its process.
    """

    def __init__(self, count: int) -> None:
        self._held: list[socket.socket] = []
        self.first = self._take(count)

    def _take(self, count: int) -> int:
        for first in range(FIRST_PORT, END_PORT - count * BLOCK + 1, BLOCK):
            if all(self._claim(block) for block in range(first, first + count * BLOCK, BLOCK)) and all(
                is_free(port) for port in range(first, first + count * BLOCK)
            ):
                return first
            self.release()
        raise RefusedError(f"no {count * BLOCK} free ports in a row between {FIRST_PORT} and {END_PORT - 1}")

    def _claim(self, block: int) -> bool:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._held.append(name)
        try:
            name.bind(f"\0ugro-ray-ports-{block}")
        except OSError:
            return False
        return True

    def release(self) -> None:
        for name in self._held:
            name.close()
        self._held = []


# --- memory and files ----------------------------------------------------------------------------------------------


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
    """With the base folder, if nothing is left in that."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(base_folder())


# --- start ------------------------------------------------------------------------------------------------------------


REFUSAL = (
    'this Ray cluster wants its token: run eval "$(ugro cluster env)" in the shell that starts the program, or give it '
    "RAY_AUTH_MODE=token and a file with the token as RAY_AUTH_TOKEN_PATH"
)
_START, _CLIENT_SERVER = "start.py", "client_server.py"
_FIRST_CLIENT, _CLIENTS, _BLOCKS = 23_000, 250, 39  # up to where the kernel gives out ports
_STARTING = f"""
import inspect, os, sys, time
import ray
from ray._private import services
from ray.scripts.scripts import main

def patient(find):
    def found(*words, **more):
        end = time.monotonic() + {PATIENCE_S}
        while True:
            try:
                return find(*words, **more)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.1)
    return found

def telling(start):
    def started(command, *words, **more):
        module = "ray.util.client.server"
        if module in command and "--mode=proxy" in command:
            ours = os.path.join(os.path.dirname(os.path.abspath(__file__)), "{_CLIENT_SERVER}")
            command = [command[0], ours, *command[command.index(module) + 1:]]
        return start(command, *words, **more)
    return started

def foretelling(start):
    def started(*words, **more):
        try:
            from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port
            given = inspect.signature(start).bind(*words, **more).arguments
            port = given["dashboard_agent_listen_port"]
            persist_port(given["session_dir"], given["node_id"], DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        except (ImportError, KeyError, TypeError, OSError) as error:
            print("the raylet waits for its agent's port:", error)
        return start(*words, **more)
    return started

for name, wrap in (("get_node", patient), ("start_raylet", foretelling), ("start_ray_process", telling)):
    if hasattr(services, name):
        setattr(services, name, wrap(getattr(services, name)))
sys.argv[0] = "ray"
main()
"""

# Without a token, the first two calls of Ray's client are answered: a greeting with nothing in it, and the refusal.
_SERVING = f"""
import runpy, sys, threading
import ray  # before grpc, for which it chooses settings

def tell():
    import grpc
    from ray._private.authentication import grpc_authentication_server_interceptor as guard
    from ray.core.generated import ray_client_pb2 as messages

    is_known = guard._authenticate_request

    def greet(request, context):
        return messages.ClusterInfoResponse(json="{{}}")

    places = threading.Semaphore(16)  # of the server's 100 threads: a stranger may say nothing

    def refuse(requests, context):
        if not places.acquire(blocking=False):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, {REFUSAL!r})
        late = threading.Timer(30.0, context.cancel)
        try:
            late.start()
            # Until the client ends it: one whose stream ends first forgets what it was told.
            for request in requests:
                if request.WhichOneof("type") == "init":
                    no = messages.InitResponse(ok=False, msg={REFUSAL!r})
                    yield messages.DataResponse(req_id=request.req_id, init=no)
        finally:
            late.cancel()
            places.release()

    answers = {{
        "/ray.rpc.RayletDriver/ClusterInfo": (grpc.unary_unary_rpc_method_handler, greet),
        "/ray.rpc.RayletDataStreamer/Datapath": (grpc.stream_stream_rpc_method_handler, refuse),
    }}

    class Telling(guard.SyncAuthenticationServerInterceptor):
        def intercept_service(self, continuation, details):
            if details.method not in answers or is_known(details.invocation_metadata):
                return super().intercept_service(continuation, details)
            make, answer = answers[details.method]
            known = continuation(details)
            return make(answer, known.request_deserializer, known.response_serializer)

    guard.SyncAuthenticationServerInterceptor = Telling

def prepare_clients():
    from ray.util.client.server import proxier

    own = next(int(word[7:]) for word in sys.argv if word.startswith("--port="))
    proxier.MIN_SPECIFIC_SERVER_PORT = {_FIRST_CLIENT} + own % {_BLOCKS} * {_CLIENTS}
    proxier.MAX_SPECIFIC_SERVER_PORT = proxier.MIN_SPECIFIC_SERVER_PORT + {_CLIENTS}
    proxier.GRPC_OPTIONS = [*proxier.GRPC_OPTIONS, ("grpc.max_reconnect_backoff_ms", 2000)]

prepare_clients()
try:
    tell()
except (ImportError, AttributeError) as error:
    print("clients without the token get no reason:", error)
runpy.run_module("ray.util.client.server", run_name="__main__")
"""


def write_programs(folder: str) -> str:
    """Returns the path of the program that takes the words of ``ray start``."""
    for name, text in ((_START, _STARTING), (_CLIENT_SERVER, _SERVING)):
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)
    return os.path.join(folder, _START)

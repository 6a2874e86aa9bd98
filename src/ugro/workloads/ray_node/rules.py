"""What a rank of Ray gets: the words of ``ray start``, its environment, memory and ports. Settings in, command out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

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

"""One short visit to the cluster: deploys an application, or deletes it. It is Ray's driver, and ends with the visit.

Applications outlive it: Serve's controller keeps them. What it has done it says in lines of JSON on its stdout.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

IMPORTED, PROXY = "imported", "proxy"  # keys of its lines
FIRST_PORT, END_PORT = 8100, 8700  # of Serve's proxy, on the head's loopback
_LOCK_S = 120.0
_NAMESPACE = "serve"
_MOST_LINES = 12


def main(argv: Sequence[str]) -> int:
    """``deploy NAME MODULE:APP`` or ``delete NAME``."""
    verb, name, *rest = argv
    return _deploy(name, rest[0]) if verb == "deploy" else _delete(name)


def claim_of(name: str) -> socket.socket | None:
    """Says on this machine that the program of an application lives, as long as it is open. None: it is claimed."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0ugro-ray-serve-{name}")
    except OSError:
        claim.close()
        return None
    return claim


def _deploy(name: str, application: str) -> int:
    target = _imported(application)
    _say({IMPORTED: application})
    import ray
    from ray import serve

    _connect(ray)
    with _alone():
        port = _proxy_port()
    _delete_orphans(serve, name)
    if not _is_running(serve, name):
        try:
            serve.run(target, name=name, route_prefix=f"/{name}")
        except (ray.exceptions.RayError, RuntimeError, ValueError, OSError) as error:
            sys.stderr.write("\n".join([*_why(serve, name), *str(error).splitlines()[-_MOST_LINES:]]) + "\n")
            serve.delete(name)  # the next start deploys it again
            return 1
    _say({PROXY: port})
    return 0


def _delete(name: str) -> int:
    import ray
    from ray import serve

    _connect(ray)
    if name in serve.status().applications:
        serve.delete(name)  # waits for requests that it has
    _delete_orphans(serve, name)
    return 0


def _imported(text: str) -> Any:
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), name or "app")
    from ray.serve import Application

    return found if isinstance(found, Application) or not callable(found) else found()


def _connect(ray: Any) -> None:
    """Its modules travel to all nodes of the cluster with the working directory."""
    code = {"working_dir": os.getcwd()}
    ray.init(
        address=os.environ["RAY_ADDRESS"],
        namespace=_NAMESPACE,
        runtime_env=code,
        log_to_driver=False,
        logging_level="warning",
    )


def _proxy_port() -> int:
    """Of Serve's proxy. One that somebody has started already keeps its options."""
    from ray import serve
    from ray.serve.context import _get_global_client

    if (client := _get_global_client(raise_if_no_controller_running=False)) is None:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": _free_port()})
        client = _get_global_client()
    return int(client.http_config.port)


def _free_port() -> int:
    for port in range(FIRST_PORT, END_PORT):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port is free between {FIRST_PORT} and {END_PORT - 1}")


def _is_running(serve: Any, name: str) -> bool:
    """Each replica has a name of its own: what runs under it is what was deployed by the same command."""
    found = serve.status().applications.get(name)
    return found is not None and str(found.status.value) == "RUNNING"


def _delete_orphans(serve: Any, name: str) -> None:
    """Applications of the same service whose programs were killed; they were all on this machine."""
    family = name.rpartition("-")[0]
    for other in serve.status().applications:
        if other != name and other.rpartition("-")[0] == family and (claim := claim_of(other)) is not None:
            serve.delete(other)
            claim.close()


def _why(serve: Any, name: str) -> list[str]:
    found = serve.status().applications.get(name)
    messages = [one.message for one in found.deployments.values()] if found is not None else []
    return [line for message in messages for line in message.splitlines()[-_MOST_LINES:]]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Two that start Serve at once would choose two ports."""
    deadline = time.monotonic() + _LOCK_S
    while (claim := claim_of(f"start-{os.environ['RAY_ADDRESS']}")) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"another start of Ray Serve did not end within {_LOCK_S:g} s")
        time.sleep(0.1)
    try:
        yield
    finally:
        claim.close()


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

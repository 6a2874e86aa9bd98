"""Runs a Ray Serve application as a replica: ``python -m ugro.inference.ray_app module:app``.

It runs on a Ray of its own on this node, and stays until SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from ugro.core.errors import UgroError
from ugro.inference.main import LASTING

HEALTH = "/-/healthz"  # of Serve's proxy


def main(argv: Sequence[str]) -> int:
    given = _parser().parse_args(argv)
    try:
        if importlib.util.find_spec("ray") is None or importlib.util.find_spec("grpc_reflection") is None:
            raise UgroError("this Python lacks Ray Serve", hint='--package "ray[serve]"')
        return _run(given)
    except UgroError as error:
        sys.stderr.write(f"error: {error}\n" + (f"hint:  {error.hint}\n" if error.hint else ""))
        return LASTING


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ugro.inference.ray_app", description=__doc__)
    parser.add_argument("application", metavar="MODULE:APP", help="a bound deployment, or a function that returns one")
    parser.add_argument("--host", default=os.environ.get("UGRO_HOST") or "127.0.0.1")
    parser.add_argument("--port", type=int, default=os.environ.get("UGRO_PORT") or 8000)
    parser.add_argument("--name", default=os.environ.get("UGRO_SERVICE") or "ugro", help="of the application in Serve")
    return parser


def _run(given: argparse.Namespace) -> int:
    import ray
    from ray import serve

    application = _application(given.application)
    # Serve's own processes take cores of Ray's account, but hardly any time.
    ray.init("local", namespace="serve", include_dashboard=False, num_cpus=max(4, len(os.sched_getaffinity(0))))
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray has put its own handlers there, which abort
        signal.signal(number, lambda *_: ending.set())
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": given.host, "port": given.port})
        serve.run(application, name=given.name, route_prefix="/")
    except (ray.exceptions.RayError, RuntimeError, OSError) as error:  # may be other at the next start
        text = str(error).strip().splitlines() or [type(error).__name__]
        sys.stderr.write(f"error: Ray Serve did not start {given.application}: {text[0]}\n")
        return 1
    sys.stderr.write(f"{given.application} is ready at {given.host}:{given.port}\n")
    ending.wait()
    serve.delete(given.name)  # waits for requests that it has
    serve.shutdown()
    ray.shutdown()
    return 0


def _application(text: str) -> Any:
    module_name, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), name or "app")
    except (ImportError, AttributeError) as error:
        raise UgroError(f"{text}: {error}", hint="MODULE:APP, with the module in the working directory") from error
    return found() if callable(found) else found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

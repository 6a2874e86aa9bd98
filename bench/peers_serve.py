"""Ray Serve with three deployments' worth of unequal replicas behind its own proxy, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from urllib.error import URLError
from urllib.request import urlopen

from tests.rig.ports import free_port
from tests.rig.waiting import end_all_with_variable

_MARK = "UGRO_BENCH_SERVE"
_START_S = 300.0
# One deployment whose replicas take numbers, and so times, in turn: as many as there are times. Each computes one
# request at a time and lets others wait inside, as the doors' replicas do; how many is Serve's default. With
# max_ongoing_requests=1, where the others wait in the proxy, it did not keep up.
_PROGRAM = """
import asyncio, json, sys, time
import ray
from ray import serve

times, port = json.loads(sys.argv[1]), int(sys.argv[2])

@ray.remote(num_cpus=0)
class Numbers:
    def __init__(self):
        self.given = 0
    def next(self):
        self.given += 1
        return self.given - 1

@serve.deployment(
    num_replicas=len(times), ray_actor_options={"num_cpus": 0.1}, health_check_period_s=10
)
class Replica:
    def __init__(self, numbers):
        self.name, self.seconds = times[ray.get(numbers.next.remote()) % len(times)]
        self.turn = asyncio.Lock()
    async def __call__(self, request):
        async with self.turn:
            await asyncio.sleep(self.seconds)
        return {"name": self.name}

ray.init(num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(Replica.bind(Numbers.remote()))
while True:
    time.sleep(3600)
"""


def missing_ray_serve() -> str | None:
    done = subprocess.run([sys.executable, "-c", "from ray import serve"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


class RayServe:
    name = "Ray Serve, its own proxy"

    def __init__(self, times_s: Mapping[str, float]) -> None:
        self.port = free_port()
        self._argv = [sys.executable, "-c", _PROGRAM, json.dumps(list(times_s.items())), str(self.port)]

    def __enter__(self) -> RayServe:
        env = {**os.environ, _MARK: str(self.port), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(self._argv, env=env, stdout=subprocess.DEVNULL, stderr=self._said)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._said.seek(0)
                said = self._said.read().decode(errors="replace").strip().splitlines()[-1:]
                self.__exit__()
                raise TimeoutError(f"Ray Serve did not start: {' '.join(said)}")
            time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._said.close()
        end_all_with_variable(_MARK, [str(self.port)])

    def _answers(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

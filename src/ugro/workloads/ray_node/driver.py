"""A head with a script of the user's as its driver: the first rank of ``ugro launch --launcher ray``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from ugro.workloads.ray_node.rank import LOOK_S, Rank
from ugro.workloads.ray_node.rules import PATIENCE_S

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

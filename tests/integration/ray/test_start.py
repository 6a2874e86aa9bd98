"""A Ray whose programs need long to start, as on a slow or busy machine: they are waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.rig.ports import free_port
from tests.rig.ray import LIMIT_S, run_driver
from tests.rig.waiting import descendants, name_of, wait_until, wait_until_dead
from ugro.features.ray.on_node_start import environment, start_words, write_programs

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]

_SLOW_S = 20.0  # a raylet itself waits for 15
_SLOW_CLIENT_S = 75.0  # Ray itself waits for 30; gRPC would try again 45 s later
SLOW = f"""
import sys, time
if any("dashboard/agent.py" in word for word in sys.orig_argv):
    time.sleep({_SLOW_S})
if sys.orig_argv[1:2] == ["-m"] and "--mode=specific-server" in sys.orig_argv:
    time.sleep({_SLOW_CLIENT_S})
"""
ASKS = """
import sys, ray
ray.init(sys.argv[1])
print("nodes:", len(ray.nodes()))
"""


def test_a_ray_whose_programs_take_longer_than_it_waits_is_started_all_the_same(tmp_path: Path) -> None:
    folder = Path(f"/tmp/s{os.getpid()}")  # the path of a socket is short
    folder.mkdir(mode=0o700)
    token, log = tmp_path / "token", tmp_path / "start.log"
    token.write_text("0123456789abcdef" * 4)
    client_port = free_port()
    settings = {"role": "head", "title": "slow", "cpus": 0, "address": "127.0.0.2", "port": free_port()}
    settings |= {"client_port": client_port, "dashboard_port": free_port()}
    words = start_words(settings, 14_000, "127.0.0.2", str(folder), (256 << 20, 80 << 20))
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    inherited = {**os.environ, "PYTHONPATH": str(tmp_path)}
    env = environment(settings, inherited, 14_000, str(token))
    with log.open("wb") as out:
        program = write_programs(str(folder))
        ray = subprocess.Popen([sys.executable, "-u", program, "start", *words], env=env, stdout=out, stderr=out)
    try:
        wait_until(lambda: "Ray runtime started." in log.read_text() or ray.poll() is not None, LIMIT_S, "Ray")
        began = time.monotonic()
        wait_until(lambda: ray.poll() is not None or time.monotonic() - began > _SLOW_S, LIMIT_S, "the agent")
        assert ray.poll() is None, log.read_text()
        assert [name_of(pid) for pid in descendants([ray.pid])].count("raylet") == 1, log.read_text()
        known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        asked = run_driver(known, ASKS, f"ray://127.0.0.2:{client_port}")
        assert asked.stdout.endswith("nodes: 1\n"), asked.stdout + asked.stderr
        logs = {path.name for path in folder.rglob("ray_client_server_*.err") if not path.parent.is_symlink()}
        own = 23_000 + client_port % 39 * 250
        assert logs == {f"ray_client_server_{own}.err"}, "another head on this machine looks elsewhere"
    finally:
        below = descendants([ray.pid])
        ray.terminate()
        ray.wait(60)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until_dead(below)
        subprocess.run(["rm", "-rf", str(folder)], check=True)


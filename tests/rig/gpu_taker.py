"""A process that takes GPUs as a supervisor does, in an account and a home of its own, until it is told to end."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ugro.kernel.links.transport import program_files
from ugro.node.hardware.gpu_locks import Sharing

_SCRIPT = """
import json, os, sys
from ugro.node.hardware import gpu_claims, gpu_locks
from ugro.node.hardware.gpus import sampling
from ugro.features.power.node.presence import GpuUsers
from ugro.node.program import Refused

locks = gpu_locks.GpuLocks()

def take(uuid, record, share=None):
    device = gpu_locks.Device(0, uuid)
    try:
        locks.take([device], os.environ["HOME"], record, share and gpu_locks.Sharing(*share))
    except Refused as refusal:
        return str(refusal)
    return None

def release():
    locks.release(is_over=True)

def holder(uuid):
    claims = gpu_claims.ClaimTable()
    claims.look()
    return gpu_locks.Holders(os.environ["HOME"], claims).of(uuid)

def users():
    "Who seems to use the GPUs, at the second look."
    seen = GpuUsers(sampling(gpu_claims.ClaimTable()))
    seen.look()
    sign = seen.look()
    return sign and sign.text

def processes():
    return [one for gpu in sampling(gpu_claims.ClaimTable())()["gpus"] for one in gpu["processes"]]

def child():
    pid = os.fork()
    if pid == 0:
        os.execv("/bin/sleep", ["sleep", "600"])
    return pid

for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(globals()[name](*arguments)), flush=True)
"""


class Taker:
    def __init__(self, home: Path, uid: int, driver: str) -> None:
        """``home`` is one of the folders of ``takers``."""
        self.uid = uid
        self.home = home
        variables = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(home.parent)}
        gpus = {"UGRO_NVML_LIBRARY": driver, "UGRO_PRETEND_GPUS": os.environ.get("UGRO_PRETEND_GPUS", "/nowhere")}
        as_user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid != os.geteuid() else []
        self.process = subprocess.Popen(
            [*as_user, "/usr/bin/python3", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**variables, **gpus},
        )
        self.pid = self.process.pid
        self.agent = "0" * 32

    def ask(self, name: str, *arguments: Any) -> Any:
        self.say(name, *arguments)
        return self.hear()

    def say(self, name: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def take(self, uuid: str, job: str = "7", share: Sharing | None = None) -> str | None:
        """Why it was refused."""
        self.begin_to_take(uuid, job, share)
        refusal: str | None = self.hear()
        return refusal

    def begin_to_take(self, uuid: str, job: str = "7", share: Sharing | None = None) -> None:
        record = {"agent": self.agent, "node": "gpu1", "job": job, "attempt": 1, "user": "u", "mark": "NO=mark"}
        self.say("take", uuid, record, share)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def takers(driver: str, *uids: int) -> Iterator[list[Taker]]:
    """Each has a home of its own, into which no other account can look."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        _copy_modules(Path(folder))
        found: list[Taker] = []
        try:
            for number, uid in enumerate(uids):
                home = Path(folder, str(number))
                home.mkdir(mode=0o700)
                if os.geteuid() == 0:
                    os.chown(home, uid, uid)
                found.append(Taker(home, uid, driver))
                found[-1].agent = f"{number:032x}"
            yield found
        finally:
            for one in found:
                one.end()


def _copy_modules(folder: Path) -> None:
    """Other accounts may not be able to read the ones that are tested."""
    for name, content in program_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for path in (folder / "ugro").rglob("*"):
        path.chmod(0o755)

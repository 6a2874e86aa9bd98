"""A real ZooKeeper server, as Debian packages it: one process, its own folder, a port that the system gives out."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.rig.sshd import SYSTEM_PATH
from tests.rig.waiting import wait_until

_JARS = Path("/usr/share/java")
_NEEDED = ("zookeeper", "slf4j-api", "netty-all", "netty-handler", "snappy-java", "metrics-core")
_START_S = 60


def available() -> str | None:
    """Why there can be no server here; None when there can."""
    if shutil.which("java", path=SYSTEM_PATH) is None:
        return "java is not installed"
    return None if (_JARS / "zookeeper.jar").exists() else "not installed: zookeeper"


class ZooKeeperServer:
    """``with ZooKeeperServer(folder) as server``: it answers when the block begins, and is gone after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Kept, bound and never listening, so that the port stays ours while the server is stopped.
        self._reservation = socket.socket()
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("127.0.0.1", 0))
        self.port = int(self._reservation.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[Any] = []

    @property
    def hosts(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            with suppress(Exception):
                client.stop()
                client.close()
        self.kill()
        self._reservation.close()

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        config = self.folder / "zoo.cfg"
        config.write_text(
            f"tickTime=200\ndataDir={self.folder / 'data'}\nclientPort={self.port}\nclientPortAddress=127.0.0.1\n"
            "admin.enableServer=false\nmaxClientCnxns=0\n"
        )
        jars = ":".join(str(_JARS / f"{name}.jar") for name in _NEEDED if (_JARS / f"{name}.jar").exists())
        options = ["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        argv = ["java", *options, "-cp", jars, "org.apache.zookeeper.server.ZooKeeperServerMain", str(config)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._answers_or_died, _START_S, "ZooKeeper to listen")
        assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def client(self) -> Any:
        """A session of its own, which ends with the server at the latest."""
        from kazoo.client import KazooClient

        client = KazooClient(hosts=self.hosts, timeout=2)
        client.start(20)
        self._clients.append(client)
        return client

    def register(self, name: str, fields: Mapping[str, object], folder: str = "/ugro/nodes") -> Any:
        """As a machine registers itself: an entry that goes with its session, which is returned."""
        client = self.client()
        client.create(f"{folder}/{name}", json.dumps(fields).encode(), ephemeral=True, makepath=True)
        return client

    def _answers_or_died(self) -> bool:
        assert self._process is not None
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return self._process.poll() is not None

"""What integration tests share: farms of real sshds, a state directory of their own, and the command line.

After each test the agent is stopped, and nothing that it started may be left: no agent, ssh, node program or guard.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.rig import netns
from tests.rig.netns import NetnsFarm
from tests.rig.sshd import Farm, SshdFarm
from tests.rig.waiting import end_all_with_variable, processes_with_variable, wait_until

FarmT = TypeVar("FarmT", bound=Farm[Any])
Completed = subprocess.CompletedProcess[str]
_STOP_TIMEOUT_S = 30
_END_TIMEOUT_S = 20


class Farms:
    """Starts farms on demand; all are closed together."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.all: list[Farm[Any]] = []

    def __call__(self, count: int, **options: Any) -> SshdFarm:
        return self._add(SshdFarm(self._directory(), count, **options))

    def with_cables(self, count: int, **options: Any) -> NetnsFarm:
        """Nodes whose cable can be cut; skips where there can be none."""
        if (reason := netns.available()) is not None:
            pytest.skip(reason)
        return self._add(NetnsFarm(self._directory(), count, **options))

    def processes(self) -> list[int]:
        """What runs on the nodes of all farms."""
        return [pid for farm in self.all for node in farm.nodes for pid in node.processes()]

    def _add(self, farm: FarmT) -> FarmT:
        self.all.append(farm)
        self._stack.enter_context(farm)
        return farm

    def _directory(self) -> Path:
        directory = tempfile.mkdtemp(prefix="f")
        self._stack.callback(shutil.rmtree, directory, ignore_errors=True)
        return Path(directory)


class Ugro:
    """The command line, as a user has it: a process of its own for each call."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.cluster: Path | None = None  # the cluster file to use, as UGRO_CLUSTER would name it

    def __call__(
        self, *args: str, timeout: float = 60, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Completed:
        return subprocess.run(
            self.argv(*args),
            env=self.environment(env),
            cwd=cwd or self.home / "cwd",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Started and not waited for; its output is piped. The test ends it."""
        return subprocess.Popen(
            self.argv(*args),
            env=self.environment(env),
            cwd=self.home / "cwd",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def argv(self, *args: str) -> Sequence[str]:
        return [str(Path(sys.executable).with_name("ugro")), *args]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("UGRO_", "SSH_"))}
        ours = {"UGRO_HOME": str(self.home), "HOME": str(self.home / "user")}
        if self.cluster is not None:
            ours["UGRO_CLUSTER"] = str(self.cluster)
        return {**kept, **ours, **(extra or {})}

    def processes(self) -> list[int]:
        """The agent, its ssh processes, and the node programs on this machine."""
        return processes_with_variable("UGRO_HOME", [str(self.home)])


@pytest.fixture
def farm_of() -> Iterator[Farms]:
    """``farm_of(count, **options)`` starts an ``SshdFarm``."""
    with ExitStack() as stack:
        yield Farms(stack)


@pytest.fixture
def ugro_home() -> Iterator[Path]:
    # Short: a socket lives in it. The user's own home is not touched, also by nodes that are this machine.
    home = Path(tempfile.mkdtemp(prefix="u"))
    for folder in ("cwd", "user"):
        (home / folder).mkdir()
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def ugro(ugro_home: Path, farm_of: Farms) -> Iterator[Ugro]:
    command = Ugro(ugro_home)
    yield command
    try:
        stopped = command("agent", "stop", timeout=_STOP_TIMEOUT_S)
        if (log := ugro_home / "agent.log").exists():
            sys.stdout.write(log.read_text()[-10_000:])  # shown by pytest when the test failed
        assert stopped.returncode == 0, stopped.stderr
        _expect_nothing_left(lambda: [*command.processes(), *farm_of.processes()])
    finally:
        end_all_with_variable("UGRO_HOME", [str(ugro_home)])


@pytest.fixture
def cluster(farm_of: Farms, ugro: Ugro) -> SshdFarm:
    """Three plain nodes, which the command line uses."""
    farm = farm_of(3)
    ugro.cluster = farm.cluster_yaml()
    return farm


def _expect_nothing_left(processes: Callable[[], list[int]]) -> None:
    def left() -> list[str]:
        return [text for pid in processes() if (text := _command_line(pid))]

    wait_until(lambda: not left(), _END_TIMEOUT_S, f"everything the agent started to end: {left()}")


def _command_line(pid: int) -> str:
    """Empty when it has ended meanwhile, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""

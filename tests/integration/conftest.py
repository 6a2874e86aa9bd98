"""What integration tests share: farms of real sshds, a state directory of their own, and the command line.

After each test the agent is stopped, and nothing that it started may be left: no agent, ssh, node program or guard.
"""

from __future__ import annotations

import asyncio
import functools
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from tests.rig import accounts as accounts_rig
from tests.rig import inside, netns
from tests.rig.accounts import AccountsFarm
from tests.rig.browser import browser, context, dashboard, page, visitor  # noqa: F401  # fixtures
from tests.rig.engines import engine  # noqa: F401  # a fixture
from tests.rig.ledger import Ledger
from tests.rig.netns import NetnsFarm
from tests.rig.nodeprogram import LocalNode
from tests.rig.sshd import Farm, SshdFarm, SshdNode
from tests.rig.waiting import (
    descendants,
    end_all_with_variable,
    processes_with_variable,
    wait_until,
    wait_until_dead,
)
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.node import Dialling, Node
from ugro.kernel.links.transport import LOCAL_COMMAND, SshOptions, first_lines, node_program
from ugro.node import wire

P = ParamSpec("P")
FarmT = TypeVar("FarmT", bound=Farm[Any])
Completed = subprocess.CompletedProcess[str]
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

    def with_accounts(self, *accounts: Sequence[str]) -> AccountsFarm:
        """A node for each list of people who can log in there; skips where there can be none."""
        if (reason := accounts_rig.available()) is not None:
            pytest.skip(reason)
        return self._add(AccountsFarm(self._directory(), accounts))

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


class InProcess(Ugro):
    """Answers a call without a process for it. ``start`` makes one, and so does the agent's first start."""

    def __call__(
        self, *args: str, timeout: float = 60, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Completed:
        return inside.call(args, self.environment(env), cwd or self.home / "cwd")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """What the ranks of a test write of themselves; whatever of them is left is ended."""
    book = Ledger(tmp_path)
    yield book
    book.end_all()


@pytest.fixture
def node(tmp_path: Path, ledger: Ledger) -> Iterator[LocalNode]:
    """This machine as a node, without an agent; the ledger is judged at the end."""
    (tmp_path / "root").mkdir()
    local = LocalNode(tmp_path / "root")
    try:
        yield local
        ledger.judge()
    finally:
        local.close()


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
        stopped = InProcess(command.home)("agent", "stop")
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


def in_loop(scenario: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Makes a test of a coroutine."""

    @functools.wraps(scenario)
    def test(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(scenario(*args, **kwargs))

    return test


async def until(predicate: Callable[[], object], timeout_s: float, what: str) -> None:
    """As ``wait_until``, for what happens in this loop."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not (seen := predicate()):
        assert asyncio.get_running_loop().time() < deadline, f"waited {timeout_s:g} s for {what}; last seen: {seen!r}"
        await asyncio.sleep(0.02)


def spec_of(node: SshdNode, **fields: Any) -> NodeSpec:
    return NodeSpec(node.name, **{"remote_root": str(node.home / "grid_workspace"), **fields})


async def open_link(
    spec: NodeSpec, farm: Farm[Any] | None = None, *, ssh_config: Path | None = None, timeout_s: float = 20
) -> Link:
    config_file = ssh_config or (farm.ssh_config if farm else None)
    options = SshOptions(5.0, config_file=str(config_file) if config_file else None)
    return await Link.open(spec, options, timeout_s=timeout_s, env=dict(os.environ))


@asynccontextmanager
async def link_to(farm: Farm[Any], node: SshdNode, **fields: Any) -> AsyncIterator[Link]:
    """An open link, closed together with its process."""
    link = await open_link(spec_of(node, **fields), farm)
    try:
        yield link
    finally:
        link.close()
        await link.wait_closed()


@asynccontextmanager
async def kept_nodes(
    farm: Farm[Any], *specs: NodeSpec, pool_size: int = 10, connect_timeout_s: float = 5.0
) -> AsyncIterator[list[Node]]:
    """Nodes as an agent keeps them: dialled at once, and again whenever their link is lost."""
    options = SshOptions(connect_timeout_s, config_file=str(farm.ssh_config))
    dialling = Dialling(options, 3, asyncio.Semaphore(pool_size), dict)
    nodes = [Node(spec, dialling) for spec in specs or [spec_of(node) for node in farm.nodes]]
    try:
        yield nodes
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


async def run_command(link: Link, *argv: str, **params: Any) -> tuple[dict[str, Any], bytes]:
    """How a command ended, and its output, both streams together."""
    stream = link.stream("exec", {"argv": argv, "marker": "test", **params})
    output = b"".join([payload async for _, payload in stream])
    return await stream.result(), output


class RawProgram:
    """A node program on this machine, and nobody but the test to talk to it."""

    def __init__(self, root: Path, silence_s: float = 30.0, env: tuple[tuple[str, str], ...] = ()) -> None:
        self.process = subprocess.Popen(LOCAL_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._decoder = wire.Decoder()
        self._frames: list[wire.Frame] = []
        self.write(first_lines(NodeSpec("here", remote_root=str(root), env=env), "nonce", silence_s))
        if (said := self._line()) == b"UGRO1 nonce want\n":
            self.write(node_program().content)
            said = self._line()
        assert said == b"UGRO1 nonce ready\n"
        assert self.frame()[:2] == (wire.RESULT, 0)

    def __enter__(self) -> RawProgram:
        return self

    def __exit__(self, *_: object) -> None:
        """It ends when its input does, and takes everything it started along."""
        started = descendants([self.process.pid])
        self._pipe(self.process.stdin).close()
        self._pipe(self.process.stdout).close()
        try:
            self.process.wait(_END_TIMEOUT_S)
            wait_until_dead(started)
        finally:
            self.process.kill()
            self.process.wait(_END_TIMEOUT_S)

    @property
    def memory_bytes(self) -> int:
        return memory_bytes(self.process.pid)

    def write(self, data: bytes) -> None:
        pipe = self._pipe(self.process.stdin)
        while data:
            data = data[pipe.write(data) :]

    def call(self, number: int, method: object, params: object) -> None:
        self.write(wire.message(wire.CALL, number, {"method": method, "params": params}))

    def frame(self, timeout_s: float = 10) -> wire.Frame:
        """The next one; an ``EOFError`` when it has ended."""
        pipe = self._pipe(self.process.stdout)
        deadline = time.monotonic() + timeout_s
        while not self._frames:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no frame within {timeout_s:g} s"
            if not (data := pipe.read(1 << 20)):
                raise EOFError
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def frames(self) -> Iterator[wire.Frame]:
        """All, until it ends."""
        with suppress(EOFError):
            while True:
                yield self.frame()

    def _line(self) -> bytes:
        return bytes(self._pipe(self.process.stdout).readline())

    @staticmethod
    def _pipe(pipe: Any) -> Any:
        assert pipe is not None
        return pipe


def memory_bytes(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


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

"""The node's side of ``ugro doctor``, on this machine: real sockets, real files, a real node program."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.rig.ports import free_port
from tests.rig.waiting import parent_of, wait_until
from ugro.kernel.links import checks as node_checks
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.transport import SshOptions
from ugro.kernel.support.errors import Unreachable
from ugro.node import check as ports
from ugro.node import connectivity, system, wire
from ugro.node.messages import Connections

_SOON_S = 5


@contextmanager
def listening(family: socket.AddressFamily = socket.AF_INET, host: str = "127.0.0.1") -> Iterator[int]:
    with socket.socket(family) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, 0))
        listener.listen()
        yield listener.getsockname()[1]


@asynccontextmanager
async def local_link(root: Path, name: str = "here") -> AsyncIterator[Link]:
    spec = NodeSpec(name, transport="local", remote_root=str(root))
    link = await Link.open(spec, SshOptions(), timeout_s=20, env=dict(os.environ))
    try:
        yield link
    finally:
        link.close()
        await link.wait_closed()


async def port_of(link: Link) -> tuple[Any, int]:
    params = {"what": "listen", "ports": [0], "word": "hello", "reply": "world", "limit_s": 30, "timeout_s": 30}
    stream = link.stream("check", params)
    async for _, said in stream:
        return stream, int(wire.parse(said)["ports"][0])
    raise AssertionError(await stream.result())


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def connect(port: int, *addresses: str, word: str = "hello", connect_s: float = 4) -> Connections:
    target = {"node": "here", "addresses": addresses or ["127.0.0.1"], "ports": [port], "word": word, "reply": "world"}
    return connectivity.connect(targets=[target], connect_s=connect_s, settle_s=0)


def test_a_listener_is_gone_with_its_node_program(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_link(tmp_path) as link:
            _, port = await port_of(link)
            listener = ports.port_use(port).pid
            assert listener is not None
            # Alone, as the kernel might, not with the rest of its process group.
            os.kill(parent_of(listener), signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: not answers(port), _SOON_S, "the listener to be gone")

    asyncio.run(scenario())


def test_a_cancelled_listener_is_gone_and_its_node_program_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_link(tmp_path) as link:
            stream, port = await port_of(link)
            # The node program answers others while it listens.
            assert await link.call("echo", {"a": 1}, timeout_s=5) == {"a": 1}
            stream.cancel()
            await asyncio.to_thread(wait_until, lambda: not answers(port), _SOON_S, "the listener to be gone")
            assert await link.call("echo", {"a": 2}, timeout_s=5) == {"a": 2}

    asyncio.run(scenario())


def test_a_listener_believes_only_who_knows_the_word(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_link(tmp_path) as link:
            _, port = await port_of(link)
            stranger = await asyncio.to_thread(connect, port, word="wrong")
            assert stranger.reached == ()
            friend = await asyncio.to_thread(connect, port, "127.0.0.2", "127.0.0.1")
            addresses = {one.address for one in friend.reached}
            assert addresses & {"127.0.0.1", "127.0.0.2"}
            assert {one.interface for one in friend.reached} == {"lo"}
            assert 0 < friend.reached[0].connect_s < 4

    asyncio.run(scenario())


def test_a_node_that_is_lost_spares_the_other_pairs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            links = [await stack.enter_async_context(local_link(tmp_path / name, name)) for name in ("a", "b", "c")]
            endpoints = [node_checks.endpoint(link) for link in links]
            links[2].close()
            async with node_checks.mesh(links, endpoints) as nodes:
                found = await nodes.connect(settle_s=0.0)
        assert isinstance(found["c"], Unreachable)
        for one, other in (("a", "b"), ("b", "a")):
            connections = found[one]
            assert isinstance(connections, Connections)
            assert {reached.node for reached in connections.reached} == {other}

    asyncio.run(scenario())


def test_another_program_that_listens_is_not_taken_for_the_node() -> None:
    with listening() as port:
        [silent] = connect(port, connect_s=0.2).missed
    found = re.fullmatch(r"no answer within (\d+\.\d) s", silent.error)
    assert found is not None, silent.error
    assert float(found[1]) >= 0.2
    refused = connect(free_port(), "127.0.0.1", "127.0.0.2").missed
    assert [entry.error for entry in refused] == ["Connection refused"] * 2


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")]
)
def test_a_port_that_somebody_listens_on_is_taken(family: socket.AddressFamily, host: str) -> None:
    try:
        with listening(family, host) as port:
            use = ports.port_use(port)
    except OSError:
        pytest.skip("no IPv6 here")
    assert not use.is_free
    assert use.pid == os.getpid()


def test_a_port_that_somebody_has_bound_is_taken_even_where_sharing_was_allowed() -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        assert not ports.port_use(holder.getsockname()[1]).is_free


def test_a_port_with_the_remains_of_closed_connections_is_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname(), timeout=5) as caller:
            # The side that closes first keeps the remains.
            listener.accept()[0].close()
            assert caller.recv(1) == b""
        port = listener.getsockname()[1]
    with socket.socket() as naive, pytest.raises(OSError, match="in use"):
        naive.bind(("0.0.0.0", port))
    assert ports.port_use(port).is_free


def test_a_privileged_port_says_why_it_cannot_be_used() -> None:
    if os.geteuid() == 0:
        pytest.skip("root may use any port")
    assert ports.port_use(1).error == "Permission denied"


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({}, False),
        ({"etc/systemd/logind.conf": "[Login]\n#KillUserProcesses=yes\n"}, False),
        ({"etc/systemd/logind.conf": "[Login]\nKillUserProcesses=yes\n"}, True),
        ({"etc/systemd/logind.conf": "[Other]\nKillUserProcesses=yes\n"}, False),
        ({"usr/lib/systemd/logind.conf": "[Login]\nKillUserProcesses = true\n"}, True),
        (
            {
                "usr/lib/systemd/logind.conf": "[Login]\nKillUserProcesses=yes\n",
                "etc/systemd/logind.conf": "[Login]\n",
            },
            False,
        ),
        (
            {
                "etc/systemd/logind.conf": "[Login]\nKillUserProcesses=yes\n",
                "usr/lib/systemd/logind.conf.d/10-x.conf": "[Login]\nKillUserProcesses=no\n",
            },
            False,
        ),
        (
            {
                "usr/lib/systemd/logind.conf.d/10-x.conf": "[Login]\nKillUserProcesses=yes\n",
                "etc/systemd/logind.conf.d/10-x.conf": "",
            },
            False,
        ),
        ({"etc/systemd/logind.conf": "[Login]\nKillUserProcesses=yes\nKillOnlyUsers=bob\n"}, False),
    ],
)
def test_logind_is_understood_as_its_files_are_read(tmp_path: Path, files: dict[str, str], kills: bool) -> None:
    write(tmp_path / "etc/systemd/logind.conf.d/00-root.conf", "[Login]\nKillExcludeUsers=\n")
    for path, text in files.items():
        write(tmp_path / path, text)
    assert system.survival(str(tmp_path)).kills_processes is kills


def test_the_signs_of_systemd_and_of_a_lingering_user_are_seen(tmp_path: Path) -> None:
    found = system.survival(str(tmp_path))
    assert (found.has_logind, found.lingers) == (False, False)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    write(tmp_path / "var/lib/systemd/linger" / found.user)
    found = system.survival(str(tmp_path))
    assert (found.has_logind, found.lingers) == (True, True)


def test_root_is_left_alone_by_logind_unless_told_otherwise(tmp_path: Path) -> None:
    write(tmp_path / "etc/systemd/logind.conf", "[Login]\nKillUserProcesses=yes\n")
    assert system.survival(str(tmp_path)).kills_processes is (os.geteuid() != 0)


def test_the_root_is_really_written_and_left_clean(tmp_path: Path) -> None:
    found = system.root(path=str(tmp_path))
    assert found.error is None
    assert (found.free_bytes or 0) > 0
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert left == [".ugro/folder-id"]
    assert system.root(path=str(tmp_path)).folder_id == found.folder_id != ""
    assert system.filesystem_of("/dev/shm") == "tmpfs"
    assert system.root(path=str(tmp_path / "missing")).error == "No such file or directory"

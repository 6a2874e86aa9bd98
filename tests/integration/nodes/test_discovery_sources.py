"""Sources of machines for real: programs, a registry that answers as Consul's documentation says, ZooKeeper, mDNS."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.conftest import in_loop, until
from tests.rig import netns, zookeeper
from tests.rig.consul import ConsulServer, consul_server
from tests.rig.mdns import inside
from tests.rig.netns import Cable
from tests.rig.waiting import is_alive, wait_until
from tests.rig.zookeeper import ZooKeeperServer
from ugro.features.discovery.candidates import Offer, Offers, Rules, Source, SourceWatch
from ugro.features.discovery.registries import ConsulSource, ZooKeeperSource
from ugro.features.discovery.sources import CommandSource, SshConfigSource
from ugro.kernel.support.process import INHERITED

LIMIT_S = 20


@asynccontextmanager
async def watched(source: Source) -> AsyncIterator[SourceWatch]:
    watch = SourceWatch(source, Rules(), lambda: None)
    try:
        yield watch
    finally:
        await watch.close()


async def lists(watch: SourceWatch, *names: str) -> None:
    def seen() -> bool:
        return watch.is_current and {one.name for one in watch.checked.candidates} == set(names)

    await until(seen, LIMIT_S, f"{watch.source.name} to list {names}; it says {watch.state()}")


async def fails(watch: SourceWatch, text: str) -> None:
    await until(lambda: watch.error is not None and text in str(watch.error), LIMIT_S, f"the error {text!r}")


# --- programs and files --------------------------------------------------------------------------------------------


def inventory(folder: Path, text: str) -> Callable[[float], CommandSource]:
    program = folder / "inventory"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return lambda timeout_s: CommandSource(("./inventory",), folder, 0.05, timeout_s)


@in_loop
async def test_a_program_is_run_in_the_folder_of_the_file_and_what_it_prints_is_listed(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('["gpu1", "gpu2"]')
    async with watched(inventory(tmp_path, "cat list.json")(5)) as watch:
        await lists(watch, "gpu1", "gpu2")
        (tmp_path / "list.json").write_text("oops")
        await fails(watch, "its output is not JSON")
        assert len(watch.checked.candidates) == 2, "what it listed before stays"


@in_loop
async def test_a_program_that_fails_or_cannot_be_started_is_said(tmp_path: Path) -> None:
    async with watched(inventory(tmp_path, "echo no token >&2; exit 3")(5)) as watch:
        await fails(watch, "./inventory ended with exit code 3: no token")
    async with watched(CommandSource(("./missing",), tmp_path, 1, 1)) as watch:
        await fails(watch, "./missing cannot be started: no such file")


@in_loop
async def test_a_program_gets_nothing_of_the_agents_environment_but_what_every_program_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("UGRO_HOME", "/state")
    async with watched(inventory(tmp_path, "env >seen; echo '[\"gpu1\"]'")(5)) as watch:
        await lists(watch, "gpu1")
    found = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines())
    assert found.keys() <= {*INHERITED, "PWD", "OLDPWD", "SHLVL", "_"}, "and what the shell adds"
    assert (found["PATH"], found["UGRO_HOME"]) == (os.environ["PATH"], "/state")


@in_loop
async def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    async with watched(inventory(tmp_path, "sleep 600 & echo $! >child; wait")(0.3)) as watch:
        await fails(watch, "did not end within 0.3 s")
        child = int((tmp_path / "child").read_text())
        await until(lambda: not is_alive(child), LIMIT_S, "its child to end")


@in_loop
async def test_hosts_of_an_ssh_configuration_are_listed_by_pattern(tmp_path: Path) -> None:
    config = tmp_path / "config"
    async with watched(SshConfigSource(config, "gpu*", 0.05)) as watch:
        await fails(watch, "cannot be read: no such file")
        config.write_text("Host gpu1 box\nHost gpu2\n")
        watch.look_again()
        await lists(watch, "gpu1", "gpu2")
        config.write_text("Host gpu2\n")
        await lists(watch, "gpu2")


class Fragile:
    """Its library fails in a way that nobody expected, and works the next time."""

    name = "zookeeper"
    place = "zoo:2181/nodes"
    is_polled = False
    may_name_users = False

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)

    async def watch(self) -> AsyncGenerator[Offers]:
        yield [Offer("gpu1")]
        if self.failures:
            raise self.failures.pop()
        yield [Offer("gpu1"), Offer("gpu2")]
        await asyncio.Event().wait()


@in_loop
async def test_a_source_is_read_again_after_an_error_that_nobody_expected() -> None:
    said: list[str] = []
    source = Fragile(ValueError("an odd answer"))
    watch = SourceWatch(source, Rules(), lambda: said.append(str(watch.error)))
    try:
        await lists(watch, "gpu1", "gpu2")
    finally:
        await watch.close()
    assert said == ["None", "failed: ValueError: an odd answer", "None", "None"], "doctor shows it meanwhile"


@pytest.mark.proof
@in_loop
async def test_a_source_whose_library_cancels_itself_is_read_again() -> None:
    async with watched(Fragile(asyncio.CancelledError())) as watch:
        await lists(watch, "gpu1", "gpu2")


# --- Consul --------------------------------------------------------------------------------------------------------


@pytest.fixture
def consul() -> Iterator[ConsulServer]:
    with consul_server() as server:
        yield server


@in_loop
async def test_consul_tells_of_changes_while_it_is_asked(consul: ConsulServer) -> None:
    consul.register("gpu1", "10.0.0.1", 2222, "gpu", "fast")
    consul.register("web1", "10.0.0.9", 22)
    async with watched(ConsulSource(consul.url, "ssh", 5, tag="gpu")) as watch:
        await lists(watch, "gpu1")
        [one] = watch.checked.candidates
        assert (one.host, one.port, one.labels) == ("10.0.0.1", 2222, ("gpu", "fast"))
        # A blocking query waits: nothing is asked again until something has changed.
        await until(lambda: len(consul.asked) == 2, LIMIT_S, "the blocking query")
        consul.register("gpu2", "10.0.0.2", 22, "gpu")
        await lists(watch, "gpu1", "gpu2")
        consul.set_critical("gpu1")
        await lists(watch, "gpu2")
        consul.deregister("gpu2")
        await lists(watch)
        assert "index=0&" in consul.asked[0]
        assert "index=3&" in consul.asked[1], "the index of the first answer"


@pytest.mark.proof
@in_loop
async def test_an_index_that_goes_back_starts_over_and_chunks_are_read(consul: ConsulServer) -> None:
    consul.is_chunked = True
    consul.register("gpu1", "10.0.0.1", 22)
    async with watched(ConsulSource(consul.url, "ssh", 5)) as watch:
        await lists(watch, "gpu1")
        consul.restart_index()
        await until(lambda: any("index=0" in path for path in consul.asked[1:]), LIMIT_S, "a question from the start")
        consul.register("gpu2", "10.0.0.2", 22)
        await lists(watch, "gpu1", "gpu2")


@pytest.mark.proof
@in_loop
async def test_a_registry_that_fails_keeps_its_list_and_is_read_again(
    consul: ConsulServer, tmp_path: Path
) -> None:
    consul.register("gpu1", "10.0.0.1", 22)
    consul.token = "secret"
    file = tmp_path / "token"
    file.write_text("wrong\n")
    async with watched(ConsulSource(consul.url, "ssh", 5, token_file=str(file))) as watch:
        await fails(watch, "answered 403: Permission denied")
        assert "wrong" not in str(watch.state())
        file.write_text("secret\n")
        await lists(watch, "gpu1")
        with consul.changed:
            consul.has_leader = False
            consul.changed.notify_all()
        await fails(watch, "answered 500: No cluster leader")
        assert [one.name for one in watch.checked.candidates] == ["gpu1"]
        consul.has_leader = True
        watch.look_again()
        await lists(watch, "gpu1")


@in_loop
async def test_a_registry_that_is_not_there_is_said_and_ending_waits_for_nobody(consul: ConsulServer) -> None:
    async with watched(ConsulSource("http://127.0.0.1:1", "ssh", 5)) as watch:
        await fails(watch, "http://127.0.0.1:1: ")
    consul.register("gpu1", "10.0.0.1", 22)
    async with watched(ConsulSource(consul.url, "ssh", 5)) as watch:
        await lists(watch, "gpu1")
        async with asyncio.timeout(5):  # the blocking query would take a minute
            await watch.close()


# --- ZooKeeper -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    if (reason := zookeeper.available()) is not None:
        pytest.skip(reason)
    with ZooKeeperServer(tmp_path_factory.mktemp("zookeeper")) as running:
        yield running


@pytest.mark.proof
def test_an_entry_in_zookeeper_lives_as_long_as_its_session(server: ZooKeeperServer) -> None:
    in_loop(entries_come_and_go)(server)


async def entries_come_and_go(server: ZooKeeperServer) -> None:
    source = ZooKeeperSource(server.hosts, "/ugro/nodes", 2.0, may_name_users=True)
    async with watched(source) as watch:
        await fails(watch, "there is no /ugro/nodes in ZooKeeper")
        fields = {"host": "10.0.0.1", "port": 2222, "user": "ann", "labels": ["fast"]}
        machine = await asyncio.to_thread(server.register, "gpu1", fields)
        await lists(watch, "gpu1")
        [one] = watch.checked.candidates
        assert (one.host, one.port, one.user, one.labels) == ("10.0.0.1", 2222, "ann", ("fast",))
        other = await asyncio.to_thread(server.register, "gpu2", {})
        await lists(watch, "gpu1", "gpu2")
        await asyncio.to_thread(other.set, "/ugro/nodes/gpu2", b'{"host": "10.0.0.7"}')
        await until(lambda: "10.0.0.7" in str(watch.checked), LIMIT_S, "the changed entry")
        await asyncio.to_thread(machine.stop)  # its session ends, and its entry with it
        await lists(watch, "gpu2")


@pytest.mark.proof
def test_a_zookeeper_that_is_down_keeps_its_list_and_is_found_again(tmp_path: Path) -> None:
    if (reason := zookeeper.available()) is not None:
        pytest.skip(reason)
    with ZooKeeperServer(tmp_path / "zookeeper") as server:
        client = server.client()
        client.create("/ugro/nodes/gpu1", b"{}", makepath=True)
        in_loop(goes_down_and_comes_back)(server)


async def goes_down_and_comes_back(server: ZooKeeperServer) -> None:
    async with watched(ZooKeeperSource(server.hosts, "/ugro/nodes", 2.0)) as watch:
        await lists(watch, "gpu1")
        server.kill()
        await fails(watch, "")
        assert [one.name for one in watch.checked.candidates] == ["gpu1"]
        await asyncio.to_thread(server.start)
        watch.look_again()
        await lists(watch, "gpu1")


@in_loop
async def test_nobody_waits_for_a_zookeeper_that_is_silent_when_it_is_no_longer_watched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = ZooKeeperSource(f"127.0.0.1:{server.getsockname()[1]}", "/nodes", 60.0)
        async with asyncio.timeout(LIMIT_S), watched(source):
            connection, _ = await asyncio.to_thread(server.accept)
    connection.close()


# --- mDNS ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def network() -> Iterator[tuple[Cable, Cable]]:
    """Two namespaces with a cable between them."""
    if (reason := netns.available()) is not None:
        pytest.skip(reason)
    here, there = Cable(), Cable()
    try:
        here.lay()
        there.lay()
        there.lead_to(here)
        yield here, there
    finally:
        there.remove()
        here.remove()


def says(process: subprocess.Popen[str]) -> tuple[object, object]:
    """The list that it has, and why it is not up to date."""
    assert process.stdout is not None
    found = json.loads(process.stdout.readline() or '{"listed": "nothing: it has ended", "error": ""}')
    return found["listed"], found["error"]


def says_at_last(process: subprocess.Popen[str], *expected: object) -> None:
    """Reads on until it prints what is expected."""
    wait_until(lambda: says(process) == expected, LIMIT_S, f"the list and the error {expected}")


@pytest.mark.proof
def test_a_machine_that_announces_itself_by_mdns_is_found_and_its_goodbye_is_heard(
    network: tuple[Cable, Cable]
) -> None:
    pytest.importorskip("zeroconf")
    here, there = network
    words = ("announce", "_ssh._tcp", "gpu7", there.node_address, "2222")
    with inside(here, "browse", "_ssh._tcp") as browser, inside(there, *words) as machine:
        says_at_last(browser, [["gpu7", there.node_address, 2222, ["fast", "lab2"]]], "")
        assert machine.stdin is not None
        machine.stdin.close()
        says_at_last(browser, [], "")
        assert machine.wait(LIMIT_S) == 0


@pytest.mark.proof
def test_a_machine_in_no_network_has_not_heard_of_others_and_listens_again_when_it_is_in_one(
    network: tuple[Cable, Cable]
) -> None:
    pytest.importorskip("zeroconf")
    here, there = network
    to_us, to_there = "cable", f"ugro{there.network}"
    here.ip(f"link set {to_us} down")
    here.ip(f"link set {to_there} down")
    nothing, gpu7 = "this machine is in no network", ["gpu7", there.node_address, 2222, ["fast", "lab2"]]
    with inside(here, "browse", "_ssh._tcp") as browser:
        assert says(browser) == ([], nothing), "an empty list would drain every node"
        here.ip(f"link set {to_there} up")
        with inside(there, "announce", "_ssh._tcp", "gpu7", there.node_address, "2222"):
            says_at_last(browser, [gpu7], "")
            here.ip(f"addr flush dev {to_there}")
            says_at_last(browser, [gpu7], nothing)
            here.ip(f"addr add 10.213.{there.network}.1/30 dev {to_there}")
            says_at_last(browser, [gpu7], "")

"""Links to real sshds: nodes that fail in every way beside nodes that work, and the user's own ssh configuration."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.integration.conftest import (
    Farms,
    Ugro,
    in_loop,
    kept_nodes,
    link_to,
    open_link,
    run_command,
    spec_of,
    until,
)
from tests.rig.sshd import SshdFarm, command, make_keys
from tests.rig.tiers import sample
from tests.rig.waiting import descendants, is_alive, name_of, wait_until
from ugro.client.client import Client
from ugro.kernel.config.load import load_config
from ugro.kernel.config.schema import Config
from ugro.kernel.links.cluster import Inventory
from ugro.kernel.links.model import NodeReport, NodeSpec, Status
from ugro.kernel.links.node import Dialling, Node
from ugro.kernel.links.operations import CheckHealth
from ugro.kernel.links.transport import SshOptions
from ugro.kernel.support.errors import Unreachable

Documents = dict[str, dict[str, Any]]


def health(ugro: Ugro, *nodes: str) -> Documents:
    """``ugro health --json`` as a user gets it, by node."""
    answer = ugro("health", "--json", *nodes)
    assert answer.returncode in (0, 1, 5), answer.stderr
    return {document["name"]: document for document in json.loads(answer.stdout)["nodes"]}


def causes(documents: Documents) -> dict[str, str | None]:
    return {name: document["cause"] for name, document in documents.items()}


def arrivals(ugro: Ugro, cluster: Path) -> dict[str, tuple[float, NodeReport]]:
    """Each report, and after how many seconds it was there."""
    ugro("agent", "start")
    with Client(home=ugro.home, cluster=cluster) as client:
        began = time.monotonic()
        return {report.name: (time.monotonic() - began, report) for report in client.follow(CheckHealth())}


# --- what fails, and what does not ---------------------------------------------------------------------------------


@pytest.mark.proof
def test_of_ten_nodes_five_fail_each_in_its_own_way_and_delay_nobody(farm_of: Farms, ugro: Ugro) -> None:
    farm = farm_of(10)
    expected = {
        "n001": "refused",
        "n002": "timed-out",
        "n003": "login-denied",
        "n004": "python-missing",
        "n006": "host-key-changed",
    }
    farm["n001"].stop()
    farm["n002"].freeze()
    farm["n003"].refuse_keys()
    farm["n004"].configure(python=False)
    farm["n005"].configure(banner="a banner\n" * 100)
    farm["n006"].change_host_key()
    ugro.cluster = farm.cluster_yaml(health_check={"timeout": 9})
    seen = arrivals(ugro, ugro.cluster)
    hung_after_s, hung = seen.pop("n002")
    assert max(after_s for after_s, _ in seen.values()) < hung_after_s - 1
    healthy = {name for name, (_, report) in seen.items() if report.status is not Status.UNREACHABLE}
    assert healthy == {"n005", "n007", "n008", "n009", "n010"}
    assert hung.cause == "timed-out"
    documents = health(ugro)
    assert {name: cause for name, cause in causes(documents).items() if cause} == expected
    assert all(documents[name]["hint"] and documents[name]["error"] for name in expected)
    assert "ugro node trust n006 --replace" in documents["n006"]["hint"]
    farm["n002"].thaw()


@pytest.mark.proof
def test_a_node_that_hangs_after_its_link_was_up_delays_nobody_and_comes_back(farm_of: Farms, ugro: Ugro) -> None:
    farm = farm_of(4)
    ugro.cluster = farm.cluster_yaml(health_check={"timeout": 4})
    assert set(causes(health(ugro)).values()) == {None}
    farm["n003"].freeze()
    seen = arrivals(ugro, ugro.cluster)
    hung_after_s, hung = seen.pop("n003")
    assert max(after_s for after_s, _ in seen.values()) < hung_after_s - 1
    assert {report.status for _, report in seen.values()} <= {Status.HEALTHY, Status.DEGRADED, Status.UNHEALTHY}
    assert hung.status is Status.UNREACHABLE
    assert hung.cause in ("timed-out", "timed_out", "hung")
    assert hung.hint or hung.error
    farm["n003"].thaw()
    wait_until(lambda: causes(health(ugro, "n003"))["n003"] is None, 30, "n003 to come back")


@contextmanager
def tiny_disk(mount: Path) -> Iterator[None]:
    """A file system in which hardly anything fits."""
    mount.mkdir()
    subprocess.run([command("mount"), "-t", "tmpfs", "-o", "size=24k", "ugro-rig", str(mount)], check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run([command("umount"), str(mount)], check=True, timeout=10)


def test_names_keys_homes_and_transports_that_are_wrong_are_named_so(farm_of: Farms, ugro: Ugro) -> None:
    farm = farm_of(6)
    farm.trust(node for node in farm.nodes if node.name != "n002")
    farm["n003"].configure(home_mode=0o555)
    (farm["n004"].home / "a file").write_text("")
    ugro.cluster = farm.cluster_yaml(
        nodes={
            "n001": {"host": "no-such-host.invalid"},
            "n004": {"remote_root": str(farm["n004"].home / "a file" / "ugro")},
            "n005": {"transport": ["/no/such/transport", "--option"]},
            "n006": {"transport": [str(farm["n006"].home)]},
        }
    )
    documents = health(ugro)
    assert causes(documents) == {
        "n001": "name-not-found",
        "n002": "host-key-unknown",
        "n003": "home-not-writable",
        "n004": "home-not-writable",
        "n005": "transport-missing",
        "n006": "transport-missing",
    }
    assert all(document["hint"] for document in documents.values())
    assert "ugro node trust n002" in documents["n002"]["hint"]
    assert "remote_root" in documents["n003"]["hint"]
    assert "/no/such/transport" in documents["n005"]["error"]


@pytest.mark.proof
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_named_and_nothing_half_written_is_left_on_it(farm_of: Farms, ugro: Ugro) -> None:
    farm = farm_of(1)
    root = farm["n001"].home / "small"
    with tiny_disk(root):
        ugro.cluster = farm.cluster_yaml(nodes={"n001": {"remote_root": str(root)}})
        documents = health(ugro)
        assert causes(documents) == {"n001": "disk-full"}
        assert str(root) in documents["n001"]["error"]
        assert list((root / ".ugro" / "program").iterdir()) == []
        ugro("agent", "stop")


@pytest.mark.proof
def test_without_ssh_on_this_machine_the_remedy_is_to_install_it(farm_of: Farms, ugro: Ugro) -> None:
    farm = farm_of(1)
    ugro.cluster = farm.cluster_yaml()
    answer = ugro("health", "--json", env={"PATH": "/nowhere"})
    [document] = json.loads(answer.stdout)["nodes"]
    assert document["cause"] == "ssh-missing"
    assert "openssh-client" in document["hint"]


# --- many ----------------------------------------------------------------------------------------------------------


@pytest.mark.proof
@in_loop
async def test_thirty_nodes_come_up_though_more_hang_than_may_be_dialled_at_once(farm_of: Farms) -> None:
    farm = farm_of(30)
    hung, good = farm.nodes[:8], farm.nodes[8:]
    for node in hung:
        node.freeze()
    async with kept_nodes(farm, pool_size=5, connect_timeout_s=60) as nodes:
        links = await asyncio.gather(*(node.ready(50) for node in nodes[8:]))
        assert len(links) == len(good)
        # Not one of the eight has had its verdict by the time all others are up.
        assert [node.error for node in nodes[:8]] == [None] * 8
        for node in hung:
            node.thaw()
        await asyncio.gather(*(node.ready(30) for node in nodes[:8]))


# --- the user's own configuration ----------------------------------------------------------------------------------


def ssh_config(farm: SshdFarm, directory: Path, *lines: str) -> Path:
    """The farm's own file with more in front of it, which wins."""
    file = directory / "own_config"
    file.write_text("\n".join(lines) + "\n\n" + farm.ssh_config.read_text())
    return file


@in_loop
async def test_jumps_aliases_ports_and_identities_are_the_users_own(farm_of: Farms, tmp_path: Path) -> None:
    farm = farm_of(3)
    jump, behind, other_key = farm.nodes
    key = tmp_path / "second key"
    make_keys([key])
    (other_key.directory / "authorized_keys").write_text(key.with_suffix(".pub").read_text())
    shared = [f"UserKnownHostsFile {farm.known_hosts}", "IdentitiesOnly yes", f"User {farm.user}"]
    config = ssh_config(
        farm,
        tmp_path,
        *("Host inner", f"HostName {behind.host}", f"Port {behind.port}", f"ProxyJump {jump.name}"),
        *(*shared, f"IdentityFile {farm.client_key}"),
        *("Host keyed", f"HostName {other_key.host}", f"Port {other_key.port}", f'IdentityFile "{key}"', *shared),
    )
    inner = await open_link(NodeSpec("a", host="inner", remote_root=str(behind.home / "r")), ssh_config=config)
    assert len(jump.sessions()) > 0
    ssh = await run_command(inner, "sh", "-c", "echo $SSH_CONNECTION")
    assert ssh[1].decode().split()[2:] == [behind.host, str(behind.port)]
    keyed = await open_link(NodeSpec("b", host="keyed", remote_root=str(other_key.home / "r")), ssh_config=config)
    assert (await run_command(keyed, "true"))[0]["code"] == 0
    for link in (inner, keyed):
        link.close()
        await link.wait_closed()
    await until(lambda: not jump.sessions(), 10, "the jump to end with its link")


@in_loop
async def test_when_the_jump_host_fails_the_node_is_not_blamed(farm_of: Farms, tmp_path: Path) -> None:
    farm = farm_of(2)
    jump, behind = farm.nodes
    config = ssh_config(farm, tmp_path, "Host n002", f"ProxyJump {jump.name}")
    seen: dict[str, Unreachable] = {}
    for case, change in {
        "login": jump.refuse_keys,
        "target": behind.stop,
        "key": lambda: farm.trust([behind]),
        "jump": jump.stop,
    }.items():
        change()
        with pytest.raises(Unreachable) as caught:
            await open_link(spec_of(behind), ssh_config=config)
        seen[case] = caught.value
        jump.accept_keys()
    assert {case: error.cause for case, error in seen.items()} == {
        "login": "login-denied",
        "target": "jump-failed",
        "key": "host-key-unknown",
        "jump": "refused",
    }
    for case in ("login", "key", "jump"):
        assert "jump host" in seen[case].message
        assert "trust" not in (seen[case].hint or "")


TRAPS = {
    "a shared connection": ["ControlMaster auto", "ControlPersist 60", "ControlPath {dir}/%C"],
    "a command of its own": ["RemoteCommand echo surprise"],
    "a terminal": ["RequestTTY force"],
    "forwards": ["LocalForward 127.0.0.1:{port} 127.0.0.1:9", "ExitOnForwardFailure yes", "DynamicForward {port}"],
    "agent and display": ["ForwardAgent yes", "ForwardX11 yes", "AddKeysToAgent ask"],
    "silence": ["LogLevel QUIET"],
    "noise": ["LogLevel DEBUG3"],
    "a local command": ["PermitLocalCommand yes", "LocalCommand echo surprise; touch {dir}/touched"],
    "compression and escapes": ["Compression yes", "EscapeChar ~", "ServerAliveInterval 1", "ServerAliveCountMax 1"],
}


@pytest.mark.parametrize("trap", sample(list(TRAPS), "a shared connection", "forwards"))
@in_loop
async def test_what_a_user_sets_for_a_terminal_does_not_break_a_link(farm_of: Farms, trap: str) -> None:
    farm = farm_of(1)
    node = farm.nodes[0]
    folder = farm.directory / "own"  # short enough for a socket's path
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        filled = [line.format(dir=folder, port=taken.getsockname()[1]) for line in TRAPS[trap]]
        config = ssh_config(farm, folder, "Host *", *filled)
        link = await open_link(spec_of(node), ssh_config=config)
    every_byte = bytes(range(256)) * 300
    ended, output = await run_command(link, "python3", "-c", "import os;os.write(1,bytes(range(256))*300)")
    assert (ended["code"], output) == (0, every_byte)
    link.close()
    await link.wait_closed()
    assert [path.name for path in folder.iterdir()] == ["own_config"]
    await until(lambda: not node.sessions(), 10, "the session to end")


@in_loop
async def test_a_connection_that_the_user_shares_is_not_used(farm_of: Farms, tmp_path: Path) -> None:
    farm = farm_of(1)
    node = farm.nodes[0]
    control = farm.directory / "control"
    config = ssh_config(farm, tmp_path, "Host *", f"ControlPath {control}", "ControlMaster auto")
    shared = await asyncio.create_subprocess_exec("ssh", "-F", str(config), "-N", node.name, stdin=subprocess.DEVNULL)
    try:
        await until(control.exists, 10, "the shared connection to stand")
        link = await open_link(spec_of(node), ssh_config=config)
    finally:
        shared.kill()
        await shared.wait()
    assert await link.call("echo", {}, timeout_s=5) == {}
    link.close()
    await link.wait_closed()


@in_loop
async def test_quiet_users_still_hear_what_is_wrong(farm_of: Farms, tmp_path: Path) -> None:
    farm = farm_of(1)
    farm.nodes[0].refuse_keys()
    with pytest.raises(Unreachable) as caught:
        await open_link(spec_of(farm.nodes[0]), ssh_config=ssh_config(farm, tmp_path, "Host *", "LogLevel QUIET"))
    assert caught.value.cause == "login-denied"


@in_loop
async def test_a_configuration_that_ssh_cannot_read_is_called_that(farm_of: Farms, tmp_path: Path) -> None:
    farm = farm_of(1)
    with pytest.raises(Unreachable) as caught:
        await open_link(spec_of(farm.nodes[0]), ssh_config=ssh_config(farm, tmp_path, "Host *", "NoSuchOption yes"))
    assert caught.value.cause == "ssh-config"


# --- edits of the cluster file -------------------------------------------------------------------------------------


@in_loop
async def test_an_edit_redials_only_what_is_reached_in_another_way(farm_of: Farms) -> None:
    farm = farm_of(4)

    def config(**nodes: dict[str, Any]) -> Config:
        return load_config(farm.cluster_yaml(nodes=nodes), {})

    inventory = Inventory(dict)
    try:
        await inventory.apply(config(n001={"labels": ["old"]}))
        links = {node.spec.name: await node.ready(20) for node in inventory}
        root = str(farm["n002"].home / "elsewhere")
        change = await inventory.apply(config(n001={"labels": ["new"]}, n002={"remote_root": root}))
        assert (change.added, change.removed, change.redialled) == ((), (), ("n002",))
        assert inventory.select(["@new"])[0].link is links["n001"]
        assert links["n002"].lost.done()
        assert (await inventory.get("n002").ready(20)).machine != links["n002"].machine
        without_n004 = config()
        without_n004 = replace(without_n004, nodes=without_n004.nodes[:3])
        change = await inventory.apply(without_n004)
        assert (change.added, change.removed, change.redialled) == ((), ("n004",), ("n002",))
        assert links["n004"].lost.result().cause == "closed"
        assert inventory.get("n003").link is links["n003"]
    finally:
        await inventory.close()


# --- one link ------------------------------------------------------------------------------------------------------


@in_loop
async def test_calls_run_side_by_side_and_each_gets_its_own_answer(farm_of: Farms) -> None:
    farm = farm_of(1)
    async with link_to(farm, farm.nodes[0]) as link:
        sleeping = asyncio.create_task(run_command(link, "sh", "-c", "sleep 0.5; echo late"))
        answers = await asyncio.gather(*(link.call("echo", {"n": n}, timeout_s=10) for n in range(200)))
        assert answers == [{"n": n} for n in range(200)]
        assert not sleeping.done()
        assert (await sleeping)[1] == b"late\n"


@pytest.mark.proof
@in_loop
async def test_fifty_links_opened_and_closed_leave_no_descriptor_task_or_process(farm_of: Farms) -> None:
    farm = farm_of(1)
    node = farm.nodes[0]

    async def once(spec: NodeSpec) -> None:
        link = await open_link(spec, farm)
        link.close()
        await link.wait_closed()

    async def fail_once() -> None:
        with pytest.raises(Unreachable):
            await open_link(spec_of(node, python="/none"), farm)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    # Here, not over ssh: the same code with a quicker transport.
    local = NodeSpec("here", remote_root=str(node.home / "r"), transport="local")
    await once(spec_of(node))
    await fail_once()
    await once(local)
    before, tasks = descriptors(), asyncio.all_tasks()
    await asyncio.gather(*(once(spec_of(node)) for _ in range(4)))
    await asyncio.gather(*(fail_once() for _ in range(4)))
    for _ in range(14):
        await asyncio.gather(once(local), once(local), once(local))
    assert descriptors() == before
    assert asyncio.all_tasks() == tasks
    await until(lambda: not node.processes(), 10, "the node programs to end")
    assert "ssh" not in [name_of(pid) for pid in descendants([os.getpid()])]


@in_loop
async def test_an_opening_that_is_called_off_leaves_nothing(farm_of: Farms) -> None:
    farm = farm_of(1)
    farm.nodes[0].freeze()
    before = len(os.listdir("/proc/self/fd"))
    for delay_s in (0.0, 0.001, 0.05, 0.3):
        opening = asyncio.create_task(open_link(spec_of(farm.nodes[0]), farm))
        await asyncio.sleep(delay_s)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    assert len(os.listdir("/proc/self/fd")) == before
    assert "ssh" not in [name_of(pid) for pid in descendants([os.getpid()])]
    farm.nodes[0].thaw()


@pytest.mark.parametrize("does_it_end_first", [False, True])
@in_loop
async def test_what_a_transport_started_besides_ends_with_it(tmp_path: Path, does_it_end_first: bool) -> None:
    left = tmp_path / "pid"
    words = ("sh", "-c", 'sleep 1000 <&- >&- 2>&- & echo $! > "$0"; "$@"; exit $?', str(left))
    link = await open_link(NodeSpec("here", remote_root=str(tmp_path / "root"), transport=words))
    assert is_alive(int(left.read_text()))
    if does_it_end_first:
        # From a command up to its guard, and to the node program.
        link.stream("exec", {"argv": ["sh", "-c", "kill -9 $(ps -o ppid= -p $PPID)"], "marker": "m"})
    else:
        link.close()
    await asyncio.wait_for(link.lost, 10)
    await link.wait_closed()
    await until(lambda: not is_alive(int(left.read_text())), 5, "the other process to end")


@pytest.mark.proof
@in_loop
async def test_whoever_asks_for_a_node_that_is_down_gets_an_answer_and_has_it_dialled() -> None:
    dials: list[float] = []

    def environment() -> dict[str, str]:
        dials.append(time.monotonic())  # asked for at each dial
        return {}

    # Its cause is a lasting one: by itself it would be dialled once a minute.
    spec = NodeSpec("down", transport=("/no/such/program",))
    node = Node(spec, Dialling(SshOptions(), 3, asyncio.Semaphore(1), environment))
    random = Random(1)
    began = time.monotonic()
    while time.monotonic() - began < 3.5:
        asked = [asyncio.create_task(node.ready(20)) for _ in range(random.randint(1, 4))]
        for answer in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 2):
            assert isinstance(answer, Unreachable)
        await asyncio.sleep(random.random() / 20)
    await node.close()
    assert 3 <= len(dials) <= 5


@in_loop
async def test_a_node_that_is_closed_answers_whoever_still_waits_for_it(farm_of: Farms) -> None:
    farm = farm_of(1)
    farm.nodes[0].freeze()
    async with kept_nodes(farm) as [node]:
        waiting = [asyncio.create_task(node.ready(60)) for _ in range(3)]
        await asyncio.sleep(0.1)
        await node.close()
        answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        assert [type(answer) for answer in answers] == [Unreachable] * 3
        with pytest.raises(Unreachable):
            await asyncio.wait_for(node.ready(60), 5)
    farm.nodes[0].thaw()

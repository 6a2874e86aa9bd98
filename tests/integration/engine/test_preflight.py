"""What is looked at before ranks start, on real node programs: of this machine, and in networks of their own."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from tests.integration.conftest import in_loop
from tests.proof.absent import NoCode
from tests.rig import netns
from tests.rig.ports import free_port
from tests.rig.sshd import command
from tests.rig.waiting import wait_until
from ugro.features.environments.service.installed import NodeModules
from ugro.kernel.jobs.engine import preflight as rendezvous
from ugro.kernel.jobs.engine.launch import Hardware, Launch, Planner, run_start
from ugro.kernel.jobs.engine.leases import Leases
from ugro.kernel.jobs.engine.placed_runs import PlacedRuns
from ugro.kernel.jobs.engine.preflight import LaunchRefused, Preflight
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.runs import RunStatus
from ugro.kernel.jobs.model import Cause, Disconnect, Job, JobSpec, JobState, Launcher, OnLost, Placement, Share, Stop
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.diagnosis import Apart, Endpoint, Meeting, meet
from ugro.kernel.links.node import Identity
from ugro.kernel.store.database import Store
from ugro.node.messages import Connections

IDENTITY = Identity("agent-1", 1)


def placement(*nodes: str) -> Placement:
    return Placement(tuple(Share(node) for node in nodes))


def job(where: Placement, number: int = 1, launcher: Launcher = Launcher.DDP, argv: Sequence[str] = ("x",)) -> Job:
    spec = JobSpec("j", tuple(argv), launcher)
    return Job(number, spec, "ann", JobState.STARTING, "", "2026-01-01T00:00:00+00:00", attempt=1, placement=where)


def cluster_file(folder: Path, nodes: Mapping[str, str], more: str = "") -> Path:
    """``nodes``: for each its fields, as in YAML."""
    file = folder / "cluster.yaml"
    lines = [
        f"  {name}: {{remote_root: {folder}/{name}, python: {sys.executable}, {fields}}}"
        for name, fields in nodes.items()
    ]
    file.write_text("\n".join(["nodes:", *lines, more]))
    return file


@asynccontextmanager
async def preflight_of(file: Path) -> AsyncIterator[tuple[Preflight, Cluster]]:
    cluster = Cluster(file)
    await cluster.start()
    try:
        placed = PlacedRuns(Store(file.parent / "state.db").jobs)  # not opened: nothing is asked of it
        yield Preflight(cluster, RunTracker(cluster.inventory, IDENTITY, placed), NodeModules()), cluster
    finally:
        await cluster.inventory.close()


# --- one machine ------------------------------------------------------------------------------------------------


@in_loop
async def test_nodes_of_one_machine_meet_on_loopback_and_leave_the_port_free(tmp_path: Path) -> None:
    where = placement("n1", "n2", "n3")
    async with preflight_of(cluster_file(tmp_path, dict.fromkeys(where.nodes, "transport: local"))) as (preflight, _):
        for number in range(1, 6):
            found = await preflight.rendezvous(job(where, number), where)
            assert found.address == "127.0.0.1"
            assert dict(found.interfaces) == {"n1": "lo", "n2": "lo", "n3": "lo"}
            with socket.socket() as rank:  # also for one that shares with nobody, and at once
                rank.bind(("0.0.0.0", found.port))


@in_loop
async def test_a_job_on_one_node_meets_itself(tmp_path: Path) -> None:
    where = placement("n1")
    async with preflight_of(cluster_file(tmp_path, {"n1": "transport: local"})) as (preflight, _):
        found = await preflight.rendezvous(job(where), where)
        assert (found.address, found.interfaces) == ("127.0.0.1", (("n1", "lo"),))
        assert await preflight.agree(job(where), where) == ()


@in_loop
async def test_jobs_that_start_at_once_get_ports_of_their_own_and_keep_them(tmp_path: Path) -> None:
    where = placement("n1", "n2")
    async with preflight_of(cluster_file(tmp_path, dict.fromkeys(where.nodes, "transport: local"))) as (preflight, _):
        found = await asyncio.gather(*(preflight.rendezvous(job(where, number), where) for number in range(1, 9)))
        assert len({one.port for one in found}) == 8
        assert (await preflight.rendezvous(job(where, 1), where)).port == found[0].port


@in_loop
async def test_the_port_that_the_user_names_is_taken_while_it_is_free(tmp_path: Path) -> None:
    where = placement("n1", "n2")
    wanted = free_port()
    nodes = dict.fromkeys(where.nodes, "transport: local")
    async with preflight_of(cluster_file(tmp_path, nodes, f"cluster: {{master_port: {wanted}}}")) as (preflight, _):
        assert (await preflight.rendezvous(job(where, 1), where)).port == wanted
        assert (await preflight.rendezvous(job(where, 2), where)).port != wanted


@in_loop
async def test_a_port_that_was_taken_meanwhile_is_replaced_before_ranks_start(tmp_path: Path) -> None:
    where = placement("n1", "n2")
    async with preflight_of(cluster_file(tmp_path, dict.fromkeys(where.nodes, "transport: local"))) as (preflight, _):
        port = (await preflight.rendezvous(job(where), where)).port
        with socket.socket() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stranger.bind(("0.0.0.0", port))
            stranger.listen()
            found = await preflight.rendezvous(job(where), where)
            assert found.port != port
            assert (await preflight.rendezvous(job(where), where)).port == found.port


@in_loop
async def test_ports_that_are_always_taken_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = placement("n1", "n2")
    taken = AsyncMock(side_effect=rendezvous.PortTaken("in use", subject="n1"))
    monkeypatch.setattr("ugro.kernel.jobs.engine.preflight.find_meeting", taken)
    async with preflight_of(cluster_file(tmp_path, dict.fromkeys(where.nodes, "transport: local"))) as (preflight, _):
        with pytest.raises(LaunchRefused, match="n1: 3 ports in a row were free and then taken") as refused:
            await preflight.rendezvous(job(where), where)
    assert (refused.value.failure_cause, taken.await_count) == (Cause.PORT_IN_USE, 3)


@in_loop
async def test_nodes_that_are_slow_are_not_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine: what answers is not heard in time at first."""
    where = placement("n1", "n2", "n3")
    seen: list[Meeting | Apart] = []

    def deaf_at_first(places: Sequence[Endpoint], port: int, found: Mapping[str, Connections]) -> Meeting | Apart:
        if not seen:
            found = {**found, "n3": Connections(found["n3"].reached[:1])}
        seen.append(meet(places, port, found))
        return seen[-1]

    monkeypatch.setattr(rendezvous, "meet", deaf_at_first)
    async with preflight_of(cluster_file(tmp_path, dict.fromkeys(where.nodes, "transport: local"))) as (preflight, _):
        found = await preflight.rendezvous(job(where), where)
        assert [type(one) for one in seen] == [Apart, Meeting]
        assert found.address == "127.0.0.1"
        with socket.socket() as rank:
            rank.bind(("0.0.0.0", found.port))


# --- environments -----------------------------------------------------------------------------------------------


def install(folder: Path, torch: str) -> None:
    """As far as can be seen without importing it."""
    for old in folder.glob("torch-*/METADATA"):
        old.unlink()
        old.parent.rmdir()
    metadata = folder / f"torch-{torch}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")


def with_torch(tmp_path: Path, **versions: str) -> Path:
    fields = {}
    for node, version in versions.items():
        install(tmp_path / f"site-{node}", version)
        fields[node] = f"transport: local, env: {{PYTHONPATH: {tmp_path}/site-{node}}}"
    return cluster_file(tmp_path, fields)


@in_loop
async def test_a_mismatch_is_named_and_once_mended_the_next_start_goes_through(tmp_path: Path) -> None:
    where = placement("n1", "n2", "n3")
    file = with_torch(tmp_path, n1="2.6.0", n2="2.5.1+cpu", n3="2.6.0")
    async with preflight_of(file) as (preflight, _):
        with pytest.raises(LaunchRefused) as refused:
            await preflight.agree(job(where), where)
        assert refused.value.failure_cause is Cause.MISMATCH
        assert str(refused.value) == "torch differs: n1 and n3 have 2.6.0, n2 2.5.1 (+cpu)"
        assert refused.value.hint == f"ugro exec n2 -- {sys.executable} -m pip install torch==2.6.0"
        install(tmp_path / "site-n2", "2.6.1")
        assert await preflight.agree(job(where), where) == ("torch differs: n1 and n3 have 2.6.0, n2 2.6.1",)


@in_loop
async def test_what_is_installed_is_asked_once_until_the_link_is_lost_or_a_job_fails(tmp_path: Path) -> None:
    where = placement("n1", "n2")
    async with preflight_of(with_torch(tmp_path, n1="2.6.0", n2="2.6.0")) as (preflight, cluster):
        assert await preflight.agree(job(where), where) == ()
        install(tmp_path / "site-n2", "2.6.2")
        assert await preflight.agree(job(where), where) == ()
        preflight.forget(["n2"])
        assert await preflight.agree(job(where), where) == ("torch differs: n1 has 2.6.0, n2 2.6.2",)
        install(tmp_path / "site-n2", "2.6.0")
        node = cluster.inventory.get("n2")
        assert node.link is not None
        node.link.close()
        async with asyncio.timeout(20):
            while node.link is None or node.link.lost.done():  # noqa: ASYNC110  # dialled again by itself
                await asyncio.sleep(0.02)
        assert await preflight.agree(job(where), where) == ()


@in_loop
async def test_a_mended_mismatch_that_was_remembered_does_not_refuse(tmp_path: Path) -> None:
    where, half = placement("n1", "n2"), placement("n2", "n3")
    async with preflight_of(with_torch(tmp_path, n1="2.6.0", n2="2.5.0", n3="2.5.0")) as (preflight, _):
        assert await preflight.agree(job(half), half) == ()
        install(tmp_path / "site-n2", "2.6.0")
        assert await preflight.agree(job(where), where) == ()


# --- setup ------------------------------------------------------------------------------------------------------

def with_setup(where: Placement, script: str, number: int = 1) -> Job:
    plain = job(where, number)
    return replace(plain, spec=replace(plain.spec, setup=script))


@in_loop
async def test_a_setup_runs_once_per_node_and_content(tmp_path: Path) -> None:
    where = placement("n1", "n2")
    script = f"echo $UGRO_NODE $UGRO_PYTHON >> {tmp_path}/ledger-$UGRO_NODE"
    async with preflight_of(cluster_file(tmp_path, dict.fromkeys(where.nodes, "transport: local"))) as (preflight, _):
        for number in (1, 2):
            await preflight.set_up(with_setup(where, script, number), where)
        for node in where.nodes:
            assert (tmp_path / f"ledger-{node}").read_text() == f"{node} {sys.executable}\n"
        await preflight.set_up(with_setup(where, f"{script} # changed", 3), where)
        assert (tmp_path / "ledger-n1").read_text().count("n1") == 2


@in_loop
async def test_a_setup_that_fails_refuses_the_start_with_its_last_words(tmp_path: Path) -> None:
    where = placement("n1", "n2")
    script = "[ $UGRO_NODE = n1 ] || { echo no space left >&2; exit 3; }"
    async with preflight_of(cluster_file(tmp_path, dict.fromkeys(where.nodes, "transport: local"))) as (preflight, _):
        with pytest.raises(LaunchRefused) as refused:
            await preflight.set_up(with_setup(where, script), where)
    failure = refused.value.failure
    assert (failure.cause, failure.node, failure.exit_code) == (Cause.SETUP_FAILED, "n2", 3)
    assert failure.reason == "the setup on n2 ended with exit code 3: no space left"
    assert failure.last_lines == ("no space left",)


# --- networks ---------------------------------------------------------------------------------------------------

NAMES = ("n1", "n2", "n3")


class Switch:
    """Three nodes in namespaces of their own, joined by a bridge in a fourth; each calls its interface differently."""

    def __init__(self) -> None:
        self._prefix = f"ugro-pf-{os.getpid()}"
        self._switch = f"{self._prefix}-switch"

    def lay(self) -> None:
        self._ip("netns", "add", self._switch)
        self._ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", self._switch, "link", "set", "bridge", "up")
        for number, name in enumerate(NAMES, start=1):
            inside, cable = self.namespace(name), f"cable{number}"
            self._ip("netns", "add", inside)
            ends = (f"to-{name}", "netns", self._switch, "type", "veth", "peer", "name", cable, "netns", inside)
            self._ip("link", "add", *ends)
            self._ip("-n", self._switch, "link", "set", f"to-{name}", "master", "bridge", "up")
            self._ip("-n", inside, "addr", "add", f"{self.address(name)}/24", "dev", cable)
            self._ip("-n", inside, "link", "set", cable, "up")
            self._ip("-n", inside, "link", "set", "lo", "up")

    def namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def address(self, name: str) -> str:
        return f"10.214.7.{NAMES.index(name) + 1}"

    def inside(self, name: str, *argv: str) -> None:
        self._ip("netns", "exec", self.namespace(name), *argv)

    def drop(self, at: str, *rule: str) -> None:
        self.inside(at, command("iptables"), "-w", "-A", "INPUT", *rule, "-j", "DROP")

    def remove(self) -> None:
        for namespace in (self._switch, *(self.namespace(name) for name in NAMES)):
            subprocess.run([command("ip"), "netns", "del", namespace], capture_output=True, timeout=10, check=False)

    def cluster_file(self, folder: Path, more: str = "") -> Path:
        ip = command("ip")
        fields = {
            name: f"role: {'master' if name == 'n1' else 'worker'}, "
            f"transport: [{ip}, netns, exec, {self.namespace(name)}]"
            for name in NAMES
        }
        return cluster_file(folder, fields, more)

    def _ip(self, *arguments: str) -> None:
        subprocess.run([command("ip"), *arguments], check=True, capture_output=True, text=True, timeout=10)


@pytest.fixture(scope="module")
def why_no_namespaces() -> str | None:
    return netns.available()


@pytest.fixture
def switch(why_no_namespaces: str | None) -> Iterator[Switch]:
    if why_no_namespaces:
        pytest.skip(why_no_namespaces)
    made = Switch()
    try:
        made.lay()
        yield made
    finally:
        made.remove()


@in_loop
async def test_ranks_meet_at_the_first_nodes_address_over_each_nodes_own_interface(
    switch: Switch, tmp_path: Path
) -> None:
    where = placement("n2", "n1", "n3")
    async with preflight_of(switch.cluster_file(tmp_path)) as (preflight, _):
        found = await preflight.rendezvous(job(where), where)
    assert found.address == switch.address("n2")
    assert found.interfaces == (("n2", "cable2"), ("n1", "cable1"), ("n3", "cable3"))


@in_loop
async def test_an_address_that_the_others_do_not_reach_is_passed_over(switch: Switch, tmp_path: Path) -> None:
    # The first one to be tried; but the way there leads over a machine that is not there, and packets vanish.
    switch.inside("n1", command("ip"), "addr", "add", "10.99.0.1/24", "dev", "lo")
    for name in ("n2", "n3"):
        switch.inside(name, command("ip"), "route", "add", "10.99.0.0/24", "via", "10.214.7.99")
    where = placement("n1", "n2", "n3")
    file = switch.cluster_file(tmp_path, "cluster: {master_ip: 10.99.0.1}")
    async with preflight_of(file) as (preflight, _):
        began = time.monotonic()
        found = await preflight.rendezvous(job(where), where)
        assert time.monotonic() - began < 30, "it waited for what will never come"  # as the kernel does: two minutes
    assert found.address == switch.address("n1")
    assert dict(found.interfaces)["n1"] == "cable1"


@in_loop
async def test_the_address_that_the_user_wants_is_taken_if_it_works(switch: Switch, tmp_path: Path) -> None:
    switch.inside("n1", command("ip"), "addr", "add", "10.214.7.77/24", "dev", "cable1")
    where = placement("n1", "n3")
    file = switch.cluster_file(tmp_path, "cluster: {master_ip: 10.214.7.77}")
    async with preflight_of(file) as (preflight, _):
        found = await preflight.rendezvous(job(where), where)
        assert found.address == "10.214.7.77"
        assert found.interfaces == (("n1", "cable1"), ("n3", "cable3"))
        # It is the master's, and there it stays.
        elsewhere = placement("n3", "n1")
        assert (await preflight.rendezvous(job(elsewhere, 2), elsewhere)).address == switch.address("n3")


@pytest.mark.proof
@in_loop
async def test_one_pair_that_cannot_talk_is_named_and_nothing_starts(switch: Switch, tmp_path: Path) -> None:
    switch.drop("n3", "-s", switch.address("n2"))
    where = placement("n1", "n2", "n3")
    began = time.monotonic()
    async with preflight_of(switch.cluster_file(tmp_path)) as (preflight, _):
        with pytest.raises(LaunchRefused) as refused:
            await preflight.rendezvous(job(where), where)
    text = str(refused.value)
    assert f"n2 cannot connect to n3 ({switch.address('n3')}: no answer within" in text
    assert "n1" not in text
    assert refused.value.failure_cause is Cause.START_FAILED
    assert refused.value.hint is not None
    assert f"if a firewall blocks n2 on n3: sudo ufw allow from {switch.address('n2')}" in refused.value.hint
    assert time.monotonic() - began < 15


@pytest.mark.proof
@in_loop
async def test_a_firewall_that_only_lets_the_rendezvous_through_is_found_out(switch: Switch, tmp_path: Path) -> None:
    switch.drop("n1", "-p", "tcp", "--dport", "32768:65535", "--syn")
    where = placement("n1", "n2")
    async with preflight_of(switch.cluster_file(tmp_path)) as (preflight, _):
        with pytest.raises(LaunchRefused, match="n2 cannot connect to n1"):
            await preflight.rendezvous(job(where), where)


# --- plans ------------------------------------------------------------------------------------------------------


class Rig:
    """What an agent would make to launch, and nothing that schedules."""

    def __init__(self, cluster: Cluster, store: Store, asked: list[str]) -> None:
        self.store = store
        self.asked = asked
        self.watch = RunTracker(cluster.inventory, IDENTITY, PlacedRuns(store.jobs))
        self.planner = Planner(cluster, self.watch, self._extra, Hardware(lambda node: None), NodeModules())
        leases, none = Leases(self.watch), cast(Any, None)  # nothing is tried again, so nothing is put back
        self.launch = Launch(store.jobs, self.watch, leases, self.planner, cast(Any, NoCode()), none)

    async def _extra(self, job: Job, node: str) -> dict[str, str]:
        self.asked.append(node)
        return {"UGRO_RESUME_DIR": f"/resume/{job.id}/{node}/{len(self.asked)}"}

    async def started(self, spec: JobSpec, where: Placement) -> Job:
        submitted = (await self.store.jobs.submit(spec, "ann", "key")).job
        return await self.store.jobs.start(submitted, where, "it fits")


@asynccontextmanager
async def rig_of(file: Path, asked: list[str]) -> AsyncIterator[Rig]:
    store = Store(file.with_name("state.db"))
    await store.open()
    cluster = Cluster(file)
    await cluster.start()
    try:
        yield Rig(cluster, store, asked)
    finally:
        await cluster.inventory.close()
        await store.close()


@in_loop
async def test_a_plan_is_made_once_and_every_rank_starts_as_it_says(tmp_path: Path) -> None:
    where = placement("n1", "n2")
    script = tmp_path / "show.py"
    script.write_text(
        "import os, pathlib\n"
        "names = ['RANK', 'MASTER_PORT', 'GLOO_SOCKET_IFNAME', 'UGRO_NODE', 'UGRO_RESUME_DIR']\n"
        f"new = pathlib.Path({str(tmp_path)!r}, 'seen-new-' + os.environ['RANK'])\n"
        "new.write_text(' '.join(os.environ[name] for name in names)); new.rename(str(new).replace('-new', ''))\n"
    )
    # Another lease and signal than a node's own.
    spec = JobSpec("j", (str(script),), Launcher.DDP, disconnect=Disconnect(60, OnLost.RESTART), stop=Stop("TERM", 1))
    asked: list[str] = []
    file = cluster_file(tmp_path, dict.fromkeys(where.nodes, "transport: local"))
    async with rig_of(file, asked) as rig:
        running = await rig.started(spec, where)
        first = await rig.launch.plan(running)
        assert await rig.launch.plan(running) == first
    async with rig_of(file, asked) as rig:  # after a crash
        again = await rig.launch.plan(running)
        assert again == first
        assert sorted(asked) == ["n1", "n2"]
        assert again.rendezvous is not None
        assert not again.rendezvous.is_tentative
        for node in (*where.nodes, "n1"):  # asked twice, it starts once
            [status] = await rig.watch.runs(node).start([run_start(running, node, again)])
            assert isinstance(status, RunStatus)
        await asyncio.to_thread(
            wait_until, lambda: len(list(tmp_path.glob("seen-[0-9]"))) == 2, 20, "both ranks to have written"
        )
        for rank, node in enumerate(where.nodes):
            seen = (tmp_path / f"seen-{rank}").read_text().split()
            assert seen[:4] == [str(rank), str(again.rendezvous.port), "lo", node]
            assert seen[4] in (f"/resume/1/{node}/1", f"/resume/1/{node}/2")
            await rig.watch.runs(node).stop(running.id, 1, "the test is over", 1)


@in_loop
async def test_a_preview_asks_and_changes_nothing_and_says_what_is_still_open(tmp_path: Path) -> None:
    where = placement("n1", "n2")
    file = cluster_file(tmp_path, dict.fromkeys(where.nodes, "transport: local"))
    asked: list[str] = []
    async with rig_of(file, asked) as rig:
        for node in where.nodes:
            await rig.watch.runs(node).node.ready(20)
        unsent = Job(0, JobSpec("j", ("train.py",), Launcher.DDP), "ann", JobState.QUEUED, "", "")
        made = rig.planner.preview(unsent, where)
        assert made.rendezvous is not None
        assert (made.rendezvous.address, made.rendezvous.port) == ("127.0.0.1", 29500)
        assert made.rendezvous.is_tentative
        assert made.nodes[1].ranks[0].argv == (sys.executable, "-u", "train.py")
        assert asked == []
    assert not list(tmp_path.glob("n*/.ugro/agents"))


@in_loop
async def test_a_refusal_leaves_no_plan_behind(tmp_path: Path) -> None:
    where = placement("n1", "n2")
    async with rig_of(with_torch(tmp_path, n1="2.6.0", n2="2.5.1"), []) as rig:
        running = await rig.started(JobSpec("j", ("x",), Launcher.DDP), where)
        with pytest.raises(LaunchRefused, match="torch differs"):
            await rig.launch.plan(running)
        assert await rig.store.jobs.plan(running) is None

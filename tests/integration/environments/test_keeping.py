"""Environments that runs use stay; others go, the least recently used first; a full disk leaves nothing half."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import in_loop
from tests.rig import disk
from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import LocalNode
from tests.rig.python_envs import python_envs, recipe
from tests.rig.waiting import wait_until
from tests.rig.wheels import Wheel, wheel
from ugro.features.environments.model import EnvOnNode, EnvProgress, EnvRemoved, EnvsTidied, Made
from ugro.kernel.support.errors import EnvFailed
from ugro.node import durable

Wheels = tuple[Wheel, Wheel]


def nothing(progress: EnvProgress) -> None:
    pass


def age(root: Path, name: str, seconds: float) -> None:
    """As if it had been used so long ago."""
    record = root / ".ugro" / "environments" / name / "made.json"
    then = record.stat().st_mtime - seconds
    os.utime(record, (then, then))


class Kept:
    """The environments of a node, each asked over a link of its own: a test reads like a script."""

    def __init__(self, node: LocalNode) -> None:
        self.node = node

    def make(self, uv: Path, wheels: Sequence[Wheel], name: str = "e1") -> Made:
        async def work() -> Made:
            async with python_envs(self.node.root) as envs:
                return await envs.make(recipe(self.node.root, uv, wheels, name=name), nothing)

        return self.node.wait(work())

    def remove(self, name: str = "e1") -> EnvRemoved:
        async def work() -> EnvRemoved:
            async with python_envs(self.node.root) as envs:
                return (await envs.remove([name])).removed[0]

        return self.node.wait(work())

    def list(self) -> tuple[EnvOnNode, ...]:
        async def work() -> tuple[EnvOnNode, ...]:
            async with python_envs(self.node.root) as envs:
                return await envs.list()

        return self.node.wait(work())

    def gc(self, limit_bytes: int) -> EnvsTidied:
        async def work() -> EnvsTidied:
            async with python_envs(self.node.root) as envs:
                return await envs.gc(limit_bytes)

        return self.node.wait(work())


@pytest.fixture
def kept(node: LocalNode) -> Kept:
    return Kept(node)


def sleeping(ledger: Ledger, name: str = "e1") -> dict[str, Any]:
    return {"ranks": [ledger.rank(0, "sleep")], "grace_s": 1, "environment": name}


@pytest.mark.proof
def test_an_environment_stays_as_long_as_a_run_uses_it(
    node: LocalNode, kept: Kept, ledger: Ledger, uv: Path, wheels: Wheels
) -> None:
    kept.make(uv, wheels)
    age(node.root, "e1", 9999)
    link = node.link()
    node.call(link, "start", job="17", attempt=1, spec=sleeping(ledger))
    [listed] = kept.list()
    assert (listed.in_use, listed.made.used_at >= listed.made.made_at) == (1, True)  # the start was a use
    assert kept.remove().problem == "in-use"
    age(node.root, "e1", 9999)
    assert kept.gc(0).removed == ()
    node.call(link, "stop", job="17", attempt=1)
    [listed] = kept.list()
    assert listed.in_use == 0
    assert kept.remove().problem is None
    assert kept.list() == ()


@pytest.mark.proof
def test_a_run_whose_supervisor_was_killed_still_uses_its_environment(
    node: LocalNode, kept: Kept, ledger: Ledger, uv: Path, wheels: Wheels
) -> None:
    kept.make(uv, wheels)
    link = node.link()
    node.call(link, "start", job="17", attempt=1, spec=sleeping(ledger))
    node.kill_supervisor("17", 1)
    wait_until(lambda: [run["status"] for run in node.runs()] == ["dead"], what="the supervisor to be gone")
    assert kept.remove().problem == "in-use"
    node.call(link, "stop", job="17", attempt=1)
    assert kept.remove().problem is None


@pytest.mark.proof
@in_loop
async def test_nobody_waits_until_a_large_one_is_deleted_and_what_is_left_of_it_goes_later(
    tmp_path: Path, uv: Path, wheels: Wheels
) -> None:
    root = tmp_path / "root"
    folder = root / ".ugro" / "environments"
    wanted = recipe(root, uv, wheels)
    async with python_envs(root, crash="env.aside:pause") as envs:
        await envs.make(wanted, nothing)
        found = await envs.remove(["e1", "e2"])
        assert [one.problem for one in found.removed] == [None, "not-found"]
        assert found.is_deleting
        assert await envs.list() == ()
        assert len((await envs.make(wanted, nothing)).packages) == 2, "it can be made again at once"
    [left] = folder.glob("*.removing")
    async with python_envs(root) as envs:  # whoever was to delete it was killed
        tidied = await envs.gc(10**12)
        assert (tidied.removed, tidied.is_deleting) == ((), False)
        assert not left.exists()
        again = await envs.remove(["e1"])
        assert (again.is_deleting, list(folder.glob("e1*"))) == (False, [])


@pytest.mark.proof
def test_a_run_does_not_start_without_its_environment(node: LocalNode, ledger: Ledger) -> None:
    started = node.call(node.link(), "start", job="17", attempt=1, spec=sleeping(ledger, "gone"))
    [run] = node.runs()
    assert run["exit"]["outcome"] == "start-failed", started
    assert "the Python environment gone is not on this node" in run["exit"]["reason"]
    assert run["exit"]["failure"]["kind"] == "node"


@pytest.mark.proof
def test_the_least_recently_used_goes_first_and_downloads_before_it(
    node: LocalNode, kept: Kept, uv: Path, tmp_path: Path
) -> None:
    for name, version in (("old", "1"), ("new", "2")):
        kept.make(uv, [wheel(tmp_path, "tiny", version, files={"tiny/data": os.urandom(2 << 20)})], name)
    leftover = node.root / ".ugro" / "environments" / "old.0.removing"
    leftover.mkdir()
    age(node.root, "old", 9999)
    age(node.root, "new", 5000)
    all_bytes = kept.gc(1 << 40).kept_bytes
    assert all_bytes >= sum(one.made.size for one in kept.list()) > 4 << 20
    tidied = kept.gc(all_bytes)
    assert (tidied.removed, leftover.exists()) == ((), False)
    tidied = kept.gc(all_bytes - 1000)
    assert tidied.removed == ("old",)
    assert 2 << 20 <= tidied.kept_bytes < all_bytes
    assert [one.name for one in kept.list()] == ["new"]
    assert kept.gc(0).removed == ("new",)
    assert list((node.root / ".ugro" / "environments").glob("[!.]*")) == []


@pytest.fixture
def small(tmp_path: Path) -> Iterator[disk.SmallDisk]:
    if (why := disk.available()) is not None:
        pytest.skip(why)
    small = disk.SmallDisk(tmp_path / "disk", 260 << 20)
    small.mount()
    yield small
    small.unmount()


@pytest.mark.proof
@in_loop
async def test_a_full_disk_is_the_reason_and_leaves_room_again(
    small: disk.SmallDisk, uv: Path, tmp_path: Path
) -> None:
    root = small.folder / "root"
    root.mkdir()
    # Zeros: what is sent is small, and what it becomes is not.
    large = wheel(tmp_path, "large", files={f"large/{number}": bytes(50 << 20) for number in range(5)})
    async with python_envs(root) as envs:
        wanted = recipe(root, uv, (large,))
        with pytest.raises(EnvFailed) as before:
            await envs.make(wanted, nothing)
        assert before.value.cause == "no-space"
        assert "needs 250.0 MiB" in before.value.message
        # One whose size nobody knows before: from a folder that the node has.
        unknown = replace(wanted, wheels=(), find_links=(str(tmp_path),), index_url=None)
        with pytest.raises(EnvFailed) as during:
            await envs.make(unknown, nothing)
        assert during.value.cause == "no-space", (during.value, during.value.tail)
        assert sorted(path.name for path in (root / ".ugro" / "environments").glob("[!.]*")) == []
        tiny = wheel(tmp_path / "tiny", "tiny")
        await envs.gc(0)  # what was downloaded
        assert dict((await envs.make(recipe(root, uv, (tiny,), name="e2"), nothing)).packages) == {"tiny": "1.0"}


@pytest.mark.proof
@in_loop
async def test_the_space_of_one_that_is_being_deleted_counts_as_free(
    small: disk.SmallDisk, uv: Path, wheels: Wheels
) -> None:
    root = small.folder / "root"
    aside = root / ".ugro" / "environments" / "old.00.removing"
    aside.mkdir(parents=True)
    wanted = recipe(root, uv, wheels)
    taken = small.fill()
    (small.folder / "ballast").rename(aside / "large")
    os.truncate(aside / "large", taken - (8 << 20))  # room for a link, and not for an environment
    async with python_envs(root) as envs:
        assert len((await envs.make(wanted, nothing)).packages) == 2
    assert not aside.exists()


@pytest.mark.proof
def test_one_that_a_run_of_another_machine_uses_is_not_made_again(
    node: LocalNode, kept: Kept, uv: Path, wheels: Wheels
) -> None:
    made = kept.make(uv, wheels)
    Path(made.python).unlink()  # this machine has no such interpreter
    run = node.root / ".ugro" / "agents" / "agent-9@there@elsewhere" / "runs" / "17.1"
    run.mkdir(parents=True)
    durable.write_json(str(run / "spec.json"), {"spec": {"environment": "e1"}})
    (run / "claim").write_text("another-boot")
    with pytest.raises(EnvFailed, match="a run still uses it"):
        kept.make(uv, wheels)
    assert Path(made.python).parent.is_dir()
    assert kept.remove().problem == "in-use"
    durable.write_json(str(run / "exit.json"), {"outcome": "succeeded"})
    assert len(kept.make(uv, wheels).packages) == 2

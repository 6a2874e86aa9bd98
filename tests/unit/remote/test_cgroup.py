"""Where control groups can be made on a node, from what the kernel tells; and that limits hold, where they can be."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.waiting import wait_until
from ugro.kernel.links.transport import node_program
from ugro.node import loader
from ugro.node.process import cgroup
from ugro.node.process.cgroup import CPU, KILL, MEMORY, Home, enforcement
from ugro.node.runs.run_state import chosen

SCOPE = "user.slice/user-1000.slice/user@1000.service/app.slice/ugro-run-7-1-abcd.scope"
HUNGRY = "held = [bytearray(1 << 20) for _ in range(300)]"  # MiB, and no more if nothing stops it


def second(tmp_path: Path, group: str = "", controllers: str = "cpu memory", *, is_container: bool = False) -> str:
    """A hierarchy of version 2, and the line of its mount."""
    (tmp_path / group).mkdir(parents=True, exist_ok=True)
    for folder in {tmp_path, tmp_path / group}:
        (folder / "cgroup.procs").touch()
        (folder / "cgroup.controllers").write_text(controllers)
        (folder / "cgroup.subtree_control").touch()
    if is_container:
        (tmp_path / "cgroup.type").touch()
    return f"30 25 0:26 / {tmp_path} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_as_root_groups_are_made_below_the_root_group(tmp_path: Path) -> None:
    home = Home(2, f"{tmp_path}/ugro")
    mounts = second(tmp_path, "user.slice/session-3.scope")
    assert cgroup.homes(mounts, "0::/user.slice/session-3.scope\n") == {KILL: home, CPU: home, MEMORY: home}


def test_in_a_container_that_is_not_the_whole_machine_none_are_made(tmp_path: Path) -> None:
    assert cgroup.homes(second(tmp_path, is_container=True), "0::/\n") == {}


def test_in_a_scope_that_was_delegated_they_are_made_inside_also_once_its_supervisor_moved(tmp_path: Path) -> None:
    mounts = second(tmp_path, SCOPE, is_container=True)
    home = Home(2, f"{tmp_path}/{SCOPE}", is_scope=True)
    everything = {KILL: home, CPU: home, MEMORY: home}
    assert cgroup.homes(mounts, f"0::/{SCOPE}\n") == everything
    assert cgroup.homes(mounts, f"0::/{SCOPE}/supervisor\n") == everything
    (tmp_path / SCOPE / "cgroup.controllers").write_text("cpu pids")
    assert set(cgroup.homes(mounts, f"0::/{SCOPE}\n")) == {KILL, CPU}
    (tmp_path / SCOPE / "cgroup.subtree_control").unlink()
    assert cgroup.homes(mounts, f"0::/{SCOPE}\n") == {}


def test_controllers_of_version_1_are_used_where_version_2_does_not_have_them(tmp_path: Path) -> None:
    mounts = second(tmp_path / "unified", controllers="hugetlb")
    for name, own in (("cpu,cpuacct", ""), ("memory", "login")):
        (tmp_path / name / own).mkdir(parents=True)
        mounts += f"31 25 0:27 /box {tmp_path}/{name} rw - cgroup cgroup rw,{name}\n"
    found = cgroup.homes(mounts, "4:memory:/box/login\n2:cpu,cpuacct:/box\n0::/\n")
    assert found == {
        KILL: Home(2, f"{tmp_path}/unified/ugro"),
        CPU: Home(1, f"{tmp_path}/cpu,cpuacct"),
        MEMORY: Home(1, f"{tmp_path}/memory/login"),
    }


def test_limits_of_version_2_are_written_as_the_kernel_wants_them(tmp_path: Path) -> None:
    mounts = second(tmp_path, SCOPE)
    group = cgroup.Group("7.1", cgroup.homes(mounts, f"0::/{SCOPE}\n"))
    (tmp_path / SCOPE / "cgroup.procs").write_text("")
    group.make()
    [folder] = map(Path, group.folders)
    assert folder == tmp_path / SCOPE / "7.1"
    for name in ("cpu.max", "memory.max", "memory.swap.max"):
        (folder / name).touch()
    group.limit(2, 4 << 30)
    assert (folder / "cpu.max").read_text() == "200000 100000"
    assert (folder / "memory.max").read_text() == str(4 << 30)
    assert (folder / "memory.swap.max").read_text() == "0"
    (folder / "memory.events").write_text("low 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert group.oom_kills() == 2
    with pytest.raises(OSError, match="memory"):
        cgroup.Group("7.1", {}).limit(None, 1 << 30)


@pytest.mark.skipif(not {CPU, MEMORY} <= set(cgroup.detect()), reason="no control groups can be made here")
def test_a_real_group_holds_its_limits_says_who_was_killed_and_ends_all_that_is_in_it() -> None:
    group = cgroup.create(f"test.{os.getpid()}")
    try:
        group.limit(1, 64 << 20)
        hungry = subprocess.Popen([sys.executable, "-c", HUNGRY], preexec_fn=group.enter)
        assert hungry.wait(60) == -signal.SIGKILL
        assert group.oom_kills() == 1
        argv = ["sh", "-c", "sleep 1000 & setsid sleep 1000 & wait"]
        tree = subprocess.Popen(argv, preexec_fn=group.enter)
        wait_until(lambda: len(group.processes()) == 3, 10, "three processes in the group")
        group.kill()
        assert tree.wait(10) == -signal.SIGKILL
    finally:
        group.kill()
        assert group.remove()
    assert not any(os.path.exists(folder) for folder in group.folders)


IN_A_SCOPE = """
import os, subprocess, sys
from ugro.node.process import cgroup
homes = cgroup.detect()
assert set(homes) & {cgroup.KILL} and homes[cgroup.KILL].is_scope, homes
group = cgroup.create("7.1", {cgroup.KILL: homes[cgroup.KILL]})
tree = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"], preexec_fn=group.enter)
while len(group.processes()) < 2: pass
assert open("/proc/self/cgroup").read().splitlines()[-1].endswith(".scope/supervisor")
group.kill()
assert tree.wait() == -9 and group.remove()
"""


@pytest.mark.skipif(cgroup.detect().get(CPU, Home(0, "")).version != 1, reason="the cpu controller is not of version 1")
def test_a_group_inside_one_with_less_than_it_asks_for_is_held_by_that_one() -> None:
    outer = cgroup.create(f"outer-{os.getpid()}", {CPU: cgroup.detect()[CPU]})
    [folder] = outer.folders
    Path(folder, "cpu.cfs_quota_us").write_text("25000")
    inner = cgroup.create("inner", {CPU: Home(1, folder)})
    try:
        inner.limit(1, None)
        assert Path(inner.folders[0], "cpu.cfs_quota_us").read_text().strip() == "-1"
    finally:
        assert inner.remove()
        assert outer.remove()


@pytest.mark.skipif(not cgroup.detect().get(KILL), reason="no groups of version 2 can be made here")
def test_a_user_makes_groups_in_a_real_scope_that_was_delegated_to_it() -> None:
    """The kernel's rules for moving between groups hold, whatever controllers there are."""
    home = cgroup.detect()[KILL]
    scope = Path(home.folder).parent / f"ugro-run-test-{os.getpid()}.scope"
    scope.mkdir()
    try:
        for path in (scope, scope / "cgroup.procs", scope / "cgroup.subtree_control", scope / "cgroup.threads"):
            os.chown(path, 4321, 4321)
        enter = f'echo $$ > "{scope}/cgroup.procs" && exec "$@"'
        as_user = ["setpriv", "--reuid=4321", "--regid=4321", "--clear-groups"]
        # As on a node: that user cannot read this folder.
        code = f"import sys; exec({inspect.getsource(loader)!r}); install(sys.stdin.buffer.read())\n{IN_A_SCOPE}"
        argv = ["sh", "-c", enter, "sh", *as_user, "/usr/bin/python3", "-I", "-c", code]
        done = subprocess.run(argv, input=node_program().content, capture_output=True, timeout=30, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
    finally:
        wait_until(lambda: all(_removed(folder) for folder in [*scope.glob("*/"), scope]), 10, "the scope to go")


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


SECOND, FIRST, OWN = Home(2, "/cg/ugro"), Home(1, "/cg/memory"), Home(2, "/cg/x.scope", is_scope=True)


@pytest.mark.parametrize(
    ("homes", "delegated", "cpus", "memory"),
    [
        ({CPU: SECOND, MEMORY: SECOND, KILL: SECOND}, (), "cgroup2", "cgroup2"),
        ({CPU: SECOND, KILL: SECOND}, (), "cgroup2", "none"),
        ({CPU: SECOND, MEMORY: FIRST}, (), "cgroup2", "cgroup1"),
        ({}, ("cpu", "memory", "pids"), "systemd", "systemd"),
        ({}, ("memory", "pids"), "affinity", "systemd"),
        ({CPU: OWN, MEMORY: OWN}, (), "systemd", "systemd"),
        ({KILL: SECOND}, (), "affinity", "none"),
        ({}, (), "affinity", "none"),
    ],
)
def test_what_a_node_offers_decides_how_limits_are_enforced(
    homes: dict[str, Home], delegated: tuple[str, ...], cpus: str, memory: str
) -> None:
    assert enforcement(homes, delegated, can_bind=True) == {"cpus": cpus, "memory": memory}
    if cpus == "affinity":
        assert enforcement(homes, delegated, can_bind=False)["cpus"] == "none"


@pytest.mark.parametrize(
    ("allowed", "free", "count", "cores"),
    [
        ([0, 1, 2, 3], [2, 3], 2, [2, 3]),
        ([0, 1, 2, 3], [3], 2, [0, 3]),
        ([0, 1], [], 1, [0]),
        ([4, 5], [4, 5], 8, [4, 5]),
    ],
)
def test_cores_that_no_other_run_has_come_first(
    allowed: list[int], free: list[int], count: int, cores: list[int]
) -> None:
    assert chosen(allowed, free, count) == cores

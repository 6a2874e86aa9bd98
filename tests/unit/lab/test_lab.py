"""What a lab is made of, before anything is made: shapes, quotas, places for control groups, files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ugro.kernel.config.load import load_config
from ugro.kernel.config.schema import Config
from ugro.kernel.links.model import Role
from ugro.kernel.support.errors import UsageError
from ugro.lab import enter
from ugro.lab import lab as cgroups
from ugro.lab import nodes as files
from ugro.lab.lab import Hierarchy
from ugro.lab.nodes import LabNode, Shape, Throttle, Wish, parse_speeds
from ugro.lab.throttle import home_of


def shape_of(lab: Path, speeds: Mapping[str, float], cgroup: Path | None = None) -> Shape:
    throttle = Throttle.CGROUP if cgroup else Throttle.DUTY_CYCLE
    return Shape(
        tuple(
            LabNode(name, speed, str(lab / name), throttle, str(cgroup / name) if cgroup else None)
            for name, speed in speeds.items()
        )
    )


# --- wishes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "speeds"),
    [
        (Wish(), (1, 0.5, 0.25)),
        (Wish(nodes=1), (1,)),
        (Wish(nodes=5), (1, 0.5, 0.25, 0.25, 0.25)),
        (Wish(speeds=(0.5,)), (0.5,)),
        (Wish(speeds=(1, 0.1, 1, 0.1)), (1, 0.1, 1, 0.1)),
        (Wish(nodes=3, speeds=(1, 0.5)), (1, 0.5, 0.5)),
        (Wish(nodes=64), (1, 0.5, *[0.25] * 62)),
    ],
)
def test_every_node_gets_a_speed(wish: Wish, speeds: tuple[float, ...]) -> None:
    assert wish.wanted_speeds() == speeds


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Wish(nodes=0), "1 to 64 nodes, not 0"),
        (Wish(nodes=-1), "1 to 64 nodes, not -1"),
        (Wish(nodes=65), "1 to 64 nodes, not 65"),
        (Wish(speeds=(1.0,) * 65), "1 to 64 nodes, not 65"),
        (Wish(nodes=1, speeds=(1, 0.5)), "2 speeds for 1 node"),
        (Wish(nodes=2, speeds=(1, 0.5, 0.25)), "3 speeds for 2 nodes"),
    ],
)
def test_a_lab_that_makes_no_sense_is_refused(wish: Wish, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        wish.wanted_speeds()


@pytest.mark.parametrize("gpus", [-1, 17])
def test_an_impossible_number_of_gpus_is_refused(gpus: int) -> None:
    with pytest.raises(UsageError, match="0 to 16 simulated GPUs"):
        Wish(gpus=gpus).wanted_gpus()


@pytest.mark.parametrize("text", ["", "1,", "fast", "0", "-1", "1.01", "nan", "inf", "1;0.5", "0.001"])
def test_a_speed_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_speeds(text)
    assert caught.value.hint is not None
    assert "--speeds 1,0.5,0.25" in caught.value.hint


def test_speeds_are_read_with_and_without_spaces() -> None:
    assert parse_speeds("1, 0.5,0.25") == (1, 0.5, 0.25)


def test_only_what_was_asked_for_is_compared_with_a_lab_that_is_up() -> None:
    lab = shape_of(Path("/x"), {"lab1": 1.0, "lab2": 0.3}, Path("/cgroup"))
    granted = [Wish(), Wish(nodes=2, speeds=(1, 0.3)), Wish(speeds=(1, 0.3)), Wish(gpus=0)]
    refused = [Wish(nodes=2), Wish(nodes=3), Wish(speeds=(1, 0.5)), Wish(gpus=1), Wish(without_cgroups=True)]
    assert [wish.is_granted_by(lab) for wish in granted] == [True] * 4
    assert [wish.is_granted_by(lab) for wish in refused] == [False] * 5


# --- control groups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [1, 0.5, 0.25, 0.05, 0.02, 0.01])
def test_a_quota_is_the_speed_and_never_less_than_the_kernel_takes(speed: float) -> None:
    quota_us, period_us = cgroups.quota(speed)
    assert quota_us / period_us == pytest.approx(speed, rel=0.01)
    assert quota_us >= 1000
    assert 1000 <= period_us <= 1_000_000


def test_limits_are_written_as_each_version_wants_them() -> None:
    assert cgroups.limits(2, 0.25) == [("cpu.max", "2500 10000"), ("cpu.weight", "25")]
    assert cgroups.limits(1, 0.25)[1:] == [
        ("cpu.cfs_period_us", "10000"),
        ("cpu.cfs_quota_us", "2500"),
        ("cpu.shares", "256"),
    ]


V1 = "29 23 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
V1_OTHER = "30 23 0:27 / /sys/fs/cgroup/cpuset rw,nosuid shared:10 - cgroup cgroup rw,cpuset\n"
V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V2_IN_CONTAINER = "31 23 0:28 /docker/ab /sys/fs/my\\040group rw,nosuid - cgroup2 cgroup2 rw\n"
DISK = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"


@pytest.mark.parametrize(
    ("mounts", "groups", "found"),
    [
        (
            V1_OTHER + V1 + DISK,
            "3:cpu,cpuacct:/user.slice\n2:cpuset:/other\n0::/\n",
            Hierarchy(1, Path("/sys/fs/cgroup/cpu,cpuacct"), ("user.slice",)),
        ),
        (
            DISK + V2,
            "0::/user.slice/user-1.slice/session-2.scope\n",
            Hierarchy(2, Path("/sys/fs/cgroup"), ("user.slice", "user-1.slice", "session-2.scope")),
        ),
        (V2_IN_CONTAINER, "0::/docker/ab/c\n", Hierarchy(2, Path("/sys/fs/my group"), ("c",))),
        (V2_IN_CONTAINER, "0::/docker/abc\n", Hierarchy(2, Path("/sys/fs/my group"), ())),
        (V2, "0::/\n", Hierarchy(2, Path("/sys/fs/cgroup"), ())),
    ],
)
def test_the_cpu_controller_is_found_and_our_own_group_in_it(
    mounts: str, groups: str, found: Hierarchy
) -> None:
    assert list(cgroups.hierarchies(mounts, groups)) == [found]


def test_a_machine_without_control_groups_has_no_hierarchy() -> None:
    assert list(cgroups.hierarchies(DISK, "")) == []


def test_a_group_may_be_made_anywhere_from_the_mount_down_to_our_own() -> None:
    places = Hierarchy(2, Path("/m"), ("a", "b")).places()
    assert list(places) == [Path("/m"), Path("/m/a"), Path("/m/a/b")]


def kernel_files(folder: Path, *names: str) -> None:
    """What the kernel puts into a new group; here it must stand there before."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()


def test_with_version_2_the_cpu_controller_is_passed_down_where_it_may_be(tmp_path: Path) -> None:
    kernel_files(tmp_path / "user", "cgroup.subtree_control")  # the mount itself has none: not ours to change
    kernel_files(tmp_path / "user" / "lab", "cgroup.subtree_control", "cpu.weight")
    kernel_files(tmp_path / "user" / "lab" / "lab1", "cpu.max", "cpu.weight")
    (tmp_path / "user" / "cgroup.subtree_control").write_text("memory cpu pids")

    group = cgroups.create(Hierarchy(2, tmp_path, ("user",)), "lab", {"lab1": 0.5})

    assert group == tmp_path / "user" / "lab"
    assert (tmp_path / "user" / "cgroup.subtree_control").read_text() == "memory cpu pids"
    assert (group / "cgroup.subtree_control").read_text() == "+cpu"
    assert (group / "lab1" / "cpu.max").read_text() == "5000 10000"
    assert (group / "lab1" / "cgroup.procs").read_text().strip().isdigit()


@pytest.mark.parametrize(("speed", "weight"), [(0.5, "3200"), (10_000.0, "10000")])
def test_precedence_is_for_nodes_that_leave_something_of_the_machine(
    tmp_path: Path, speed: float, weight: str
) -> None:
    kernel_files(tmp_path / "lab", "cgroup.subtree_control", "cpu.weight")
    kernel_files(tmp_path / "lab" / "lab1", "cpu.max", "cpu.weight")
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    group = cgroups.create(Hierarchy(2, tmp_path, ()), "lab", {"lab1": speed}, takes_precedence=True)
    assert group is not None
    assert (group / "cpu.weight").read_text() == weight


def test_where_no_group_can_be_made_there_is_none_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for version in (1, 2):
        assert cgroups.create(Hierarchy(version, tmp_path, ("own",)), "lab", {"lab1": 0.5}) is None
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["own"]


# --- entering --------------------------------------------------------------------------------------------------


def test_entering_takes_its_options_and_leaves_the_command_alone() -> None:
    words = "--home /h --speed 0.25 --env A=1=2 --path /p sh -c --home"
    entry = enter.parse(words.split())
    assert (entry.home, entry.speed, entry.cgroup) == ("/h", 0.25, "")
    assert (entry.env, entry.paths) == ({"A": "1=2"}, ["/p"])
    assert entry.command == ["sh", "-c", "--home"]


@pytest.mark.parametrize("words", ["", "--home /h", "true", "--hom /h true", "--home"])
def test_entering_without_a_home_or_a_command_is_refused(
    words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        enter.parse(words.split())
    assert capfd.readouterr().err.strip()


def test_a_node_has_a_home_of_its_own_and_not_the_agents() -> None:
    entry = enter.parse(["--home", "/h", "--env", "X=y", "--path", "/p", "true"])
    ours = {"HOME": "/me", "UGRO_HOME": "/u", "UGRO_CLUSTER": "/c", "PATH": "/bin", "LANG": "C"}
    env = enter.environment(entry, ours)
    assert env.pop("TORCHINDUCTOR_CACHE_DIR").startswith("/h/")
    assert env == {"HOME": "/h", "UGRO_LAB_NODE": "/h", "PATH": "/p:/bin", "LANG": "C", "X": "y"}


def test_a_process_belongs_to_a_node_by_the_mark_in_its_environment_alone() -> None:
    assert home_of(b"A=UGRO_LAB_NODE=/x\0UGRO_LAB_NODE=/h/lab1\0Z=1\0") == "/h/lab1"
    assert home_of(b"A=1\0XUGRO_LAB_NODE=/h\0") is None
    assert home_of(b"") is None


# --- files -----------------------------------------------------------------------------------------------------


def load(folder: Path, text: str) -> Config:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return load_config(path, {})


def test_the_cluster_file_is_one_that_an_agent_takes(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, {"lab1": 1.0, "lab2": 0.25})
    config = load(tmp_path, files.cluster_text(shape, {"lab2": ["--env", "A=true"]}))

    first, second = config.nodes
    assert config.cluster.name == "lab"
    assert [first.name, second.name] == ["lab1", "lab2"]
    assert [first.role, second.role] == [Role.MASTER, Role.WORKER]
    assert first.labels == second.labels == ("lab",)
    assert second.remote_root.startswith(f"{tmp_path}/lab2/")
    assert second.transport[-4:] == ("--speed", "0.25", "--env", "A=true")


def test_nodes_in_control_groups_join_them(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, {"lab1": 0.5}, Path("/cgroup/lab"))
    (node,) = load(tmp_path, files.cluster_text(shape, {})).nodes
    assert node.transport[-2:] == ("--cgroup", "/cgroup/lab/lab1")


def test_a_lab_is_remembered_and_written_only_when_it_differs(tmp_path: Path) -> None:
    cluster_file = tmp_path / "cluster.yaml"
    shape = shape_of(tmp_path, {"lab1": 1.0, "lab2": 0.25})
    files.write(tmp_path, shape, cluster_file)
    before = cluster_file.stat().st_ino
    files.write(tmp_path, shape, cluster_file)

    assert files.remembered(tmp_path) == shape
    assert cluster_file.stat().st_ino == before
    assert (tmp_path / "lab2").is_dir()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"nodes": [{"name": 1}]}', '{"gpus": 1}'])
def test_a_memory_that_makes_no_sense_is_no_lab(tmp_path: Path, text: str) -> None:
    (tmp_path / "lab.json").write_text(text)
    assert files.remembered(tmp_path) is None

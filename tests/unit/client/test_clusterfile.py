from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ugro.client.launcher import find_cluster_file, upwards, why_untrusted
from ugro.kernel.support.errors import ConfigError, NotAllowed
from ugro.kernel.support.state_dir import StateDir


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, StateDir]:
    cwd, home = tmp_path / "cwd", StateDir(tmp_path / "home")
    cwd.mkdir()
    home.path.mkdir()
    return cwd, home


def test_the_file_is_looked_for_in_the_promised_order(places: tuple[Path, StateDir], tmp_path: Path) -> None:
    cwd, home = places
    flag, variable = tmp_path / "flag.yaml", tmp_path / "variable.yaml"
    env = {"UGRO_CLUSTER": str(variable)}
    for path in (flag, variable, cwd / "cluster.yaml", home.path / "cluster.yaml"):
        path.write_text("nodes: [a]")
    assert find_cluster_file(flag, env, cwd, home).path == flag
    assert find_cluster_file(None, env, cwd, home).path == variable
    assert find_cluster_file(None, {"UGRO_CLUSTER": ""}, cwd, home).path == cwd / "cluster.yaml"
    (cwd / "cluster.yaml").unlink()
    assert find_cluster_file(None, {}, cwd, home).path == home.path / "cluster.yaml"
    (home.path / "cluster.yaml").unlink()
    assert find_cluster_file(None, {}, cwd, home).path is None


def test_a_relative_file_is_below_the_working_directory(places: tuple[Path, StateDir]) -> None:
    cwd, home = places
    (cwd / "lab.yaml").write_text("nodes: [a]")
    assert find_cluster_file(Path("lab.yaml"), {}, cwd, home).path == cwd / "lab.yaml"
    assert find_cluster_file(None, {"UGRO_CLUSTER": "lab.yaml"}, cwd, home).path == cwd / "lab.yaml"


def test_a_file_that_was_asked_for_must_exist(places: tuple[Path, StateDir]) -> None:
    cwd, home = places
    (cwd / "cluster.yaml").write_text("nodes: [a]")
    with pytest.raises(ConfigError, match=r"missing\.yaml: no such cluster file") as flag:
        find_cluster_file(Path("missing.yaml"), {}, cwd, home)
    assert "--cluster" in str(flag.value.hint)
    with pytest.raises(ConfigError, match=r"missing\.yaml: no such cluster file") as variable:
        find_cluster_file(None, {"UGRO_CLUSTER": "missing.yaml"}, cwd, home)
    assert "UGRO_CLUSTER" in str(variable.value.hint)
    with pytest.raises(ConfigError):
        find_cluster_file(Path("nul\0.yaml"), {}, cwd, home)


def test_a_link_that_leads_nowhere_is_not_passed_over(places: tuple[Path, StateDir]) -> None:
    cwd, home = places
    (home.path / "cluster.yaml").write_text("nodes: [a]")
    os.symlink(cwd / "gone", cwd / "cluster.yaml")
    assert find_cluster_file(None, {}, cwd, home).path == cwd / "cluster.yaml"


def test_a_lab_that_is_up_comes_before_the_folder_but_not_before_a_flag(places: tuple[Path, StateDir]) -> None:
    cwd, home = places
    home.lab.mkdir()
    for path in (home.lab_cluster, cwd / "cluster.yaml", cwd / "flag.yaml"):
        path.write_text("nodes: [a]")
    assert find_cluster_file(None, {}, cwd, home).path == home.lab_cluster
    assert find_cluster_file(Path("flag.yaml"), {}, cwd, home).path == cwd / "flag.yaml"


def test_only_the_state_directorys_file_is_a_mere_fallback(places: tuple[Path, StateDir]) -> None:
    cwd, home = places
    (home.path / "cluster.yaml").write_text("nodes: [a]")
    assert not find_cluster_file(None, {}, cwd, home).is_asked_for
    (cwd / "cluster.yaml").write_text("nodes: [a]")
    assert find_cluster_file(None, {}, cwd, home).is_asked_for


def test_a_folder_belongs_to_the_cluster_of_the_next_folder_above_that_has_one(places: tuple[Path, StateDir]) -> None:
    cwd, home = places
    below = cwd / "a project" / "src" / "deep"
    below.mkdir(parents=True)
    (home.path / "cluster.yaml").write_text("nodes: [mine]")
    assert find_cluster_file(None, {}, below, home).path == home.path / "cluster.yaml"
    (cwd / "cluster.yaml").write_text("nodes: [a]")
    assert find_cluster_file(None, {}, below, home).path == cwd / "cluster.yaml"
    (cwd / "a project" / "cluster.yaml").write_text("nodes: [b]")
    found = find_cluster_file(None, {}, below, home)
    assert (found.path, found.is_asked_for) == (cwd / "a project" / "cluster.yaml", True)


def test_nothing_above_the_home_folder_is_looked_at(places: tuple[Path, StateDir]) -> None:
    cwd, home = places
    user, below = cwd / "user", cwd / "user" / "project"
    below.mkdir(parents=True)
    (cwd / "link").symlink_to(user)
    (cwd / "cluster.yaml").write_text("nodes: [a]")
    assert find_cluster_file(None, {"HOME": str(user)}, below, home).path is None
    assert find_cluster_file(None, {"HOME": str(cwd / "link")}, below, home).path is None, "however it is spelt"
    (user / "cluster.yaml").write_text("nodes: [b]")
    assert find_cluster_file(None, {"HOME": str(user)}, below, home).path == user / "cluster.yaml"


def test_the_state_directorys_file_is_the_users_also_from_within_it(places: tuple[Path, StateDir]) -> None:
    _, home = places
    (home.path / "jobs").mkdir()
    (home.path / "cluster.yaml").write_text("nodes: [a]")
    assert not find_cluster_file(None, {}, home.path / "jobs", home).is_asked_for


def test_another_file_system_is_not_entered() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == Path("/dev").stat().st_dev:
        pytest.skip("/dev/shm is no file system of its own")
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        assert list(upwards(Path(folder), Path("/"))) == [Path(folder), shared]


def test_a_file_that_others_can_write_is_not_obeyed(places: tuple[Path, StateDir], tmp_path: Path) -> None:
    cwd, home = places
    below = cwd / "sub"
    below.mkdir()
    file = cwd / "cluster.yaml"
    file.write_text("nodes: [a]")
    cwd.chmod(0o1777)
    with pytest.raises(NotAllowed, match=r"yaml is not used: every user can change it or its folder") as caught:
        find_cluster_file(None, {}, below, home)
    assert f"UGRO_CLUSTER={file}" in str(caught.value.hint)
    assert find_cluster_file(None, {}, cwd, home).path == file, "in the folder itself its owner decides"
    assert find_cluster_file(None, {"UGRO_CLUSTER": str(file)}, below, home).path == file, "a named file is meant"
    cwd.chmod(0o755)
    assert find_cluster_file(None, {}, below, home).path == file


def test_a_file_of_another_user_is_not_obeyed(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o644)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    file, link, folder = (tmp_path / "file").stat(), (tmp_path / "link").lstat(), tmp_path.stat()
    me = file.st_uid
    assert why_untrusted((link, file), folder, me, is_above=True) is None
    fields = list(file)
    fields[4] = me + 7
    theirs = os.stat_result(fields)
    for found in ((theirs, theirs), (link, theirs), (theirs, file)):
        assert why_untrusted(found, folder, me, is_above=False) == "it belongs to another user"

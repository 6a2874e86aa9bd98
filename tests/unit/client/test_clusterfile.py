from __future__ import annotations

import os
from pathlib import Path

import pytest

from ugro.client.clusterfile import find_cluster_file
from ugro.core.errors import ConfigError
from ugro.core.support.state_dir import StateDir


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

"""What cannot work is one clear error that names the node, before anything was started."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.rig.ray import document
from tests.rig.sshd import SshdFarm


def farm(ugro: Ugro, farm_of: Farms, pythons: list[str], **more: object) -> SshdFarm:
    made = farm_of(len(pythons))
    nodes = {node.name: {"python": python} for node, python in zip(made.nodes, pythons, strict=True)}
    ugro.cluster = made.cluster_yaml(nodes=nodes, **more)
    return made


def python_with(folder: Path, ray: str | None) -> str:
    """A Python that says to have this Ray: a folder of metadata before the others."""
    folder.mkdir()
    if ray is not None:
        info = folder / f"ray-{ray}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ray\nVersion: {ray}\n")
        (folder / "aiohttp_cors.py").touch()
        hidden = f'export PYTHONPATH="{folder}"'
        program = sys.executable
    else:
        hidden, program = "", "/usr/bin/python3"
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n{hidden}\nexec {program} "$@"\n')
    python.chmod(0o755)
    return str(python)


def refused(ugro: Ugro, *words: str) -> str:
    done = ugro("cluster", "start", *words)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr
    assert "hint:" in done.stderr
    assert document(ugro("cluster", "status", "--all", "--json")) == {"clusters": []}
    assert document(ugro("status", "--json"))["jobs"] == []
    return done.stderr


def test_a_node_without_ray_is_named(ugro: Ugro, farm_of: Farms, tmp_path: Path) -> None:
    farm(ugro, farm_of, [sys.executable, python_with(tmp_path / "none", None)])
    assert "error: Ray is not installed on n002" in refused(ugro)


@pytest.mark.proof
def test_a_node_with_another_ray_is_named(ugro: Ugro, farm_of: Farms, tmp_path: Path) -> None:
    farm(ugro, farm_of, [sys.executable, sys.executable, python_with(tmp_path / "other", "2.53.1")])
    said = refused(ugro)
    assert "error: Ray differs: n001 and n002 have" in said
    assert "n003 has 2.53.1" in said


@pytest.mark.proof
def test_a_port_that_was_asked_for_and_is_taken_is_named(ugro: Ugro, farm_of: Farms) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        farm(ugro, farm_of, [sys.executable], ray={"redis_port": port})
        assert f"error: n001: port {port} is taken (ray.redis_port in cluster.yaml)" in refused(ugro)


@pytest.mark.proof
def test_too_little_shared_memory_and_too_few_cores_are_named(ugro: Ugro, farm_of: Farms) -> None:
    farm(ugro, farm_of, [sys.executable])
    assert "error: n001: too little shared memory" in refused(ugro, "--object-store-memory", "900GB")
    assert "cores" in refused(ugro, "--workers-per-node", "999")
    assert "cores" in refused(ugro, "--cpus", "9999")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("start", "--name", "bad name"), 2),
        (("start", "--only", "nobody"), 4),
        (("start", "--priority", "much"), 2),
        (("start", "--memory", "lots"), 2),
        (("status", "nobody"), 4),
        (("stop",), 4),
        (("scale", "3"), 4),
        (("env",), 4),
        (("logs", "--worker", "1"), 4),
    ],
)
def test_a_mistake_has_its_exit_code(ugro: Ugro, farm_of: Farms, words: tuple[str, ...], code: int) -> None:
    farm(ugro, farm_of, [sys.executable])
    done = ugro("cluster", *words)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr

"""The jobs of a Ray cluster, and what their ranks pass on to Ray."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.policy.ray.clusters import cluster
from ugro.features.ray.jobs import RaySettings, head_job, rank_argv, rank_env, worker_job
from ugro.features.ray.model import OWN_BYTES, ClusterWish, WorkerSize
from ugro.features.ray.on_node_start import (
    BLOCK,
    FIRST_PORT,
    LEAST_STORE,
    Ports,
    RefusedError,
    blocks_for,
    environment,
    sizes,
    start_words,
    write_programs,
)
from ugro.kernel.support.secrets import masked
from ugro.node.process.processes import is_free

RAY = RaySettings("127.0.0.1", "info")
HEAD = {"role": "head", "title": "n1-head", "cpus": 0, "address": "10.0.0.1", "port": 6379, "dashboard_port": 8265}
WORKER = {"role": "worker", "title": "n1-1", "cpus": 2, "address": "10.0.0.1", "port": 6379}
GIB = 1 << 30


def test_a_job_is_pinned_and_its_token_is_never_shown() -> None:
    made = cluster(2)
    head, worker = head_job(made, RAY), worker_job(made, made.workers[1], RAY)
    assert (head.resources.only, head.resources.cpus) == (("n1",), 0)
    assert (worker.resources.only, worker.resources.cpus) == (("n2",), 2)
    for spec in (head, worker):
        assert made.token not in " ".join(spec.argv)
        assert made.token not in str(masked(spec.env))
        assert made.token not in dict(spec.env)["UGRO_RAY"]
    assert made.token not in repr(made)


def test_a_worker_says_how_fast_its_node_is() -> None:
    made = cluster(1)
    settings = json.loads(dict(worker_job(made, replace(made.workers[0], speed=0.25), RAY).env)["UGRO_RAY"])
    assert settings["resources"] == {"node-n1": 1, "ugro_speed": 0.25}
    assert settings["labels"] == {"ugro-node": "n1", "ugro-speed": "0.25"}


def test_memory_that_was_asked_for_is_reserved_and_limits_ray() -> None:
    made = replace(cluster(1), wish=ClusterWish(size=WorkerSize(memory_bytes=GIB, gpus=2)))
    spec = worker_job(made, made.workers[0], RAY)
    assert (spec.resources.memory_bytes, spec.resources.gpus_per_node) == (GIB + OWN_BYTES, 2)
    assert json.loads(dict(spec.env)["UGRO_RAY"])["memory"] == GIB


def test_every_port_is_fixed_and_no_two_are_the_same() -> None:
    words = start_words(HEAD, 10_000, "10.0.0.1", "/tmp/x", (1, 2))
    ports = [int(word.partition("=")[2]) for word in words if "-port=" in word]
    env = environment(HEAD, {}, 10_000, "/tmp/x/token")
    ports += [int(env["DASHBOARD_METRIC_PORT"]), int(env["AUTOSCALER_METRIC_PORT"])]
    assert len(set(ports)) == len(ports) == 13
    assert {"--head", "--block", "--disable-usage-stats", "--dashboard-host=127.0.0.1"} <= set(words)


def test_a_head_serves_ray_client_at_the_port_that_was_chosen() -> None:
    made = cluster(1)
    settings = json.loads(dict(head_job(made, RAY).env)["UGRO_RAY"])
    assert "--ray-client-server-port=10001" in start_words(settings, 10_112, "10.0.0.1", "/tmp/x", (1, 2))
    assert "--ray-client-server-port=10120" in start_words(WORKER, 10_112, "10.0.0.1", "/tmp/x", (1, 2))
    assert made.head.client_address == "ray://10.0.0.1:10001"
    assert FIRST_PORT > 10_020, "else a rank may have the port of the next head"


def test_variables_are_those_of_the_head_and_the_workers_and_ours_count() -> None:
    env = (("HF_HOME", "/data/hf"), ("RAY_agent_register_timeout_ms", "7"), ("UGRO_RAY", "{}"))
    made = replace(cluster(1), wish=ClusterWish(env=env))
    for spec in (head_job(made, RAY), worker_job(made, made.workers[0], RAY)):
        assert dict(spec.env)["HF_HOME"] == "/data/hf"
        given = environment(json.loads(dict(spec.env)["UGRO_RAY"]), dict(spec.env), 10_112, "t")
        assert (given["HF_HOME"], given["RAY_agent_register_timeout_ms"]) == ("/data/hf", "7")
    assert environment(WORKER, {}, 10_112, "t")["RAY_agent_register_timeout_ms"] == "300000"
    assert "/data/hf" not in repr(made)


def test_what_starts_ray_are_programs(tmp_path: Path) -> None:
    assert write_programs(str(tmp_path)) == str(tmp_path / "start.py")
    for file in ("start.py", "client_server.py"):
        ast.parse((tmp_path / file).read_text(), feature_version=(3, 9))


def test_a_worker_joins_with_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    words = start_words(WORKER, 10_128, "10.0.0.2", "/tmp/x", (300, 100))
    assert {
        "--address=10.0.0.1:6379",
        "--node-ip-address=10.0.0.2",
        "--num-cpus=2",
        "--num-gpus=2",
        "--memory=300",
        "--object-store-memory=100",
        "--min-worker-port=10144",
        "--max-worker-port=10255",
    } <= set(words)


def test_ray_gets_the_token_by_a_file_and_nothing_of_another_ray() -> None:
    inherited = {"RAY_ADDRESS": "elsewhere", "RAY_AUTH_TOKEN": "other", "UGRO_RAY": "{}", "PATH": "/bin"}
    env = environment(WORKER, inherited, 10_000, "/tmp/x/token")
    assert (env["RAY_AUTH_MODE"], env["RAY_AUTH_TOKEN_PATH"], env["PATH"]) == ("token", "/tmp/x/token", "/bin")
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "UGRO_RAY", "RAY_gcs_storage"} & set(env)
    head = environment({**HEAD, "state": "/state"}, {}, 10_000, "t")
    assert (head["RAY_gcs_storage"], head["RAY_gcs_storage_path"]) == ("rocksdb", "/state")


def test_memory_is_divided_between_tasks_and_objects() -> None:
    assert sizes({**WORKER, "memory": GIB}, 64 * GIB, 8 * GIB) == (GIB - GIB * 3 // 10, GIB * 3 // 10)
    assert sizes(WORKER, 10 * GIB, 8 * GIB) == (7 * GIB - 7 * GIB * 3 // 10, 7 * GIB * 3 // 10)
    assert sizes({**WORKER, "parts": 2}, 10 * GIB, GIB)[1] == GIB * 9 // 10 // 2
    assert sizes({**WORKER, "memory": GIB, "object_store": GIB // 2}, 10 * GIB, GIB) == (GIB // 2, GIB // 2)
    assert sizes(HEAD, 10 * GIB, GIB)[1] == LEAST_STORE


@pytest.mark.parametrize(
    ("settings", "shared", "words"),
    [
        ({"memory": 100 << 20}, GIB, "100 MiB of memory: too little for Ray"),
        ({}, 64 << 20, "64 MiB in /dev/shm: too little for Ray"),
        ({"memory": GIB, "object_store": GIB}, 2 * GIB, "leaves nothing of 1024 MiB"),
        ({"object_store": GIB}, GIB // 2, "512 MiB are free in /dev/shm, not 1024 MiB"),
    ],
)
def test_too_little_memory_is_refused(settings: dict[str, int], shared: int, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        sizes({**WORKER, **settings}, 10 * GIB, shared)


def test_more_cpus_get_more_ports() -> None:
    assert [blocks_for(cpus) for cpus in (0, 2, 20, 21, 128)] == [1, 1, 1, 2, 5]


def test_ranks_of_one_machine_get_other_ports() -> None:
    first, second = Ports(1), Ports(2)
    try:
        mine = set(range(first.first, first.first + BLOCK))
        assert mine.isdisjoint(range(second.first, second.first + 2 * BLOCK))
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen(1)
            assert not is_free(taken.getsockname()[1])
    finally:
        first.release()
        second.release()


def test_the_program_runs_as_text_where_nothing_of_ours_is_installed(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], **rank_env({"role": "look", "ports": []})}
    argv = [*rank_argv(sys.executable), "look"]
    argv[1:1] = ["-I", "-S"]  # no site packages: standard library alone
    done = subprocess.run(argv, env=env, capture_output=True, text=True, cwd=tmp_path, timeout=30, check=True)
    found = json.loads(done.stdout)
    assert (found["ray"], found["taken_ports"]) == (None, [])
    assert found["python"].startswith("3.")

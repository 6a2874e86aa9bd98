"""Whether nodes can run one Ray cluster together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.features.ray.model import ClusterWish, WorkerSize
from ugro.features.ray.rules import Look, free_port, lack_of_memory, note, objection
from ugro.kernel.support.errors import Unsatisfiable

GOOD = Look("3.11.2", "2.60.0", True, 1 << 30, 1 << 32)
PYTHONS = {"n1": "/opt/py", "n2": "/opt/py", "n3": "/opt/py"}


def said(**others: Look) -> tuple[str, str]:
    error = objection({"n1": GOOD, "n2": GOOD, **others}, PYTHONS)
    return ("", "") if error is None else (str(error), error.hint or "")


def test_nodes_that_agree_are_not_complained_about() -> None:
    assert said(n3=GOOD) == ("", "")
    assert note({"n1": GOOD, "n2": GOOD}) is None


def test_a_node_without_ray_is_named_with_the_command_that_installs_it() -> None:
    text, hint = said(n3=replace(GOOD, ray=None))
    assert text == "Ray is not installed on n3"
    assert hint.startswith('ugro exec n3 -- /opt/py -m pip install "ray[default]==2.60.0"')


def test_memory_that_cannot_hold_an_object_store_is_refused_before_anything_starts() -> None:
    small = lack_of_memory(ClusterWish(size=WorkerSize(memory_bytes=1_000_000)), {"n1": GOOD})
    assert "too little for a worker" in str(small)
    assert lack_of_memory(ClusterWish(size=WorkerSize(memory_bytes=300_000_000)), {"n1": GOOD}) is None


def test_an_environment_of_ours_without_ray_is_to_name_it() -> None:
    error = objection({"n1": replace(GOOD, ray=None)}, {})
    assert error is not None
    assert error.hint == 'name it with --package "ray[default]", or below environment: packages: ["ray[default]", …]'


@pytest.mark.parametrize(
    ("look", "words"),
    [
        (replace(GOOD, has_dashboard=False), "Ray on n3 lacks its dashboard and agents"),
        (replace(GOOD, ray="2.51.1"), "Ray 2.51.1 on n3 has no token authentication, which came with 2.52"),
        (replace(GOOD, ray="2.59.0"), "Ray differs: n1 and n2 have 2.60.0, n3 has 2.59.0; it must be the same"),
        (replace(GOOD, python="3.12.1"), "Python differs: n1 and n2 have 3.11, n3 has 3.12; Ray needs the same"),
    ],
)
def test_who_differs_is_named(look: Look, words: str) -> None:
    text, hint = said(n3=look)
    assert text.startswith(words)
    assert hint


def test_a_patch_release_of_python_may_differ_and_is_said() -> None:
    looks = {"n1": GOOD, "n2": replace(GOOD, python="3.11.7")}
    assert objection(looks, PYTHONS) is None
    assert note(looks) == "Python differs in its patch release: n1 has 3.11.2, n2 has 3.11.7; Ray accepts that"


def test_object_stores_must_fit_into_shared_memory() -> None:
    wish = ClusterWish(workers_per_node=3, size=WorkerSize(object_store_bytes=400 << 20))
    error = lack_of_memory(wish, {"n1": GOOD})
    assert str(error) == "n1: too little shared memory: 1.0 GiB are free in /dev/shm, and 1.2 GiB are needed"
    assert lack_of_memory(replace(wish, workers_per_node=2), {"n1": GOOD}) is None
    assert lack_of_memory(ClusterWish(), {"n1": replace(GOOD, shared_bytes=64 << 20)}) is not None
    error = lack_of_memory(ClusterWish(), {"n1": replace(GOOD, available_bytes=256 << 20)})
    assert str(error) == "n1: too little memory: 256.0 MiB are free"


def test_a_port_that_was_asked_for_must_be_free_and_another_is_found_for_a_default() -> None:
    assert free_port(6379, True, [8265], "ray.redis_port", "n1") == 6379
    assert free_port(6379, False, [6379, 6380], "ray.redis_port", "n1") == 6381
    with pytest.raises(Unsatisfiable, match=r"n1: port 6379 is taken \(ray.redis_port in cluster.yaml\)"):
        free_port(6379, True, [6379], "ray.redis_port", "n1")
    with pytest.raises(Unsatisfiable):
        free_port(6379, False, range(6379, 6400), "ray.redis_port", "n1")

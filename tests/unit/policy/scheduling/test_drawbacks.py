"""Nodes on which a job would fail: their disk is full, or their Python lacks what the script imports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.policy.scheduling.test_scheduler import holds, job, node, snapshot
from ugro.features.environments.model import EnvRequest
from ugro.kernel.jobs.model import ANY_GPUS, Imports
from ugro.kernel.jobs.scheduling.model import NodeView, Start, Waiting
from ugro.kernel.jobs.scheduling.scheduler import actions
from ugro.kernel.jobs.scheduling.why import why

NO_ROOM = "has no room: 28.0 MiB left on the disk of /root/ugro"


def start_of(waiting: Waiting, *nodes: NodeView) -> Start:
    [start] = actions(snapshot(nodes, [waiting]))
    assert isinstance(start, Start)
    return start


def test_a_node_without_room_is_not_chosen_while_another_has_some() -> None:
    full = node("a", speed=9.0, no_room=NO_ROOM)
    assert start_of(job(1), full, node("b")).placement.nodes == ("b",)
    told = why(snapshot([full, node("b")], [job(1)], [holds(9, "b")]), 1)
    assert told.text.startswith("needs a node with 1 GPU; none is free now; waits for job 9 on b")
    assert f"a {NO_ROOM}" in told.details
    last = start_of(job(1), full)
    assert last.placement.nodes == ("a",)
    assert last.reason == f"free now: a (GPU 0); a {NO_ROOM}"
    away = node("b", unusable="is unreachable")
    assert start_of(job(1), full, away).placement.nodes == ("a",), "nobody knows when the other is back"
    gang = start_of(job(1, on=2), full, node("b"))
    assert gang.placement.nodes == ("b", "a"), "the other comes first, and the job says what is wrong"


def imports(number: int, *names: str, is_certain: bool = True, setup: str | None = None, **more: Any) -> Waiting:
    return job(number, imports=Imports(names, is_certain), setup=setup, **more)


def test_a_script_runs_where_its_imports_are_found() -> None:
    with_torch, without = [node("gpu1"), node("gpu2")], node("gpu3", 4, speed=9.0)
    cluster = [*with_torch, replace(without, lacks=frozenset({"torch", "timm"}))]
    start = start_of(imports(1, "numpy", "torch"), *cluster)
    assert start.placement.nodes == ("gpu1",)
    assert start.reason == "free now: gpu1 (GPU 0); gpu1 and gpu2 have torch; gpu3 lacks it"
    waits = why(snapshot(cluster, [imports(1, "torch")], [holds(8, "gpu1"), holds(9, "gpu2")]), 1)
    assert waits.text.startswith("needs a node with 1 GPU (gpu1 and gpu2 have torch; gpu3 lacks it); none is free now")
    assert "gpu3 lacks torch" in waits.details
    other = start_of(imports(1, "numpy"), *cluster)
    assert other.placement.nodes == ("gpu3",), "it lacks nothing that this one imports"


@pytest.mark.parametrize("doubt", [{"is_certain": False}, {"setup": "pip install torch"}])
def test_a_node_is_only_used_last_if_a_job_may_run_there_all_the_same(doubt: dict[str, Any]) -> None:
    cluster = [node("gpu1"), replace(node("gpu2", speed=9.0), lacks=frozenset({"torch"}))]
    first, second = actions(snapshot(cluster, [imports(1, "torch", **doubt), imports(2, "torch", **doubt)]))
    assert isinstance(first, Start)
    assert isinstance(second, Start)
    assert (first.placement.nodes, second.placement.nodes) == (("gpu1",), ("gpu2",))
    assert "rather than gpu2: it has what the script imports" in first.reason
    assert second.reason.endswith("gpu1 has torch; gpu2 lacks it and is used last")


def test_a_job_that_brings_its_environment_runs_where_its_imports_are_not() -> None:
    cluster = [node("gpu1"), replace(node("gpu2", speed=9.0), lacks=frozenset({"torch"}))]
    start = start_of(imports(1, "torch", environment=EnvRequest(requirements=("torch",))), *cluster)
    assert start.placement.nodes == ("gpu2",)
    assert "torch" not in start.reason


def test_a_job_that_no_node_can_run_starts_with_a_warning() -> None:
    cluster = [replace(node(name), lacks=frozenset({"torch"})) for name in ("gpu1", "gpu2")]
    start = start_of(imports(1, "torch"), *cluster)
    assert start.reason == "free now: gpu1 (GPU 0); no node has torch, which the script imports"
    cluster.append(node("gpu3"))
    gang = start_of(imports(1, "torch", on=2), *cluster)
    assert gang.placement.nodes == ("gpu3", "gpu1")
    assert gang.reason.endswith("; gpu3 has torch; gpu1 and gpu2 lack it and are used last")


def test_no_node_has_it_is_said_only_if_that_is_so() -> None:
    lacks_torch = replace(node("gpu1"), lacks=frozenset({"torch"}))
    lacks_timm = replace(node("gpu2"), lacks=frozenset({"timm"}))
    start = start_of(imports(1, "torch"), lacks_torch, node("cpu1", 0))
    assert start.reason == "free now: gpu1 (GPU 0); gpu1 lacks torch, which the script imports"
    start = start_of(imports(1, "torch", "timm"), lacks_torch, lacks_timm)
    assert start.reason.endswith("; gpu1 lacks torch, gpu2 lacks timm, which the script imports")


def test_a_job_that_left_gpus_open_runs_on_cores_if_only_those_nodes_can_run_it() -> None:
    cluster = [replace(node("gpu1"), lacks=frozenset({"torch"})), node("cpu1", 0)]
    start = start_of(imports(1, "torch", gpus=ANY_GPUS), *cluster)
    assert start.placement.nodes == ("cpu1",)
    assert "without GPUs: too few nodes with GPUs have torch" in start.reason

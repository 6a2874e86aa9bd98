"""Which node each worker gets."""

from __future__ import annotations

import pytest

from ugro.features.ray.model import ClusterWish, WorkerSize
from ugro.features.ray.rules import Place, first_workers, more_workers, to_drop
from ugro.kernel.support.errors import Unsatisfiable

PLACES = [Place("n1", 8, "py"), Place("n2", 4, "py", 0.5)]


def test_a_worker_gets_its_part_of_its_node() -> None:
    found = first_workers(ClusterWish(workers_per_node=2), PLACES)
    assert [(one.number, one.node, one.cpus, one.speed) for one in found] == [
        (1, "n1", 4, None),
        (2, "n1", 4, None),
        (3, "n2", 2, 0.5),
        (4, "n2", 2, 0.5),
    ]


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (ClusterWish(workers_per_node=3, size=WorkerSize(cpus=2)), "n2: it has 4 cores, too few for 3 workers of 2"),
        (ClusterWish(workers_per_node=5), "n2: it has 4 cores, too few for 5 workers"),
    ],
)
def test_more_workers_than_cores_name_the_node(wish: ClusterWish, words: str) -> None:
    with pytest.raises(Unsatisfiable) as caught:
        first_workers(wish, PLACES)
    assert (str(caught.value), bool(caught.value.hint)) == (words, True)


def test_new_workers_go_where_the_fewest_are() -> None:
    wish = ClusterWish(size=WorkerSize(cpus=2))
    first = first_workers(wish, PLACES)
    added = more_workers(wish, first, PLACES, 6, 3)
    assert [(one.number, one.node) for one in added] == [(3, "n1"), (4, "n2"), (5, "n1"), (6, "n1")]
    with pytest.raises(Unsatisfiable, match="room for 6 workers of this size, not for 7"):
        more_workers(wish, first, PLACES, 7, 3)


def test_the_newest_go_first() -> None:
    first = first_workers(ClusterWish(workers_per_node=2), PLACES)
    assert [one.number for one in to_drop(first, 1)] == [2, 3, 4]
    assert to_drop(first, 4) == ()


def test_several_workers_on_a_node_are_said_to_cost_more_than_one() -> None:
    said = ClusterWish(workers_per_node=4, size=WorkerSize(cpus=2)).advice
    assert said is not None
    assert "one worker with 8 CPUs" in said
    assert ClusterWish().advice is None
    assert ClusterWish(workers_per_node=2, size=WorkerSize(gpus=1)).advice is None, "each has GPUs of its own"

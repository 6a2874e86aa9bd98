"""What can never run is refused, with the nearest that could; what only waits is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy.scheduling.test_placement import GIB, gang, node, place
from ugro.kernel.jobs.model import ALL_GPUS, ANY_GPUS, Resources
from ugro.kernel.jobs.scheduling.fit import check_fits
from ugro.kernel.jobs.scheduling.model import GpuView, NodeView

LAB = (node("gpu-master", 12, cores=16), node("gpu1", 8, 8), node("gpu2", 8, model="RTX 3070 Ti", cores=4))


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (
            Resources(gpus_per_node=4),
            "no node has 4 GPUs; the largest has 2 (gpu1); with --nodes 3 --gpus-per-node all it would fit",
        ),
        (
            gang(4),
            "it needs 4 nodes each with 1 GPU; only 3 have that (gpu-master, gpu1 and gpu2); "
            "with --nodes 3 it would fit",
        ),
        (
            Resources(gpus_per_node=1, gpu_memory_bytes=40 * GIB),
            "no GPU has 40.0 GiB; the largest has 12.0 GiB (RTX 4070 on gpu-master); "
            "with --gpu-memory 12GiB it would fit",
        ),
        (Resources(only=("gpu1", "gpu9")), "there is no node gpu9; there are gpu-master, gpu1 and gpu2"),
        (
            replace(gang(2), only=("gpu1",)),
            "it needs 2 nodes each with 1 GPU and the name gpu1; only 1 has that (gpu1); with --nodes 1 it would fit",
        ),
        (Resources(gpus_per_node=1, gpu_models=("H100",)), "no GPU is H100; there are RTX 3070 Ti and RTX 4070"),
        (Resources(cpus=64), "no node has 64 cores; the largest has 16 (gpu-master); with --cpus 16 it would fit"),
        (
            Resources(memory_bytes=64 * GIB),
            "no node has 64.0 GiB of memory; the largest has 32.0 GiB (gpu-master); with --memory 32GiB it would fit",
        ),
        (Resources(labels=("big",)), "no node has the label big; none has any"),
        (
            Resources(gpus_per_node=2, cpus=16),
            "no node has it all together; it needs a node with 2 GPUs and 16 cores; "
            "with --gpus-per-node 1 it would fit",
        ),
    ],
)
def test_what_can_never_run_is_refused_with_the_nearest_that_could(wanted: Resources, told: str) -> None:
    misfit = check_fits(wanted, LAB)
    assert misfit is not None
    assert str(misfit) == told


def test_four_gpus_on_one_node_become_two_nodes_of_two() -> None:
    misfit = check_fits(Resources(gpus_per_node=4), [node("gpu1", 8, 8), node("gpu2", 8, 8)])
    assert misfit is not None
    assert misfit.hint == "with --nodes 2 --gpus-per-node 2 it would fit"


def test_three_gpus_become_all_of_two_nodes() -> None:
    misfit = check_fits(Resources(gpus_per_node=3), [node("gpu1", 8, 8), node("gpu2", 8, 8)])
    assert misfit is not None
    assert misfit.hint == "with --nodes 2 --gpus-per-node all it would fit"


def test_a_job_of_one_node_is_not_told_to_use_more() -> None:
    misfit = check_fits(Resources(gpus_per_node=4), LAB, on_one_node=True)
    assert misfit is not None
    assert misfit.hint == "with --gpus-per-node 2 it would fit"
    assert check_fits(gang(9), LAB, on_one_node=True) is None


def test_no_nodes_no_gpus_and_broken_ones_are_said() -> None:
    def reason(wanted: Resources, *nodes: NodeView) -> str:
        misfit = check_fits(wanted, nodes)
        assert misfit is not None
        return misfit.reason

    broken = replace(node("n"), gpus=(GpuView(0, "RTX", 8 * GIB, is_broken=True),))
    assert reason(Resources()) == "there are no nodes"
    assert reason(gang(1), node("cpu")) == "no node has a GPU"
    assert reason(gang(1), broken) == "no node has a GPU; broken: GPU 0 of n"
    ways = reason(Resources(any_of=(gang(1), Resources(cpus=99))), node("cpu"))
    assert ways == (
        "none of the 2 alternatives fits: no node has a GPU and no node has 99 cores; the largest has 8 (cpu)"
    )


def test_what_is_only_in_use_or_away_can_run_some_day() -> None:
    busy = replace(node("busy"), gpus=(GpuView(0, "RTX", 8 * GIB, is_foreign=True),))
    drained = node("drained", 8, unusable="is drained: new fans")
    assert check_fits(gang(2), [busy, drained]) is None
    assert check_fits(Resources(any_of=(gang(9), gang(1))), [drained]) is None


def test_what_might_fit_a_node_that_never_answered_is_not_refused() -> None:
    silent = replace(node("silent", cores=0, memory_gib=0), labels=("lab",), unusable="is unreachable", is_known=False)
    assert check_fits(gang(1, gpus=8), [node("n", 8), silent]) is None
    assert check_fits(replace(gang(1, gpus=8), labels=("lab",)), [silent]) is None
    two = check_fits(gang(2, gpus=8), [node("n", 8), silent])
    assert two is not None
    assert two.reason == "no node has 8 GPUs; the largest has 1 (n)"
    assert check_fits(replace(gang(1, gpus=8), labels=("desk",)), [node("n", 8), silent]) is not None


def test_a_script_that_leaves_gpus_open_fits_wherever_its_nodes_do() -> None:
    mixed = [node("cpu"), node("gpu", 8)]
    assert check_fits(gang(2, gpus=ANY_GPUS), mixed) is None
    misfit = check_fits(gang(3, gpus=ANY_GPUS), mixed)
    assert misfit is not None
    assert misfit.hint == "with --nodes 2 it would fit"


some_nodes = st.lists(
    st.builds(
        lambda gpus, cores, memory: (gpus, cores, memory),
        st.lists(st.sampled_from([4, 8, 12]), max_size=4), st.integers(1, 8), st.integers(1, 8),
    ),
    min_size=1, max_size=5,
).map(
    lambda made: [
        node(f"n{index}", *gpus, cores=cores, memory_gib=memory) for index, (gpus, cores, memory) in enumerate(made)
    ]
)  # fmt: skip
some_resources = st.builds(
    lambda least, more, gpus, memory, cpus: Resources(
        least, least + more, gpus, memory * GIB if memory else None, cpus=cpus, memory_bytes=(cpus or 0) * GIB
    ),
    st.integers(1, 4), st.integers(0, 3), st.sampled_from([0, 1, 2, 3, 5, ALL_GPUS, ANY_GPUS]),
    st.sampled_from([0, 6, 12, 20]), st.none() | st.integers(0, 9),
)  # fmt: skip


@given(some_resources, some_nodes)
def test_what_is_said_to_fit_starts_on_an_idle_cluster_and_nothing_else_does(
    wanted: Resources, nodes: list[NodeView]
) -> None:
    misfit = check_fits(wanted, nodes)
    assert (place(wanted, *nodes) is not None) == (misfit is None)
    if misfit is not None and misfit.nearest is not None:
        assert place(misfit.nearest, *nodes) is not None
        assert misfit.hint is not None

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.kernel.jobs.model import ALL_GPUS, ANY_GPUS, JobSpec, Launcher, Placement, Resources, Share
from ugro.kernel.jobs.scheduling.model import ClusterView, GpuView, Holding, NodeView, Start, Waiting
from ugro.kernel.jobs.scheduling.scheduler import schedule

GIB = 2**30


def node(
    name: str, *memories_gib: int, model: str = "RTX 4070", cores: int = 8, memory_gib: int = 32, **more: object
) -> NodeView:
    gpus = tuple(GpuView(index, model, size * GIB) for index, size in enumerate(memories_gib))
    return replace(NodeView(name, cores, memory_gib * GIB, gpus), **more)  # type: ignore[arg-type]


def place(
    resources: Resources, *nodes: NodeView, launcher: Launcher = Launcher.DDP, avoid: tuple[str, ...] = ()
) -> Placement | None:
    spec = JobSpec("job", ("train",), launcher, resources=resources)
    (decision,) = schedule(ClusterView(0.0, nodes, (Waiting(1, "ann", spec, 0.0, avoid=avoid),)))
    return decision.placement if isinstance(decision, Start) else None


def start_of(resources: Resources, *nodes: NodeView) -> Start:
    spec = JobSpec("job", ("train",), Launcher.DDP, resources=resources)
    (decision,) = schedule(ClusterView(0.0, nodes, (Waiting(1, "ann", spec, 0.0),)))
    assert isinstance(decision, Start)
    return decision


def given_to(resources: Resources, *nodes: NodeView) -> dict[str, tuple[int, ...]]:
    placement = place(resources, *nodes)
    assert placement is not None
    return {share.node: share.gpus for share in placement.shares}


def gang(least: int, most: int | None = None, gpus: int = 1) -> Resources:
    return Resources(min_nodes=least, max_nodes=most or least, gpus_per_node=gpus)


def test_a_small_job_gets_the_smallest_gpu_that_will_do() -> None:
    small = Resources(gpus_per_node=1, gpu_memory_bytes=2 * GIB)
    nodes = [node("large", 24, speed=4.0), node("middle", 12), node("small", 8)]
    assert given_to(small, *nodes) == {"small": (0,)}
    assert given_to(replace(small, gpu_memory_bytes=10 * GIB), *nodes) == {"middle": (0,)}


def test_the_smallest_gpu_is_taken_within_a_node_too() -> None:
    assert given_to(Resources(gpus_per_node=1, gpu_memory_bytes=6 * GIB), node("mixed", 24, 8, 12)) == {"mixed": (1,)}


def test_who_does_not_say_how_much_memory_it_needs_gets_the_fastest_node_then_the_largest_gpu() -> None:
    anything = Resources(gpus_per_node=1)
    assert given_to(anything, node("slow", 24, speed=0.5), node("fast", 8, speed=2.0)) == {"fast": (0,)}
    assert given_to(anything, node("a", 8), node("b", 8, 24)) == {"b": (1,)}


def test_single_gpu_jobs_are_packed_so_that_whole_nodes_stay_free() -> None:
    one = Resources(gpus_per_node=1, gpu_memory_bytes=GIB)
    assert given_to(one, node("a-whole", 8, 8, speed=2.0), node("begun", 8)) == {"begun": (0,)}


def test_the_fastest_nodes_are_taken_first() -> None:
    nodes = [node("slow", 8, speed=0.25), node("middle", 8, speed=0.5), node("fast", 8, speed=1.0)]
    placement = place(gang(2), *nodes)
    assert placement is not None
    assert placement.nodes == ("fast", "middle")


def test_a_gang_stays_within_one_group_where_it_can() -> None:
    here = [node(name, 8, group="here", speed=0.5) for name in ("h1", "h2")]
    there = [node("t1", 8, group="there", speed=1.0)]
    assert set(given_to(gang(2), *there, *here)) == {"h1", "h2"}
    assert set(given_to(gang(3), *there, *here)) == {"h1", "h2", "t1"}


def test_of_two_groups_that_both_suffice_the_faster_is_taken() -> None:
    slow = [node(f"s{index}", 8, group="slow", speed=0.5) for index in range(4)]
    fast = [node(f"f{index}", 8, group="fast", speed=1.0) for index in range(2)]
    assert set(given_to(gang(2), *slow, *fast)) == {"f0", "f1"}


def test_as_many_nodes_are_taken_as_are_free_up_to_the_most() -> None:
    nodes = [node(f"n{index}", 8) for index in range(3)]
    assert len(given_to(gang(2, 5), *nodes)) == 3
    assert len(given_to(gang(1, 2), *nodes)) == 2
    assert place(gang(4, 8), *nodes) is None


def test_all_gpus_means_every_free_one_that_fits_and_may_differ_between_nodes() -> None:
    everything = replace(gang(2, gpus=ALL_GPUS), gpu_memory_bytes=8 * GIB)
    assert given_to(everything, node("four", 8, 8, 4, 24), node("one", 8), node("none", 4)) == {
        "four": (0, 1, 3),
        "one": (0,),
    }


def test_a_node_where_all_gpus_are_taken_does_not_count_as_having_all() -> None:
    assert place(gang(1, gpus=ALL_GPUS), node("cpu")) is None
    foreign = replace(node("busy"), gpus=(GpuView(0, "RTX", 8 * GIB, is_foreign=True),))
    assert place(gang(1, gpus=ALL_GPUS), foreign) is None


def test_a_gpu_that_others_use_or_that_is_broken_is_not_given_away() -> None:
    gpus = (
        GpuView(0, "RTX", 8 * GIB, is_foreign=True),
        GpuView(1, "RTX", 8 * GIB, is_broken=True),
        GpuView(2, "RTX", 8 * GIB),
    )
    only_one = replace(node("n"), gpus=gpus)
    assert given_to(gang(1), only_one) == {"n": (2,)}
    assert place(gang(1, gpus=2), only_one) is None


def test_gpus_are_named_by_index_even_if_some_are_missing() -> None:
    gapped = replace(node("n"), gpus=(GpuView(3, "RTX", 8 * GIB), GpuView(5, "RTX", 8 * GIB)))
    assert given_to(gang(1, gpus=2), gapped) == {"n": (3, 5)}


@pytest.mark.parametrize("word", ["RTX 4090", "rtx4090", "4090", "rtx-4090"])
def test_a_model_is_found_however_it_is_written(word: str) -> None:
    wanted = Resources(gpus_per_node=1, gpu_models=("H100", word))
    nodes = [node("other", 80, model="A100"), node("it", 24, model="NVIDIA GeForce RTX 4090")]
    assert given_to(wanted, *nodes) == {"it": (0,)}


def test_gpus_of_unknown_memory_do_not_satisfy_a_demand_for_memory() -> None:
    unknown = replace(node("n"), gpus=(GpuView(0, "odd"),))
    assert place(Resources(gpus_per_node=1, gpu_memory_bytes=1), unknown) is None
    assert place(Resources(gpus_per_node=1), unknown) is not None


def test_all_labels_must_be_there() -> None:
    wanted = Resources(labels=("desk", "quiet"))
    assert given_to(wanted, node("a", labels=("desk",)), node("b", labels=("quiet", "desk"))) == {"b": ()}
    assert place(wanted, node("a", labels=("desk",)), node("c", labels=("quiet",))) is None


def test_jobs_without_demands_are_spread_and_of_equals_go_where_no_gpu_is_free() -> None:
    nodes = (node("a-gpu", 8, speed=9.0), node("cpu1"), node("cpu2"))
    waiting = tuple(Waiting(number, "ann", JobSpec("j", ("x",)), 0.0) for number in range(4))
    starts = [one for one in schedule(ClusterView(0.0, nodes, waiting)) if isinstance(one, Start)]
    assert [start.placement.nodes[0] for start in starts] == ["cpu1", "cpu2", "a-gpu", "cpu1"]


def test_what_others_took_meanwhile_counts() -> None:
    def all_started(*wanted: Resources, on: tuple[NodeView, ...]) -> list[tuple[str, ...]]:
        specs = [JobSpec("j", ("x",), resources=resources) for resources in wanted]
        waiting = tuple(Waiting(number, "ann", spec, 0.0) for number, spec in enumerate(specs))
        return [one.placement.nodes for one in schedule(ClusterView(0.0, on, waiting)) if isinstance(one, Start)]

    anything, there = Resources(), Resources(labels=("b",))
    spread = all_started(anything, there, there, anything, on=(node("cpu1"), node("cpu2", labels=("b",))))
    assert spread == [("cpu1",), ("cpu2",), ("cpu2",), ("cpu1",)]
    one, special = Resources(gpus_per_node=1), Resources(gpus_per_node=1, labels=("b",))
    assert all_started(one, special, one, on=(node("x", 8, labels=("b",)), node("y", 8, speed=2.0))) == [("y",), ("x",)]


def test_cores_and_memory_are_counted() -> None:
    wanted = Resources(cpus=3, memory_bytes=4 * GIB)
    waiting = tuple(Waiting(number, "ann", JobSpec("j", ("x",), resources=wanted), 0.0) for number in range(4))
    by_cores = schedule(ClusterView(0.0, (node("n", cores=8),), waiting))
    assert [isinstance(one, Start) for one in by_cores] == [True, True, False, False]
    by_memory = schedule(ClusterView(0.0, (node("n", cores=64, memory_gib=13),), waiting))
    assert [isinstance(one, Start) for one in by_memory] == [True, True, True, False]


def started_at_once(resources: Resources, on: NodeView) -> int:
    waiting = tuple(Waiting(number, "ann", JobSpec("j", ("x",), resources=resources), 0.0) for number in range(100))
    return sum(isinstance(one, Start) for one in schedule(ClusterView(0.0, (on,), waiting)))


def test_a_job_that_does_not_speak_of_cores_takes_one() -> None:
    assert started_at_once(Resources(), node("n", cores=4)) == 4


def test_even_jobs_that_take_no_core_do_not_pile_up_without_end() -> None:
    assert started_at_once(Resources(cpus=0), node("n", cores=4)) == 64


def test_each_rank_takes_a_core_as_far_as_the_node_has_them() -> None:
    def cores(wanted: Resources, on: NodeView, launcher: Launcher = Launcher.DDP) -> int:
        placement = place(wanted, on, launcher=launcher)
        assert placement is not None
        return placement.shares[0].cpus

    assert cores(gang(1, gpus=2), node("n", 8, 8)) == 2
    assert cores(gang(1, gpus=2), node("n", 8, 8), Launcher.COMMAND) == 1
    assert cores(gang(1, gpus=ALL_GPUS), node("n", 8, 8, 8)) == 3
    assert cores(gang(1, gpus=ALL_GPUS), node("n", 8, 8, 8, cores=2)) == 2
    assert cores(gang(1, gpus=4), node("n", 8, 8, 8, 8, cores=2)) == 2
    assert cores(replace(gang(1, gpus=2), cpus=0), node("n", 8, 8)) == 0


def test_a_job_without_demands_goes_to_the_least_loaded_node() -> None:
    reason = start_of(Resources(), node("a", cost=0.5), node("b", 8, cost=0.1), node("c", cost=0.7)).reason
    assert reason == "free now: b; rather than a: the least load"


def test_the_reason_says_what_the_choice_went_by() -> None:
    one = Resources(gpus_per_node=1)
    largest = start_of(one, node("a", 8), node("b", 24))
    assert largest.reason == "free now: b (GPU 0); rather than a: the most GPU memory"
    assert start_of(one, node("a", 8), node("b", 8)).reason == "free now: a (GPU 0)", "nothing but the name"
    little = replace(one, gpu_memory_bytes=GIB)
    reason = start_of(little, node("a", 24), node("b", 8)).reason
    assert reason == "free now: b (GPU 0); rather than a: the smallest GPU that will do"


def test_a_script_that_leaves_gpus_open_gets_all_of_a_node_that_has_some() -> None:
    assert given_to(gang(1, gpus=ANY_GPUS), node("cpu"), node("gpu", 8, 8)) == {"gpu": (0, 1)}
    assert given_to(gang(2, 4, gpus=ANY_GPUS), node("cpu"), node("a", 8), node("b", 8)) == {"a": (0,), "b": (0,)}


def test_where_too_few_nodes_have_gpus_no_rank_gets_any() -> None:
    assert given_to(gang(2, gpus=ANY_GPUS), node("cpu1"), node("cpu2")) == {"cpu1": (), "cpu2": ()}
    start = start_of(gang(3, gpus=ANY_GPUS), node("cpu"), node("a", 8), node("b", 8))
    assert [share.gpus for share in start.placement.shares] == [(), (), ()]
    assert "without GPUs: only 2 such nodes have any" in start.reason


@pytest.mark.parametrize(
    "gpu_node",
    [
        replace(node("gpu"), gpus=(GpuView(0, "RTX", 8 * GIB, is_foreign=True),)),
        node("gpu", 8, unusable="is unreachable"),
        node("gpu", unusable="has not answered yet", is_known=False, is_awaited=True),
    ],
)
def test_gpus_that_are_only_busy_or_away_are_waited_for(gpu_node: NodeView) -> None:
    assert place(gang(1, gpus=ANY_GPUS), node("cpu"), gpu_node) is None
    broken = replace(gpu_node, gpus=(GpuView(0, "RTX", 8 * GIB, is_broken=True),), is_awaited=False)
    assert place(gang(1, gpus=ANY_GPUS), node("cpu"), broken) is not None


def test_a_command_runs_on_one_node_whatever_it_asks() -> None:
    placement = place(gang(3), node("only", 8), launcher=Launcher.COMMAND)
    assert placement == Placement((Share("only", (0,), cpus=1),))


def test_alternatives_are_tried_in_order() -> None:
    ways = Resources(min_nodes=99, any_of=(gang(1, gpus=2), gang(2), Resources(any_of=(gang(1),))))
    assert given_to(ways, node("both", 8, 8), node("other", 8)) == {"both": (0, 1)}
    assert set(given_to(ways, node("a", 8), node("b", 8))) == {"a", "b"}
    assert given_to(ways, node("a", 8)) == {"a": (0,)}


def test_a_node_that_failed_a_job_is_taken_last() -> None:
    nodes = [node("bad", 8, speed=9.0), node("good", 8)]
    first = place(gang(1), *nodes, avoid=("bad",))
    assert first is not None
    assert first.nodes == ("good",)
    only = place(gang(1), nodes[0], avoid=("bad",))
    assert only is not None
    assert only.nodes == ("bad",)


def test_why_a_node_was_avoided_is_said_of_that_node() -> None:
    nodes = [node("a", 8, speed=9.0), node("b", 8)]
    spec = JobSpec("job", ("train",), Launcher.DDP, resources=gang(1))

    def reason(one: Waiting) -> str:
        (decision,) = schedule(ClusterView(0.0, tuple(nodes), (one,)))
        assert isinstance(decision, Start)
        return decision.reason

    failed = Waiting(1, "ann", spec, 0.0, avoid=("a",))
    assert reason(failed).endswith("rather than a: it failed there")
    replica = Waiting(1, "ann", replace(spec, avoid=("a",)), 0.0, avoid=("a",))
    assert reason(replica).endswith("rather than a: its service has a replica there")


def test_what_a_job_holds_is_gone_until_it_ends_even_for_nodes_that_left() -> None:
    held = Placement((Share("n", (0,), cpus=7), Share("gone", (0,))))
    snapshot = ClusterView(
        0.0, (node("n", 8, 8),), (Waiting(1, "ann", JobSpec("j", ("x",), resources=Resources(cpus=2)), 0.0),),
        (Holding(9, "bob", 50, held, 0.0),),
    )  # fmt: skip
    assert not isinstance(schedule(snapshot)[0], Start)


def test_a_job_that_names_its_nodes_gets_these_and_no_others() -> None:
    nodes = [node(name, 8, speed=speed) for name, speed in (("a", 1.0), ("b", 9.0), ("c", 2.0), ("d", 1.0))]
    named = Resources(min_nodes=2, max_nodes=2, gpus_per_node=1, only=("a", "d"))
    assert given_to(named, *nodes) == {"a": (0,), "d": (0,)}
    assert given_to(replace(named, min_nodes=1, max_nodes=1, only=("d",)), *nodes) == {"d": (0,)}
    assert place(replace(named, only=("a",)), *nodes) is None


def test_the_named_nodes_of_a_later_job_are_known_while_an_earlier_one_is_placed() -> None:
    nodes = tuple(node(name, 8) for name in ("a", "b"))
    specs = [JobSpec("job", ("train",), Launcher.DDP, resources=Resources(gpus_per_node=1))]
    specs.append(replace(specs[0], resources=Resources(gpus_per_node=1, only=("b",))))
    waiting = tuple(Waiting(number, "ann", spec, float(number)) for number, spec in enumerate(specs, start=1))
    decisions = schedule(ClusterView(0.0, nodes, waiting))
    assert [one.placement.nodes for one in decisions if isinstance(one, Start)] == [("a",), ("b",)]

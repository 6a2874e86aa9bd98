from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.links.model import Choice, Exclusion, Facts, Gpu, Machine, NodeReport, Status
from ugro.kernel.links.rules import Candidate, best_node, exclusions

GIB = 2**30


def gpu(used_ratio: float | None, *, error: str | None = None) -> Gpu:
    used = None if used_ratio is None else round(used_ratio * 8 * GIB)
    return Gpu(0, "GPU-0", "RTX 4070", memory_total_bytes=8 * GIB, memory_used_bytes=used, error=error)


def facts(load: float = 0.0, *gpus: Gpu) -> Facts:
    return Facts(0.0, 1.0, (load, 9.0, 9.0), 0.5, 16 * GIB, 8 * GIB, gpus=gpus)


def node(name: str, load: float = 0.0, *gpus: Gpu, cores: int | None = 4) -> Candidate:
    return Candidate(name, Status.HEALTHY, cores, facts(load, *gpus))


def choose(*candidates: Candidate) -> Choice:
    choice = best_node(candidates, cpu_weight=1.0, gpu_weight=3.0)
    assert choice is not None
    return choice


def test_the_node_with_the_lowest_cost_is_taken_and_the_runner_up_is_named() -> None:
    choice = choose(node("gpu1", 2.0, gpu(0.5)), node("gpu2", 2.0, gpu(0.25)), node("gpu3", 4.0, gpu(0.5)))
    assert choice.name == "gpu2"
    assert choice.cost == 2 / 4 + 3 * 0.25
    assert choice.reason == (
        "gpu2 costs 1.25 (load 0.50 per core, 25 % of GPU memory used); the next is gpu1 at 2.00"
    )
    assert choice.excluded == ()


def test_load_counts_per_core() -> None:
    assert choose(node("small", 2.0, cores=2), node("large", 6.0, cores=64)).name == "large"


def test_of_nodes_that_cost_about_the_same_the_one_that_was_measured_to_be_faster_is_taken() -> None:
    slow, fast = node("gpu1", 0.04), replace(node("gpu2", 0.12), speed=1.0)
    choice = choose(replace(slow, speed=0.5), fast)
    assert choice.name == "gpu2"
    assert choice.reason.endswith("about the same as gpu1, and was measured to be faster")
    assert choose(replace(slow, speed=0.5), replace(fast, facts=facts(2.0))).name == "gpu1", "less load counts more"
    assert choose(slow, fast).name == "gpu1"


def test_weights_decide_what_matters() -> None:
    candidates = [node("busy-cpu", 4.0, gpu(0.0)), node("busy-gpu", 0.0, gpu(0.75))]
    by_gpu = best_node(candidates, cpu_weight=0.1, gpu_weight=3.0)
    by_cpu = best_node(candidates, cpu_weight=10.0, gpu_weight=0.1)
    assert by_gpu is not None
    assert by_cpu is not None
    assert (by_gpu.name, by_cpu.name) == ("busy-cpu", "busy-gpu")


def test_gpu_memory_is_the_mean_over_the_gpus_that_can_be_read() -> None:
    mixed = node("mixed", 0.0, gpu(0.5), gpu(0.25), gpu(0.9, error="fell off the bus"), gpu(None))
    assert choose(mixed).cost == 3 * 0.375


def test_a_node_without_a_gpu_pays_nothing_for_gpu_memory() -> None:
    choice = choose(node("cpu", 1.0))
    assert choice.cost == 0.25
    assert choice.reason == "cpu costs 0.25 (load 0.25 per core); no other node can take work"


def test_equal_costs_are_decided_by_name() -> None:
    choice = choose(node("b", 1.0), node("a", 1.0))
    assert choice.name == "a"
    assert choice.reason.endswith(", the same as b; the first by name is taken")


def test_unknown_cores_are_taken_for_one() -> None:
    assert choose(node("shy", 1.5, cores=None)).cost == 1.5


def test_nodes_that_cannot_take_work_are_left_out_and_each_is_told_why() -> None:
    dead = Candidate("dead", Status.UNREACHABLE)
    sick = Candidate("sick", Status.UNHEALTHY, 4, facts())
    drained = Candidate("drained", Status.HEALTHY, 4, facts(), drained="new fans")
    drained_silently = Candidate("silent", Status.HEALTHY, 4, facts(), drained="")
    unknown = Candidate("new", Status.HEALTHY)
    all_of_them = [dead, sick, drained, drained_silently, unknown]
    why = (
        Exclusion("dead", "is unreachable"),
        Exclusion("sick", "is unhealthy"),
        Exclusion("drained", "is drained: new fans"),
        Exclusion("silent", "is drained"),
        Exclusion("new", "has not been probed yet"),
    )
    assert choose(*all_of_them, node("busy", 40.0)).excluded == why
    assert best_node(all_of_them, cpu_weight=1.0, gpu_weight=3.0) is None
    assert exclusions(all_of_them) == why


def test_a_degraded_node_may_still_be_taken() -> None:
    assert choose(Candidate("warm", Status.DEGRADED, 4, facts())).name == "warm"


def test_no_candidates_give_no_choice() -> None:
    assert best_node([], cpu_weight=1.0, gpu_weight=3.0) is None


def test_a_candidate_is_made_of_a_nodes_report() -> None:
    machine = Machine("h", "Debian", "6.1", "x86_64", "b", "me", "/", "3.11", "/bin/python", 11, "cpu", GIB)
    report = NodeReport("n", Status.HEALTHY, 100, drained="why", machine=machine, facts=facts(1.0))
    assert Candidate.of(report) == Candidate("n", Status.HEALTHY, 11, facts(1.0), "why")
    assert Candidate.of(NodeReport("n", Status.UNREACHABLE, 0)) == Candidate("n", Status.UNREACHABLE)


loads = st.lists(st.floats(min_value=0, max_value=100), min_size=1, max_size=8)


@given(loads.flatmap(lambda loads: st.permutations(list(enumerate(loads)))))
def test_the_choice_does_not_depend_on_the_order_of_the_candidates(shuffled: list[tuple[int, float]]) -> None:
    in_order = [node(f"n{index}", load) for index, load in sorted(shuffled)]
    assert choose(*(node(f"n{index}", load) for index, load in shuffled)) == choose(*in_order)


@given(loads)
def test_nobody_is_cheaper_than_the_one_chosen(loads: list[float]) -> None:
    choice = choose(*(node(f"n{index}", load) for index, load in enumerate(loads)))
    assert choice.cost == min(loads) / 4

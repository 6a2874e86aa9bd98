"""The words about what is free, compared with what the jobs hold."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy.scheduling.test_scheduler import BATCH, holds, job, node, nodes, snapshot, wait_of
from tests.unit.policy.scheduling.test_scheduler_simulated import Work, clusters, workloads
from ugro.kernel.jobs.model import Placement, Resources, Share
from ugro.kernel.jobs.scheduling.demand import gpu_fits
from ugro.kernel.jobs.scheduling.fit import Makes, needs_of
from ugro.kernel.jobs.scheduling.model import ClusterView, Holding, NodeView, Start, Wait
from ugro.kernel.jobs.scheduling.scheduler import Explanation, schedule
from ugro.kernel.jobs.scheduling.why import why


def test_a_device_that_is_free_and_reserved_is_not_called_taken() -> None:
    """Of the first jobs in the queue each has a reservation, too, and the words must be the same as for the others."""
    holding = [holds(8, "n0", time_limit_s=1000.0), holds(9, "n1", time_limit_s=2000.0)]
    seen = snapshot(nodes(3), [job(1, on=2), job(2), job(3)], holding)
    reserved = "needs a node with 1 GPU; that is free on n2, but reserved for job 1"
    second = f"{reserved}; waits for job 9 on n1, for 31m40s at most"
    assert why(seen, 2).text == wait_of(schedule(seen), 2).reason == second
    assert why(seen, 3).text == reserved
    assert why(seen, 3).blocked_by == (1,)
    gang = snapshot(nodes(4), [job(1, on=2), job(2, on=2)], [*holding, holds(7, "n3", time_limit_s=1500.0)])
    assert "; 0 of 2 are free now; n2 is free too, but reserved for job 1; waits for jobs" in why(gang, 2).text


def test_only_the_job_that_keeps_what_is_free_is_named() -> None:
    big = [node("n0", labels=("a",)), node("n1", labels=("a",)), node("n2", labels=("b",)), node("n3", labels=("b",))]
    waiting = [
        replace(job(number, on=2), spec=replace(job(number).spec, resources=Resources(2, 2, 1, labels=(label,))))
        for number, label in ((1, "a"), (2, "b"))
    ]
    wants_b = replace(job(3), spec=replace(job(3).spec, resources=Resources(gpus_per_node=1, labels=("b",))))
    seen = snapshot(big, [*waiting, wants_b], [holds(8, "n0"), holds(9, "n2")])
    assert "; that is free on n3, but reserved for job 2" in why(seen, 3).text


def test_a_part_that_is_free_is_named_with_what_is_missing() -> None:
    two = job(1, 2)
    seen = snapshot(nodes(2, gpus=2), [two], [holds(8, "n0", 0, 1), holds(9, "n1", 1)])
    assert "; no node has all of that free now: n1 has 1 of 2 GPUs; waits for job" in why(seen, 1).text
    hungry = replace(job(1), spec=replace(job(1).spec, resources=Resources(gpus_per_node=1, cpus=6)))
    on_cores = replace(holds(9, "n0"), placement=Placement((Share("n0", cpus=4),)))
    told = why(snapshot(nodes(1), [hungry], [on_cores]), 1)
    assert "; no node has all of that free now: n0 has 1 of 1 GPU and 4 of 6 cores; " in told.text


@given(clusters(), workloads(), st.data())
def test_no_words_deny_a_device_that_is_free(views: tuple[NodeView, ...], work: Work, data: st.DataObject) -> None:
    at_first = snapshot(views, [one for one, _ in work], now=1000.0)
    running = [
        Holding(one.job, "a", BATCH, one.placement, 0.0, 500.0, data.draw(st.sampled_from([None, 600.0])), True)
        for one in schedule(at_first)
        if isinstance(one, Start) and data.draw(st.booleans())
    ]
    gone = {one.id for one in running}
    seen = snapshot(views, [one for one, _ in work if one.id not in gone], running, now=1000.0)
    decisions = schedule(seen)
    explained = Explanation(seen)
    for wait in (one for one in decisions if isinstance(one, Wait)):
        assert why(seen, wait.job).text == wait.reason
        shown = explained.of(wait.job)
        assert shown is not None
        assert shown.reason == wait.reason
        if denied := re.match(r"needs (.*); none is free now", wait.reason):
            free = free_and_fitting(seen, wait.job, [one for one in decisions if isinstance(one, Start)])
            # The words are about one of the job's alternatives, or about all of them.
            assert not free.get(denied[1], set().union(*free.values())), wait.reason
        for name, keepers in re.findall(r"free on (n\d+), but reserved for jobs? ([\d, and]+)", wait.reason):
            assert name in {one.name for one in views if one.unusable is None}
            assert {int(number) for number in re.findall(r"\d+", keepers)} <= {one.id for one in seen.waiting}


def free_and_fitting(seen: ClusterView, number: int, starts: list[Start]) -> dict[str, set[tuple[str, int]]]:
    """By the words for each alternative: the free GPUs that would do, on nodes that could run it if they were idle."""
    wanted = next(one.spec.resources for one in seen.waiting if one.id == number)
    placements = [*(one.placement for one in seen.holding), *(one.placement for one in starts)]
    held = {(share.node, index) for placement in placements for share in placement.shares for index in share.gpus}
    return {
        str(need): {
            (one.name, gpu.index)
            for one in seen.nodes
            if one.unusable is None and need.least_gpus and Makes([without_foreign(one)]).count(need)
            for gpu in one.gpus
            if not (gpu.is_broken or gpu.is_foreign or (one.name, gpu.index) in held)
            and gpu_fits(need.resources, gpu.model, gpu.memory_bytes)
        }
        for need in needs_of(wanted, False, Makes(seen.nodes))
    }


def without_foreign(one: NodeView) -> NodeView:
    return replace(one, gpus=tuple(replace(gpu, is_broken=gpu.is_broken or gpu.is_foreign) for gpu in one.gpus))

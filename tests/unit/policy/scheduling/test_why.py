from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.policy.scheduling.test_scheduler import holds, job, node, nodes, snapshot
from ugro.kernel.jobs.model import ANY_GPUS, JobState, Placement, Share
from ugro.kernel.jobs.scheduling.model import Holding, Start
from ugro.kernel.jobs.scheduling.scheduler import schedule
from ugro.kernel.jobs.scheduling.why import why
from ugro.kernel.support.errors import NotFound
from ugro.kernel.support.quantities import without_numbers


def test_why_names_who_holds_what_is_needed_and_when_it_may_be_free() -> None:
    holding = [holds(7, "n0", time_limit_s=1000.0), holds(8, "n1", user="eve")]
    away = node("n2", unusable="is drained: new fans")
    seen = snapshot([*nodes(2), away], [job(1), job(2, on=2)], holding)
    first = why(seen, 1)
    assert (first.blocked_by, first.nodes, first.may_start_at) == ((7,), ("n0",), 1000.0)
    assert first.details == (
        "job 7 of bob holds n0 (GPU 0) and ends within 15m",
        "n2 is drained: new fans",
        "it can start within 15m, unless a more urgent job is submitted",
    )
    second = why(seen, 2)
    assert second.may_start_at is None
    assert "1 waiting job before it in the queue" in second.details
    assert second.details[-1] == "unknown when it can start"


def test_why_says_of_a_private_job_what_it_holds_and_neither_which_nor_whose_it_is() -> None:
    holding = [holds(7, "n0", time_limit_s=1000.0), holds(8, "n1", user="eve", time_limit_s=1900.0)]
    seen = snapshot(nodes(2), [job(1, on=2), job(2)], holding)
    first = why(seen, 1, is_hidden=lambda number: number == 8)
    assert first.text.endswith("waits for job 7 and a private job on n0 and n1, for 30m at most")
    assert first.details[:2] == (
        "job 7 of bob holds n0 (GPU 0) and ends within 15m",
        "a private job holds n1 (GPU 0) and ends within 30m",
    )
    assert (first.blocked_by, first.nodes) == ((7,), ("n0", "n1"))
    queue = [job(1, user="eve", on=2, priority=90), job(2)]
    behind = why(snapshot(nodes(2), queue, holding[1:]), 2, is_hidden=lambda _: True)
    words = " ".join((behind.text, *behind.details))
    assert "reserved for a private job" in words
    assert "a private job waits too, with priority " in words
    assert "eve" not in words
    assert behind.blocked_by == ()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("waits for job 7 on n0", "waits for job 7 on n0"),
        ("waits for job 8 on n0", "waits for a private job on n0"),
        ("jobs 8 and 9 have no time limit", "2 private jobs have no time limit"),
        ("jobs 7, 8 and 10 wait", "jobs 7, 10 and a private job wait"),
        ("jobs 7, 8, 9 and 12 more wait", "jobs 7, 12 more and 2 private jobs wait"),
        ("jobs 8 and 9 more wait", "a private job and 9 more wait"),
        ("job 80 ended; 8 of 9 cores", "job 80 ended; 8 of 9 cores"),
    ],
)
def test_a_sentence_loses_the_numbers_of_hidden_jobs_alone(text: str, shown: str) -> None:
    assert without_numbers(text, lambda number: number in (8, 9)) == shown


def test_why_looks_ahead_through_the_queue() -> None:
    waiting = [job(number, time_limit_s=100.0) for number in range(1, 8)]
    seen = snapshot(nodes(1), waiting, [holds(9, "n0", time_limit_s=300.0)])
    assert [why(seen, number).may_start_at for number in (1, 2, 7)] == [300.0, 400.0, 900.0]


def test_why_names_who_has_the_cores() -> None:
    on_cores = Placement((Share("n0", cpus=8),))
    holder = replace(holds(9, "n0", time_limit_s=700.0), placement=on_cores)
    told = why(snapshot(nodes(1), [job(1, gpus=0)], [holder]), 1)
    assert told.text == "needs a node with a free core; none is free now; waits for job 9 on n0, for 10m at most"
    assert told.details == (
        "job 9 of bob holds n0 and ends within 10m",
        "it can start within 10m, unless a more urgent job is submitted",
    )


def test_why_names_who_has_a_gpu_of_a_machine_that_others_use_too() -> None:
    ann = "job 12 of another agent (user ann, since 14:02 UTC)"
    shared = replace(node("n0"), gpus=(replace(node("n0").gpus[0], is_foreign=True, holder=ann),))
    told = why(snapshot([shared], [job(1)]), 1)
    assert told.text == f"needs a node with 1 GPU; no usable node has that; GPU 0 of n0 is used by {ann}"


def test_a_share_names_its_gpus_by_uuid_as_the_report_did() -> None:
    gpus = tuple(replace(gpu, uuid=f"GPU-{gpu.index}") for gpu in node("n0", gpus=2).gpus)
    [start] = schedule(snapshot([replace(node("n0", gpus=2), gpus=gpus)], [job(1, gpus=2)]))
    assert isinstance(start, Start)
    assert start.placement.shares[0].uuids == ("GPU-0", "GPU-1")


def test_why_says_that_a_job_would_start_without_the_gpus_it_waits_for() -> None:
    waits = job(1, gpus=ANY_GPUS)
    told = why(snapshot([node("gpu"), node("cpu", gpus=0)], [waits], [holds(9, "gpu")]), 1)
    assert told.text.startswith("needs a node with all its GPUs; none is free now; waits for job 9 on gpu")
    assert "without GPUs it could start now: --gpus-per-node 0" in told.details
    away = why(snapshot([node("gpu", unusable="is unreachable"), node("cpu", gpus=0)], [waits]), 1)
    assert away.text == "needs a node with all its GPUs; no usable node has that; gpu is unreachable"
    assert "without GPUs it could start now: --gpus-per-node 0" in away.details
    no_core = replace(node("cpu", gpus=0), unusable="is drained")
    assert "without" not in " ".join(why(snapshot([node("gpu"), no_core], [waits], [full("gpu")]), 1).details)


def full(name: str) -> Holding:
    return replace(holds(9, name), placement=Placement((Share(name, (0,), cpus=8),)))


def test_why_also_answers_for_jobs_that_do_not_wait() -> None:
    seen = snapshot(nodes(2), [job(1)], [holds(9, "n0")], ended={3: JobState.FAILED})
    assert why(seen, 1).text == "it starts now: free now: n1 (GPU 0)"
    assert why(seen, 9).text == "it holds n0 (GPU 0)"
    assert why(seen, 3).text == "it has ended: failed"
    with pytest.raises(NotFound, match="there is no job 77"):
        why(seen, 77)

"""The scheduler over time: jobs arrive, run and end, small ones without end, anything that hypothesis thinks of."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from bench.scheduler import cluster, jobs, running
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy.scheduling.test_scheduler import BATCH, GIB, NORMAL, URGENT, job, nodes, snapshot
from ugro.kernel.jobs.model import ALL_GPUS, ANY_GPUS, JobSpec, JobState, Launcher, Placement, Resources
from ugro.kernel.jobs.scheduling.demand import alternatives, gpu_fits
from ugro.kernel.jobs.scheduling.fit import Makes, check_fits, needs_of
from ugro.kernel.jobs.scheduling.model import (
    ClusterView,
    Decision,
    GpuView,
    Holding,
    NodeView,
    Preempt,
    Start,
    Wait,
    Waiting,
)
from ugro.kernel.jobs.scheduling.scheduler import actions, schedule

Work = list[tuple[Waiting, float]]  # jobs, and how long each takes


def check(seen: ClusterView, decisions: list[Decision]) -> None:
    """What must hold of every pass, whatever the snapshot."""
    told = Counter(one.job for one in decisions if not isinstance(one, Preempt))
    assert told == Counter(job.id for job in seen.waiting), "each waiting job is told once"
    assert all(one.reason for one in decisions)
    views = {one.name: one for one in seen.nodes}
    specs = {job.id: job.spec for job in seen.waiting}
    new = [one for one in decisions if isinstance(one, Start)]
    for start in new:
        assert any(satisfies(start.placement, way, views) for way in alternatives(specs[start.job].resources))
    placements = [one.placement for one in seen.holding] + [one.placement for one in new]
    shares = [share for placement in placements for share in placement.shares]
    devices = Counter((share.node, index) for share in shares for index in share.gpus)
    assert max(devices.values(), default=1) == 1, "no device twice"
    for view in seen.nodes:
        here = [share for share in shares if share.node == view.name]
        assert sum(share.cpus for share in here) <= view.cores
        assert sum(share.memory_bytes for share in here) <= view.memory_bytes
    backwards = replace(seen, nodes=seen.nodes[::-1], waiting=seen.waiting[::-1], holding=seen.holding[::-1])
    assert schedule(backwards) == decisions, "the order in which things are listed decides nothing"
    assert actions(seen) == [one for one in decisions if not isinstance(one, Wait)]


def satisfies(placement: Placement, way: Resources, views: dict[str, NodeView]) -> bool:
    if not way.min_nodes <= len(set(placement.nodes)) == len(placement.shares) <= max(way.min_nodes, way.max_nodes):
        return False
    for share in placement.shares:
        view = views[share.node]
        gpus = [gpu for gpu in view.gpus if gpu.index in share.gpus]
        working = [gpu for gpu in gpus if not gpu.is_foreign and not gpu.is_broken]
        usable = [gpu_fits(way, gpu.model, gpu.memory_bytes) for gpu in working]
        enough = len(gpus) >= 1 if way.gpus_per_node == ALL_GPUS else len(gpus) == way.gpus_per_node
        if way.gpus_per_node == ANY_GPUS:
            enough = all(bool(other.gpus) == bool(gpus) for other in placement.shares)
        if view.unusable or usable.count(True) < len(gpus) or not enough or not set(way.labels) <= set(view.labels):
            return False
        cpus = way.cpus if way.cpus is not None else share.cpus
        if (share.cpus, share.memory_bytes) != (cpus, way.memory_bytes) or not 0 <= share.cpus <= view.cores:
            return False
        if way.cpus is None and not 1 <= share.cpus <= max(1, len(gpus)):
            return False
    return True


@dataclass
class Simulation:
    """Jobs arrive, run as long as they take and end; every pass is checked."""

    nodes: tuple[NodeView, ...]
    arrivals: Work
    promises_hold: bool = True
    now: float = 0.0
    waiting: dict[int, Waiting] = field(default_factory=dict)
    holding: dict[int, Holding] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)
    promises: dict[int, float] = field(default_factory=dict)

    def run(self, passes: int = 2000) -> None:
        self.jobs = {job.id: job for job, _ in self.arrivals}
        self.takes = {job.id: takes for job, takes in self.arrivals}
        coming = sorted(self.jobs.values(), key=lambda job: -job.submitted_at)
        for _ in range(passes):
            times = [*self.ends.values(), *(job.submitted_at for job in coming[-1:])]
            if not times:
                return
            self.now = min(times)
            while coming and coming[-1].submitted_at <= self.now:
                arrived = coming.pop()
                self.waiting[arrived.id] = arrived
            self._end()
            seen = snapshot(self.nodes, self.waiting.values(), self.holding.values(), self.now)
            decisions = schedule(seen)
            check(seen, decisions)
            self._hear(decisions)
            for decision in decisions:
                self._apply(decision)
        raise AssertionError(f"still going after {passes} passes; waiting: {sorted(self.waiting)}")

    def _end(self) -> None:
        for number in [number for number, end in self.ends.items() if end <= self.now]:
            del self.ends[number]
            if self.holding.pop(number).is_stopping:
                self.waiting[number] = replace(self.jobs[number], state=JobState.RECOVERING)

    def _hear(self, decisions: list[Decision]) -> None:
        """What the first in the queue was told holds: its start moves forward only, while it is the first."""
        first = next((one for one in decisions if isinstance(one, Wait)), None)
        if self.promises_hold and first is not None and first.may_start_at is not None:
            told = self.promises.get(first.job, first.may_start_at)
            assert first.may_start_at <= told, f"job {first.job} was told {told}, now {first.may_start_at}"
            self.promises[first.job] = first.may_start_at

    def _apply(self, decision: Decision) -> None:
        if isinstance(decision, Preempt):
            self.holding[decision.job] = replace(self.holding[decision.job], is_stopping=True)
            self.ends[decision.job] = min(self.ends[decision.job], self.now + 10)
        elif isinstance(decision, Start):
            job = self.waiting.pop(decision.job)
            self.starts[job.id] = self.now
            self.ends[job.id] = self.now + self.takes[job.id]
            self.holding[job.id] = Holding(
                job.id, job.user, job.spec.priority, decision.placement, job.submitted_at, started_at=self.now,
                time_limit_s=job.spec.time_limit_s, is_preemptible=job.spec.is_preemptible,
            )  # fmt: skip


@pytest.mark.parametrize("limit", [None, 45.0])
@pytest.mark.parametrize(("on", "gpus"), [(3, 1), (1, 4), (3, 4)])
def test_a_large_job_is_not_starved_by_an_endless_stream_of_small_ones(on: int, gpus: int, limit: float | None) -> None:
    first = [(job(number, at=0.0), 20.0 + 2 * number) for number in range(1, 3 * gpus + 1)]
    large = job(100, gpus, on=on, at=1.0)
    stream = [(job(number, at=2.0 + (number - 200) * 2.0, time_limit_s=limit), 40.0) for number in range(200, 350)]
    simulation = Simulation(nodes(3, gpus), [*first, (large, 50.0), *stream])
    simulation.run()
    assert simulation.starts[100] <= max(takes for _, takes in first), "all that ran before it have ended by then"
    assert any(simulation.starts[number] > simulation.starts[100] for number in range(200, 350))


def test_without_limits_a_large_job_is_not_starved_by_users_who_come_and_go() -> None:
    own = (job(1, user="ann", at=0.0), 100_000.0)
    large = job(2, on=2, user="ann", at=1.0)
    stream = [(job(10 + number, user=f"user{number % 3}", at=number * 30.0), 70.0) for number in range(300)]
    simulation = Simulation(nodes(3), [own, (large, 50.0), *stream])
    simulation.run()
    assert simulation.starts[2] < 1000, "a quarter of an hour forgives the device that its user holds"


def test_what_a_job_with_limits_is_told_once_is_kept() -> None:
    first = [(job(number, at=0.0, time_limit_s=300.0 * number), 250.0 * number) for number in (1, 2, 3)]
    large = (job(100, on=3, at=1.0), 50.0)
    stream = [(job(200 + n, at=2.0 + n, time_limit_s=float(60 + 37 * n % 900)), 50.0 + 37 * n % 890) for n in range(60)]
    simulation = Simulation(nodes(3), [*first, large, *stream])
    simulation.run()
    assert simulation.starts[100] <= simulation.promises[100] <= 900.0


node_views = st.builds(
    lambda gpus, cores, label, group, speed: (gpus, cores, label, group, speed),
    st.lists(st.tuples(st.sampled_from([4, 8]), st.sampled_from(["", "", "", "foreign", "broken"])), max_size=4),
    st.integers(1, 6), st.booleans(), st.sampled_from("ab"), st.sampled_from([0.5, 1.0]),
)  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn, *, may_be_down: bool = True) -> tuple[NodeView, ...]:
    made = []
    for index, (gpus, cores, label, group, speed) in enumerate(draw(st.lists(node_views, min_size=1, max_size=4))):
        views = tuple(
            GpuView(position, "RTX", size * GIB, is_foreign=flaw == "foreign", is_broken=flaw == "broken")
            for position, (size, flaw) in enumerate(gpus)
        )
        down = "is unhealthy" if may_be_down and draw(st.integers(0, 4)) == 0 else None
        labels = ("big",) if label else ()
        made.append(NodeView(f"n{index}", cores, cores * GIB, views, labels, speed, group, down))
    return tuple(made)


def plain_resources() -> st.SearchStrategy[Resources]:
    return st.builds(
        lambda least, more, gpus, memory, cpus, labels: Resources(
            least, least + more, gpus, memory, cpus=cpus, memory_bytes=(cpus or 0) * GIB, labels=labels
        ),
        st.integers(1, 3), st.integers(0, 2), st.sampled_from([0, 1, 1, 2, 3, ALL_GPUS, ANY_GPUS]),
        st.sampled_from([None, None, 6 * GIB]), st.none() | st.integers(0, 4), st.sampled_from([(), (), ("big",)]),
    )  # fmt: skip


@st.composite
def workloads(draw: st.DrawFn, users: str = "abc", priorities: tuple[int, ...] = (BATCH, NORMAL, URGENT)) -> Work:
    either = st.lists(plain_resources(), min_size=2, max_size=2).map(lambda ways: Resources(any_of=tuple(ways)))
    made = []
    for number in range(1, draw(st.integers(1, 12)) + 1):
        takes = draw(st.integers(1, 300))
        limit = draw(st.sampled_from([None, takes + 0.0, takes * 2.0]))
        spec = JobSpec(
            "job", ("x",), Launcher.DDP, resources=draw(st.one_of(plain_resources(), either)),
            priority=draw(st.sampled_from(priorities)), is_preemptible=draw(st.booleans()), time_limit_s=limit,
        )  # fmt: skip
        at = float(draw(st.integers(0, 400)))
        made.append((Waiting(number, draw(st.sampled_from(users)), spec, at), float(takes)))
    return made


@given(clusters(), workloads(), st.data())
def test_any_pass_keeps_the_rules(views: tuple[NodeView, ...], work: Work, data: st.DataObject) -> None:
    everything = snapshot(views, [job for job, _ in work], now=1000.0)
    running_now = [
        Holding(one.job, "a", BATCH, one.placement, 0.0, 500.0, data.draw(st.sampled_from([None, 600.0])), True)
        for one in schedule(everything)
        if isinstance(one, Start) and data.draw(st.booleans())
    ]
    gone = {one.id for one in running_now}
    seen = snapshot(views, [job for job, _ in work if job.id not in gone], running_now, now=1000.0)
    check(seen, schedule(seen))


@given(clusters(may_be_down=False), workloads())
def test_every_job_that_can_run_starts_in_the_end(views: tuple[NodeView, ...], work: Work) -> None:
    # A more urgent job, or one of a user who holds less, may overtake the first in the queue here.
    simulation = Simulation(views, possible(work, views), promises_hold=False)
    simulation.run()
    assert set(simulation.starts) == {job.id for job, _ in simulation.arrivals}


@given(clusters(may_be_down=False), workloads(users="a", priorities=(NORMAL,)))
def test_nothing_that_fills_a_gap_ever_delays_the_first_in_the_queue(views: tuple[NodeView, ...], work: Work) -> None:
    simulation = Simulation(views, possible(work, views))
    simulation.run()
    assert all(simulation.starts[number] <= told for number, told in simulation.promises.items())


def possible(work: Work, views: tuple[NodeView, ...]) -> Work:
    """The jobs that fit without the GPUs that others use: here those never go away."""
    bare = [replace(view, gpus=tuple(gpu for gpu in view.gpus if not gpu.is_foreign)) for view in views]

    def can_run(resources: Resources) -> bool:
        # Whether it is to have GPUs is decided by those that there are, also by others' use of them.
        needs = needs_of(resources, False, Makes(views))
        return any(check_fits(need.resources, bare) is None for need in needs)

    return [(job, takes) for job, takes in work if can_run(job.spec.resources)]


@pytest.mark.proof
def test_twice_the_queue_takes_at_most_about_twice_the_time() -> None:
    full = running(ClusterView(1e6, cluster(), jobs(5000)))
    half = replace(full, waiting=full.waiting[:2500])

    def fastest(seen: ClusterView) -> float:
        times = []
        for _ in range(3):
            begin = time.process_time()
            schedule(seen)
            times.append(time.process_time() - begin)
        return min(times)

    assert fastest(full) <= 3 * fastest(half)

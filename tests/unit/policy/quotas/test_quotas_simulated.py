"""Quotas over time, with the real scheduler: no pass exceeds one, every job starts in the end, shares become fair."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy.scheduling.test_scheduler import job, nodes, started
from tests.unit.policy.scheduling.test_scheduler_simulated import Work, check, clusters, possible, workloads
from ugro.features.quotas.model import DAY_S, HOUR_S, WINDOWS_S, Limits, Pool, Quotas
from ugro.features.quotas.rules import Accounts, FairShare, HourUse
from ugro.features.quotas.rules_room import asks, refusal
from ugro.kernel.jobs.model import JobState
from ugro.kernel.jobs.records import Held, hours_between
from ugro.kernel.jobs.scheduling.fit import Makes, check_fits, needs_of
from ugro.kernel.jobs.scheduling.model import ClusterView, Decision, Holding, NodeView, Preempt, Start, Waiting
from ugro.kernel.jobs.scheduling.scheduler import schedule

Use = tuple[str, float, float, float]  # user, begin, end, GPUs


@dataclass
class Simulation:
    """Jobs run as long as they take; what they used goes to the books when they end, as the store keeps it."""

    nodes: tuple[NodeView, ...]
    quotas: Quotas
    fair: FairShare = field(default_factory=FairShare)
    now: float = 0.0
    waiting: dict[int, Waiting] = field(default_factory=dict)
    holding: dict[int, Holding] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)  # of attempts that have ended

    def view(self) -> ClusterView:
        hours: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        averages: dict[str, float] = defaultdict(float)
        for user, begin, end, gpus in self.uses:
            averages[user] += self.fair.decayed(gpus * (end - begin), self.now - (begin + end) / 2)
            for part in hours_between(begin, end):
                hours[user][part.hour] += gpus * part.seconds
        books = {
            user: tuple(HourUse((hour + 1) * HOUR_S, gpu_s) for hour, gpu_s in found.items())
            for user, found in hours.items()
        }
        accounts = Accounts(self.quotas, self.fair, books, dict(averages))
        return ClusterView(
            self.now, self.nodes, tuple(self.waiting.values()), tuple(self.holding.values()), accounts=accounts
        )

    def end_jobs(self) -> None:
        for number in [number for number, end in self.ends.items() if end <= self.now]:
            del self.ends[number]
            holder = self.holding.pop(number)
            assert holder.started_at is not None
            gpus = Held.of(holder.placement, holder.gpu_part).gpus
            self.uses.append((holder.user, holder.started_at, self.now, gpus))
            if holder.is_stopping:
                self.waiting[number] = replace(self.jobs[number], state=JobState.RECOVERING)

    def apply(self, decisions: list[Decision], takes: dict[int, float]) -> None:
        for decision in decisions:
            if isinstance(decision, Preempt):
                self.holding[decision.job] = replace(self.holding[decision.job], is_stopping=True)
                self.ends[decision.job] = min(self.ends[decision.job], self.now + 10)
            elif isinstance(decision, Start):
                job = self.waiting.pop(decision.job)
                self.starts[job.id] = self.now
                self.ends[job.id] = self.now + takes[job.id]
                self.holding[job.id] = Holding(
                    job.id, job.user, job.spec.priority, decision.placement, job.submitted_at, started_at=self.now,
                    time_limit_s=job.spec.time_limit_s, is_preemptible=job.spec.is_preemptible,
                )  # fmt: skip

    def run(self, work: Work, passes: int = 600) -> None:
        self.jobs = {job.id: job for job, _ in work}
        takes = {job.id: takes for job, takes in work}
        coming = sorted(self.jobs.values(), key=lambda job: -job.submitted_at)
        for _ in range(passes):
            if not (coming or self.ends or self.waiting):
                return
            due = [*self.ends.values(), *(job.submitted_at for job in coming[-1:])]
            # Nothing runs and nothing comes: only an hour that leaves a window can help.
            self.now = max(self.now, min(due)) if due else self.now + HOUR_S
            while coming and coming[-1].submitted_at <= self.now:
                arrived = coming.pop()
                self.waiting[arrived.id] = arrived
            self.end_jobs()
            seen = self.view()
            decisions = schedule(seen)
            check(seen, decisions)
            self.apply(decisions, takes)
            self.check_quotas()
        reasons = [one.reason for one in schedule(self.view())]
        raise AssertionError(f"still waiting after {passes} passes: {reasons}")

    def check_quotas(self) -> None:
        users = {job.user for job in self.jobs.values()}
        for pool in {str(pool): pool for user in users for pool in self.quotas.pools_of(user)}.values():
            mine = [holder for holder in self.holding.values() if holder.user in pool.members]
            held = [Held.of(holder.placement) for holder in mine]
            assert sum(one.gpus for one in held) <= _most(pool.limits.gpus)
            assert sum(one.cpus for one in held) <= _most(pool.limits.cpus)
            for limit, window_s in WINDOWS_S.items():
                used_s = sum(self._used(pool, self.now - window_s))
                assert used_s <= _most(pool.limits.of(limit)) * HOUR_S + 1

    def _used(self, pool: Pool, since: float) -> Iterator[float]:
        running = [
            (holder.user, holder.started_at or 0.0, self.now, Held.of(holder.placement).gpus)
            for holder in self.holding.values()
        ]
        for user, begin, end, gpus in (*self.uses, *running):
            if user in pool.members:
                yield gpus * max(0.0, end - max(begin, since))


def _most(limit: float | None) -> float:
    return float("inf") if limit is None else limit


small_limits = st.builds(
    lambda gpus, cpus, day, week: Limits(gpus=gpus, cpus=cpus, gpu_hours_per_day=day, gpu_hours_per_week=week),
    st.none() | st.integers(1, 4), st.none() | st.integers(1, 4), st.none() | st.sampled_from([0.2, 0.5, 2.0]),
    st.none() | st.sampled_from([0.5, 3.0]),
)  # fmt: skip
quotas = st.builds(
    lambda default, own, together: Quotas(
        default, {"a": own}, (Pool("both", together, frozenset("ab"), is_group=True),)
    ),
    small_limits, small_limits, small_limits,
)  # fmt: skip


@given(clusters(may_be_down=False), workloads(), quotas)
def test_no_schedule_exceeds_a_quota_and_every_job_starts_in_the_end(
    views: tuple[NodeView, ...], work: Work, limits: Quotas
) -> None:
    accepted = [(job, takes) for job, takes in possible(work, views) if is_accepted(job, views, limits)]
    simulation = Simulation(views, limits)
    simulation.run(accepted)
    assert set(simulation.starts) == {job.id for job, _ in accepted}


def is_accepted(job: Waiting, views: tuple[NodeView, ...], limits: Quotas) -> bool:
    """As it is submitted. One of its alternatives must fit the nodes as well as the quotas."""
    bare = [replace(view, gpus=tuple(gpu for gpu in view.gpus if not gpu.is_foreign)) for view in views]
    needs = needs_of(job.spec.resources, False, Makes(views))
    fitting = [need for need in needs if check_fits(need.resources, bare) is None]
    least = asks(fitting, job.spec.time_limit_s, job.spec.stop.grace_s)
    return refusal(job.spec, job.user, least, limits) is None


def test_a_large_job_is_not_starved_by_small_ones_of_its_own_user() -> None:
    large = (job(1, on=3, at=1.0), 100.0)
    first = (job(2, at=0.0), 900.0)
    stream = [(job(10 + number, at=2.0 + 300.0 * number), 700.0) for number in range(60)]
    simulation = Simulation(nodes(6), Quotas(Limits(gpus=3)))
    simulation.run([first, large, *stream])
    assert simulation.starts[1] < 3600 + 900 + 700, "an hour of patience, and then the jobs that run have ended"


def test_shares_converge_to_the_weights() -> None:
    """Three users want everything, always. One joins late; one may use twice as much as the others."""
    fair = FairShare(half_life_s=DAY_S / 2, weights={"ann": 2.0})
    simulation = Simulation(nodes(4), Quotas(), fair)
    used: dict[str, float] = defaultdict(float)
    takes: dict[int, float] = {}
    number, length_s, users = 0, 1200.0, ["bob"]
    while simulation.now < 6 * DAY_S:
        if simulation.now >= DAY_S:
            users = ["ann", "bob", "eve"]  # bob alone had all of it for a day
        for user in users:
            waits = sum(one.user == user for one in simulation.waiting.values())
            for _ in range(4 - waits):
                number += 1
                simulation.waiting[number] = job(number, user=user, at=simulation.now)
                takes[number] = length_s
        seen = simulation.view()
        decisions = schedule(seen)
        if simulation.now >= 4 * DAY_S:
            for one in started(decisions):
                used[seen_user(seen, one)] += length_s
        simulation.apply(decisions, takes)
        simulation.now += length_s
        simulation.end_jobs()
        simulation.uses = [use for use in simulation.uses if use[2] > simulation.now - 2 * DAY_S]
    total = sum(used.values())
    shares = {user: used[user] / total for user in used}
    assert abs(shares["ann"] - 0.5) < 0.03, shares
    assert abs(shares["bob"] - 0.25) < 0.03, shares
    assert abs(shares["eve"] - 0.25) < 0.03, shares


def seen_user(view: ClusterView, number: int) -> str:
    return next(one.user for one in view.waiting if one.id == number)

"""The queue that is kept from pass to pass decides as a plain pass does, which looks at every job, one by one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy.scheduling.test_scheduler import GIB, job, node, nodes, snapshot
from tests.unit.policy.scheduling.test_scheduler_simulated import clusters, workloads
from ugro.kernel.jobs.model import FINAL_STATES, After, JobSpec, JobState, Launcher, Resources
from ugro.kernel.jobs.scheduling.demand import Demand
from ugro.kernel.jobs.scheduling.fit import Makes, needs_of
from ugro.kernel.jobs.scheduling.model import (
    ClusterView,
    Decision,
    Fail,
    Holding,
    NodeView,
    Preempt,
    Start,
    Wait,
    Waiting,
    devices_of,
)
from ugro.kernel.jobs.scheduling.placement import Candidates, Ledger
from ugro.kernel.jobs.scheduling.queue import FORGIVEN_EVERY_S, WaitingJobs
from ugro.kernel.jobs.scheduling.reasons import start_reason, waits_for_holders, waits_for_others
from ugro.kernel.jobs.scheduling.reservation import reservation_for, victims_for
from ugro.kernel.jobs.scheduling.scheduler import MOST_RESERVATIONS, Explanation, actions, schedule, turn_of
from ugro.kernel.jobs.scheduling.why import why

# --- the judge: no lines, no kinds, nothing remembered from one job to the next ------------------------------------


class Plain:
    def __init__(self, view: ClusterView) -> None:
        self.view = view
        self.ledger = Ledger(view)
        self.held = [(one.user, one.devices, one.submitted_at, one.id, one.started_at) for one in view.holding]
        self.given: list[tuple[str, int, float, int]] = []

    def decisions(self) -> list[Decision]:
        left = list(self.view.waiting)
        made: list[Decision | tuple[int, Demand]] = []
        while left:
            first = min(left, key=lambda one: (-one.spec.priority, self._standing(one), one.submitted_at, one.id))
            left.remove(first)
            made += self._decide(first)
        return [one if not isinstance(one, tuple) else self._behind(*one) for one in made]

    def _standing(self, job: Waiting) -> int:
        own = [one for one in self.held if one[0] == job.user]
        given = [one for one in self.given if one[0] == job.user]
        devices = sum(one[1] for one in own) + sum(one[1] for one in given)
        place = (job.submitted_at, job.id)
        if any((at, number) < place for _, _, at, number in given):
            return devices
        older = [start for _, _, at, number, start in own if (at, number) < place]
        since = max([job.submitted_at, *(self.view.now if start is None else start for start in older)])
        return max(0, devices - int(max(0.0, self.view.now - since) // FORGIVEN_EVERY_S))

    def _decide(self, job: Waiting) -> list[Decision | tuple[int, Demand]]:
        after, ended = job.spec.after, self.view.ended
        if job.not_before is not None and job.not_before > self.view.now:
            return [Wait(job.id, "pause")]
        if job.state is JobState.QUEUED:
            if any(ended.get(other) in FINAL_STATES - {JobState.SUCCEEDED} for other in after.ok):
                return [Fail(job.id, "after")]
            if any(ended.get(other) not in FINAL_STATES for other in (*after.ok, *after.any)):
                return [Wait(job.id, "after")]
        on_one_node = job.spec.launcher is Launcher.COMMAND
        demand = Demand(tuple(needs_of(job.spec.resources, on_one_node, Makes(self.view.nodes))))
        limit = job.spec.time_limit_s
        end = None if limit is None else self.view.now + limit + job.spec.stop.grace_s
        allowed = self.ledger.allowed(end)
        for need in demand.needs:
            if (placed := Candidates(self.ledger, need, allowed, job.why_avoided).place()) is not None:
                devices = devices_of(placed.placement)
                self.given.append((job.user, devices, job.submitted_at, job.id))
                return [Start(job.id, placed.placement, start_reason(need, placed, self.ledger, allowed, end))]
        return self._keep(job, demand)

    def _keep(self, job: Waiting, demand: Demand) -> list[Decision | tuple[int, Demand]]:
        if len(self.ledger.reservations) >= MOST_RESERVATIONS:
            return [(job.id, demand)]
        reservation = reservation_for(job.id, demand, self.ledger)
        if reservation is None:
            return [(job.id, demand)]
        victims = victims_for(demand, job.spec.priority, self.ledger)
        for victim in victims:
            self.ledger.stop(victim.id)
        if victims:
            reservation = reservation_for(job.id, demand, self.ledger) or reservation
        blocked = waits_for_holders(reservation, victims, self.ledger)
        self.ledger.reserve(reservation)
        wait = Wait(job.id, blocked.reason, blocked.by, blocked.until)
        return [*(Preempt(victim.id, job.id, "") for victim in victims), wait]

    def _behind(self, job_id: int, demand: Demand) -> Wait:
        blocked = waits_for_others(demand, self.ledger)
        return Wait(job_id, blocked.reason, blocked.by, blocked.until)


def told(decision: Decision | None) -> tuple[object, ...]:
    """What is compared: all but the wording of what the judge does not put into words."""
    match decision:
        case Start(number, placement, reason):
            return ("start", number, placement, reason)
        case Preempt(number, for_job):
            return ("preempt", number, for_job)
        case Fail(number):
            return ("fail", number)
        case Wait(number, reason, by, until) if by or until or reason not in ("pause", "after"):
            is_early = " before attempt " in reason or reason.startswith("runs after")
            return ("early", number) if is_early else ("wait", number, reason, by, until)
        case Wait(number):
            return ("early", number)
    return ()


# --- a queue over time -----------------------------------------------------------------------------------------------


@dataclass
class Days:
    """Jobs come, start, end, fail, pause and are cancelled; the queue hears of each, and is never made again."""

    views: tuple[NodeView, ...]
    now: float = 1000.0
    jobs: WaitingJobs = field(default_factory=WaitingJobs)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    holding: dict[int, Holding] = field(default_factory=dict)
    started: dict[int, Waiting] = field(default_factory=dict)
    states: dict[int, JobState] = field(default_factory=dict)  # of all that ever came and do not wait

    def view(self) -> ClusterView:
        return ClusterView(self.now, self.views, (), tuple(self.holding.values()))

    def plain_view(self) -> ClusterView:
        return replace(self.view(), waiting=tuple(self.waiting.values())[::-1], ended=self.states)

    def submit(self, one: Waiting) -> None:
        self.waiting[one.id] = one
        self.jobs.put(one)

    def cancel(self, number: int) -> None:
        del self.waiting[number]
        self.jobs.discard(number)
        self._has_ended(number, JobState.CANCELLED)

    def end(self, number: int, state: JobState) -> None:
        del self.holding[number]
        if state is JobState.RECOVERING:
            again = replace(self.started[number], state=state, attempt=1, not_before=self.now + 50.0, avoid=("n0",))
            self.submit(again)
        else:
            self._has_ended(number, state)

    def _has_ended(self, number: int, state: JobState) -> None:
        self.states[number] = state
        self.jobs.learn(number, state)

    def apply(self, decisions: list[Decision]) -> None:
        for one in decisions:
            if isinstance(one, Start):
                self.started[one.job] = begun = self.waiting.pop(one.job)
                self.jobs.discard(one.job)
                self.states[one.job] = JobState.RUNNING
                self.holding[one.job] = Holding(
                    one.job, begun.user, begun.spec.priority, one.placement, begun.submitted_at, self.now,
                    begun.spec.time_limit_s, begun.spec.is_preemptible,
                )  # fmt: skip
            elif isinstance(one, Preempt):
                self.holding[one.job] = replace(self.holding[one.job], is_stopping=True)
            elif isinstance(one, Fail):
                self.cancel(one.job)

    def check(self) -> list[Decision]:
        for number in self.jobs.unknown_jobs():
            if (state := self.states.get(number)) is not None:
                self.jobs.learn(number, state)
        plain = Plain(self.plain_view()).decisions()
        expected = [told(one) for one in plain]
        assert [told(one) for one in schedule(self.plain_view())] == expected
        acted = actions(self.view(), self.jobs)
        assert [told(one) for one in acted] == [told(one) for one in plain if not isinstance(one, Wait)]
        explained = Explanation(self.view(), self.jobs)
        waits = [one for one in plain if not isinstance(one, Preempt)]
        assert [told(explained.of(one.job)) for one in waits] == [told(one) for one in waits]
        for one in dict.fromkeys(waits[:: max(1, len(waits) // 3)]):
            self._check_turn(one, plain)
        return acted

    def _check_turn(self, one: Decision, plain: list[Decision]) -> None:
        turn = turn_of(self.view(), one.job, self.jobs)
        before = plain[: plain.index(one)]
        assert told(turn.decision) == told(one)
        assert turn.waiting_before == tuple(other.job for other in before if isinstance(other, Wait))
        assert why(self.view(), one.job, self.jobs) == why(self.plain_view(), one.job)


@given(clusters(), st.lists(workloads(), min_size=2, max_size=5), st.data())
def test_a_queue_kept_over_time_decides_as_a_plain_pass_over_all_jobs(
    views: tuple[NodeView, ...], batches: list[list[tuple[Waiting, float]]], data: st.DataObject
) -> None:
    days, count = Days(views), 0
    for batch in batches:
        for _ in batch:
            count += 1
            one, _ = data.draw(st.sampled_from(batch[:3]))  # most of a long queue is alike
            after = After()
            if count > 1 and data.draw(st.integers(0, 3)) == 0:
                other = (data.draw(st.integers(1, count - 1)),)
                after = data.draw(st.sampled_from([After(ok=other), After(any=other)]))
            at = days.now + float(data.draw(st.integers(-900, 0)))
            days.submit(replace(one, id=count, spec=replace(one.spec, after=after), submitted_at=at))
        days.apply(days.check())
        days.check()
        days.now += data.draw(st.sampled_from([0.0, 30.0, 60.0, 1000.0]))
        for number in list(days.holding):
            if data.draw(st.booleans()):
                outcomes = [JobState.SUCCEEDED, JobState.FAILED, JobState.RECOVERING]
                days.end(number, data.draw(st.sampled_from(outcomes)))
        for number in list(days.waiting):
            if data.draw(st.integers(0, 9)) == 0:
                days.cancel(number)
        days.apply(days.check())


# --- what it is for ----------------------------------------------------------------------------------------------


def small(number: int, user: str = "ann") -> Waiting:
    spec = JobSpec("small", ("echo", str(number)), resources=Resources(cpus=0))
    return Waiting(number, user, spec, float(number))


class Counted(list[tuple[float, int, Waiting]]):
    """Jobs of a line, which counts how often a pass looks at one."""

    looks = 0

    def __getitem__(self, position: Any) -> Any:
        Counted.looks += 1
        return super().__getitem__(position)


def counted(count: int) -> WaitingJobs:
    waiting = WaitingJobs.of([small(number, f"user{number % 3}") for number in range(count)], {})
    assert len(list(waiting.lines)) == 3, "jobs of one user that ask for the same form one line"
    for line in waiting.lines:
        line.jobs = Counted(line.jobs)
    Counted.looks = 0
    return waiting


@pytest.mark.parametrize("count", [1000, pytest.param(20_000, marks=pytest.mark.proof)])
def test_a_pass_looks_at_the_jobs_that_it_starts_and_a_few_more(count: int) -> None:
    waiting = counted(count)
    assert len(actions(ClusterView(1e6, nodes(2)), waiting)) == 256, "each of the two nodes takes 128"
    assert Counted.looks <= 2 * (256 + 10)


@pytest.mark.parametrize("view", [ClusterView(1e6), ClusterView(1e6, (node("n0", unusable="is drained"),))])
def test_a_pass_over_a_queue_that_cannot_move_looks_at_one_job_of_a_kind(view: ClusterView) -> None:
    waiting = counted(20_000)
    assert actions(view, waiting) == []
    assert Counted.looks <= 10
    wait = Explanation(view, waiting).of(19_999)
    assert isinstance(wait, Wait)
    assert wait.reason.startswith("needs a node; no usable node has that")
    assert Counted.looks <= 20


def test_memory_does_not_grow_with_the_jobs_that_have_been() -> None:
    waiting = WaitingJobs()
    for number in range(1, 2001):
        after = After(ok=(number - 1,)) if number > 1 else After()
        spec = replace(small(number).spec, after=after, resources=Resources(memory_bytes=number * GIB))
        waiting.put(replace(small(number), spec=spec))
        if number > 1:
            waiting.learn(number - 1, JobState.SUCCEEDED)
            waiting.discard(number - 1)
    waiting.discard(2000)
    sizes = {name: len(value) for name, value in vars(waiting).items() if hasattr(value, "__len__")}
    assert all(size <= 70 for size in sizes.values()), sizes


def test_a_job_that_runs_after_one_nobody_knows_yet_stays_parked_until_that_is_known() -> None:
    waiting = WaitingJobs.of([job(2, after=After(ok=(1,)))], {})
    view = snapshot(nodes(1), [])
    assert waiting.unknown_jobs() == [1]
    assert actions(view, waiting) == []
    waiting.learn(1, JobState.RUNNING)
    assert waiting.unknown_jobs() == []
    assert actions(view, waiting) == []
    waiting.learn(1, JobState.SUCCEEDED)
    assert [one.job for one in actions(view, waiting)] == [2]

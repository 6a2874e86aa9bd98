"""Which nodes go to sleep and which are woken: single decisions, and a thousand random days."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from ugro.features.power.model import Act, PowerRule, PowerState
from ugro.features.power.rules import (
    HOUR_S,
    REST_S,
    SILENT_S,
    Situation,
    Step,
    again_in_s,
    decide,
    is_sleeping,
    refusal,
    wakes_in_s,
)

RULE = PowerRule(suspend_after_s=1800.0, cool_down_s=600.0, most_per_hour=6)
NOW = 100_000.0
IDLE = Situation(RULE, PowerState.AWAKE, NOW - 7200, linked_s=NOW - 7200, idle_s=1800.0)
ASLEEP = Situation(RULE, PowerState.ASLEEP, NOW - 3600, is_lost=True)
WAKING = Situation(RULE, PowerState.WAKING, NOW - 40, is_lost=True)
GOING = Situation(RULE, PowerState.GOING_TO_SLEEP, NOW - 5, linked_s=NOW - 3600)


def test_an_idle_node_goes_to_sleep() -> None:
    assert decide(IDLE, NOW) == Step(
        PowerState.GOING_TO_SLEEP, "nothing was done on it for 30m", Act.SUSPEND
    )


@pytest.mark.parametrize(
    "kept",
    [
        replace(IDLE, idle_s=1799.0),
        replace(IDLE, busy="has jobs"),
        replace(IDLE, holders=(7,)),
        replace(IDLE, wanted_by=(7,)),
        replace(IDLE, since_s=NOW - 599),
        replace(IDLE, acts_s=tuple(NOW - 60 * n for n in range(5))),
        replace(IDLE, failures=2, since_s=NOW - 1200),
        replace(IDLE, rule=replace(RULE, suspend_after_s=None)),
    ],
    ids=["not idle", "busy", "job", "wanted", "cool-down", "budget", "failures", "off"],
)
def test_a_node_stays_awake(kept: Situation) -> None:
    assert decide(kept, NOW) is None


def test_a_job_wakes_a_node_and_says_for_whom() -> None:
    assert decide(replace(ASLEEP, wanted_by=(7, 9)), NOW) == Step(
        PowerState.WAKING, "woken for jobs 7 and 9", Act.RESUME, jobs=(7, 9)
    )
    assert decide(ASLEEP, NOW) is None
    assert decide(replace(ASLEEP, wanted_by=(7,), since_s=NOW - REST_S / 2), NOW) is None, "it may not be asleep yet"


def test_a_node_that_is_woken_by_hand_is_awake() -> None:
    step = decide(replace(ASLEEP, linked_s=NOW - 1, is_lost=False), NOW)
    assert step is not None
    assert (step.state, step.act) == (PowerState.AWAKE, None)


def test_waking_takes_until_its_link_is_open_and_that_is_remembered() -> None:
    assert decide(WAKING, NOW) is None
    step = decide(replace(WAKING, linked_s=NOW, is_lost=False), NOW)
    assert step == Step(PowerState.AWAKE, "it was awake after 40.0 s", took_s=40.0)
    assert wakes_in_s(replace(ASLEEP, took_s=40.0)) == 40.0


def test_a_node_that_does_not_wake_is_a_problem_and_is_tried_again_after_growing_pauses() -> None:
    said = "it did not wake within 5m"
    assert decide(replace(WAKING, since_s=NOW - 300), NOW) == Step(PowerState.ASLEEP, said, problem=said)
    failed = replace(ASLEEP, since_s=NOW, failures=1, wanted_by=(7,), problem=said)
    assert decide(failed, NOW + 299) is None
    assert refusal(failed, NOW + 60) == "is asleep: it did not wake within 5m, and is tried again in 4m"
    again = decide(failed, NOW + 300)
    assert again is not None
    assert again.act is Act.RESUME
    assert [again_in_s(replace(failed, failures=n), NOW) for n in (1, 2, 3, 9)] == [300, 600, 1200, 3600]


def test_a_node_is_expected_back_until_it_has_failed_to_wake_three_times() -> None:
    assert [is_sleeping(state, 0) for state in PowerState] == [False, True, True, True]
    assert is_sleeping(PowerState.ASLEEP, 2)
    assert not is_sleeping(PowerState.ASLEEP, 3)
    assert is_sleeping(PowerState.GOING_TO_SLEEP, 3), "these were attempts to suspend it"
    assert is_sleeping(PowerState.WAKING, 3), "a job wants it, and it is tried"


def test_a_command_that_fails_need_not_be_waited_for() -> None:
    said = "it could not be woken: exit code 7"
    assert decide(replace(WAKING, complaint="exit code 7"), NOW) == Step(PowerState.ASLEEP, said, problem=said)


def test_the_budget_of_an_hour_also_holds_for_waking() -> None:
    spent = replace(ASLEEP, wanted_by=(7,), acts_s=tuple(NOW - 600 * n for n in range(6)))
    assert decide(spent, NOW) is None
    assert again_in_s(spent, NOW) == 600
    assert refusal(spent, NOW) == (
        "is asleep: in the last hour it was suspended or woken 6 times, and is tried again in 10m"
    )
    assert decide(spent, NOW + 600) is not None


def test_a_suspend_that_fails_or_hangs_leaves_it_awake_with_a_problem() -> None:
    assert decide(GOING, NOW) is None
    failed = decide(replace(GOING, complaint="no seat"), NOW)
    assert failed is not None
    assert (failed.state, failed.problem) == (PowerState.AWAKE, "it could not be suspended: no seat")
    hung = decide(replace(GOING, since_s=NOW - 60), NOW)
    assert hung is not None
    assert hung.problem == "it did not fall asleep within 1m"
    assert decide(replace(GOING, linked_s=None, is_lost=True, complaint="link broke"), NOW) == Step(
        PowerState.ASLEEP, "suspended"
    )


def test_after_a_crash_the_node_itself_says_what_became_of_it() -> None:
    reached = decide(replace(GOING, linked_s=NOW - 1), NOW)
    assert reached is not None
    assert (reached.state, reached.act) == (PowerState.AWAKE, None)
    assert decide(replace(GOING, linked_s=None), NOW) is None, "nobody has tried to reach it yet"


def test_a_silent_node_is_taken_to_be_asleep_unless_it_has_jobs() -> None:
    silent = Situation(RULE, PowerState.AWAKE, NOW - 7200, silent_s=NOW - SILENT_S, is_lost=True)
    step = decide(silent, NOW)
    assert step is not None
    assert (step.state, step.act) == (PowerState.ASLEEP, None)
    assert decide(replace(silent, silent_s=NOW - 1), NOW) is None
    woken = decide(replace(silent, silent_s=NOW - 1, holders=(3,)), NOW)
    assert woken == Step(PowerState.WAKING, "it fell silent with job 3 on it", Act.RESUME, jobs=(3,))
    refusing = Situation(RULE, PowerState.AWAKE, NOW - 7200, is_lost=True)
    assert decide(refusing, NOW) is None, "it answers, so it is awake, and unreachable"


# --- a thousand random days ----------------------------------------------------------------------------------------


@dataclass
class World:
    """One machine, the people and jobs around it, and the records of an agent that is killed now and then."""

    chance: random.Random
    rule: PowerRule
    now_s: float = 0.0
    state: PowerState = PowerState.AWAKE
    since_s: float = 0.0
    failures: int = 0
    acts_s: list[float] = field(default_factory=list)
    is_up: bool = True
    up_at_s: float | None = None  # when it comes up, if it was woken
    down_at_s: float | None = None
    linked_s: float | None = 0.0
    busy_s: float = 0.0
    job_until_s: float | None = None
    waiting: int | None = None
    next_job_s: float = 0.0
    sick: float = 0.0  # how often a wake or a suspend does nothing

    def day(self) -> None:
        self.next_job_s = self.chance.expovariate(1 / self.chance.choice((900.0, 3600.0, 20_000.0)))
        end_s = self.now_s + 86_400
        while self.now_s < end_s:
            self.now_s += self.chance.choice((1.0, 5.0, 20.0, 60.0))
            self._live()
            step = decide(self._situation(), self.now_s)
            if step is not None:
                self._take(step)
            self._judge()

    def _situation(self) -> Situation:
        is_silent = not self.is_up
        return Situation(
            self.rule, self.state, self.since_s, self.failures, tuple(self.acts_s), self.linked_s,
            self.since_silent_s if is_silent else None, is_silent, "has jobs" if self.job_until_s else None,
            self.now_s - self.busy_s, (1,) if self.waiting else (), (2,) if self.job_until_s else (),
        )  # fmt: skip

    since_silent_s: float = 0.0

    def _live(self) -> None:
        if self.down_at_s is not None and self.now_s >= self.down_at_s:
            self._go(is_up=False)
        if self.up_at_s is not None and self.now_s >= self.up_at_s:
            self._go(is_up=True)
        if self.chance.random() < 0.0005:  # somebody presses its button
            self._go(is_up=not self.is_up)
        if self.job_until_s is not None:
            self.busy_s = self.now_s
            if self.now_s >= self.job_until_s and self.is_up:
                self.job_until_s = None
        if self.waiting is None and self.now_s >= self.next_job_s:
            self.waiting = 1
        if self.waiting and self.is_up and self.state is PowerState.AWAKE and self.linked_s is not None:
            self.waiting, self.job_until_s = None, self.now_s + self.chance.uniform(1, 7200)
            self.next_job_s = self.now_s + self.chance.expovariate(1 / 3600)

    def _go(self, *, is_up: bool) -> None:
        if is_up != self.is_up:
            self.is_up, self.since_silent_s = is_up, self.now_s
            self.linked_s = self.now_s if is_up else None
            self.busy_s = self.now_s
        self.up_at_s = self.down_at_s = None

    def _take(self, step: Step) -> None:
        if step.act is Act.SUSPEND:
            assert (self.job_until_s, self.waiting) == (None, None), "nobody is to miss it"
            assert self.now_s - self.busy_s >= (self.rule.suspend_after_s or 0)
            assert self.now_s - self.since_s >= self.rule.cool_down_s
        self.failures = self.failures + 1 if step.problem else 0 if step.act is None else self.failures
        self.state, self.since_s = step.state, self.now_s
        if step.act is None:
            return
        self.acts_s.append(self.now_s)
        if self.chance.random() < 0.05:
            return  # the agent is killed before it acts
        if self.chance.random() >= self.sick:
            after_s = self.now_s + self.chance.uniform(1, 120)
            if step.act is Act.SUSPEND:
                self.down_at_s = after_s
            else:
                self.up_at_s = after_s

    def _judge(self) -> None:
        recent = [at_s for at_s in self.acts_s if self.now_s - at_s < HOUR_S]
        assert len(recent) <= self.rule.most_per_hour
        limit_s = {
            PowerState.WAKING: self.rule.resume_timeout_s,
            PowerState.GOING_TO_SLEEP: self.rule.suspend_timeout_s,
        }.get(self.state)
        if limit_s is not None:
            assert self.now_s - self.since_s <= limit_s + 60, f"{self.state} for too long"


@pytest.mark.parametrize("seed", range(4))
def test_in_random_days_nothing_is_interrupted_and_nothing_loops(seed: int) -> None:
    _days(seed, 2)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(100, 110))
def test_in_a_thousand_random_days_nothing_is_interrupted_and_nothing_loops(seed: int) -> None:
    _days(seed, 100)


def _days(seed: int, count: int) -> None:
    chance = random.Random(seed)
    for _ in range(count):
        rule = PowerRule(
            suspend_after_s=chance.choice((60.0, 600.0, 1800.0)),
            cool_down_s=chance.choice((0.0, 60.0, 600.0)),
            most_per_hour=chance.choice((2, 6, 20)),
            resume_timeout_s=chance.choice((60.0, 300.0)),
        )
        world = World(chance, rule, sick=chance.choice((0.0, 0.1, 0.9)))
        world.day()
        if world.sick == 0.0 and world.waiting:
            waited_s = world.now_s - world.next_job_s
            assert waited_s < 3 * HOUR_S, "a job waits for ever on a healthy machine"

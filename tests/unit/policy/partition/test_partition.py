"""Layers are cut as well as any cut there is, within the memory; and cut again when that pays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ugro.kernel.support.errors import Unsatisfiable
from ugro.train.rules import partition as interleave
from ugro.train.rules.partition import Costs, Device, Layer, Link, Partition, Problem, Stage, step_s, work_of
from ugro.train.rules.partition_planner import Move, cut, equal, fits, moved_layers, owners, plan, review, seconds

_time = st.floats(0.001, 2)
_bytes = st.integers(0, 100)
_layer = st.builds(Layer, _bytes, _bytes, _bytes)
_link = st.builds(Link, st.floats(0, 0.2), st.floats(0, 0.01))


@st.composite
def _problems(draw: st.DrawFn, most_devices: int = 4, most_layers: int = 7) -> Problem:
    count = draw(st.integers(1, most_devices))
    layers = tuple(draw(st.lists(_layer, min_size=count, max_size=most_layers)))
    memory = st.none() | st.integers(50, 2000)

    def times() -> tuple[float, ...]:
        return tuple(draw(st.lists(_time, min_size=len(layers), max_size=len(layers))))

    devices = tuple(Device(f"gpu{at}", times(), times(), draw(memory)) for at in range(count))
    links = tuple(tuple(draw(_link) for _ in devices) for _ in devices)
    return Problem(layers, devices, links, draw(st.integers(1, 9)), may_reorder=draw(st.booleans()))


def _every_cut(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    count, layers = len(problem.devices), len(problem.layers)
    orders = permutations(range(count)) if problem.may_reorder else [tuple(range(count))]
    for order in orders:
        for inner in combinations(range(1, layers), count - 1):
            stages = tuple(map(Stage, order, (0, *inner), (*inner, layers)))
            if all(fits(Costs(problem), stage, at) for at, stage in enumerate(stages)):
                yield stages


@given(_problems())
def test_no_other_cut_in_any_order_of_devices_is_better(problem: Problem) -> None:
    found = cut(problem)
    best_s = min((seconds(problem, stages) for stages in _every_cut(problem)), default=None)
    if best_s is None:
        assert found is None
        return
    assert found is not None
    assert found in set(_every_cut(problem)), "it is within the memory, with every layer once"
    assert math.isclose(seconds(problem, found), best_s, rel_tol=1e-9)


def _uniform(speeds: tuple[float, ...], layers: int = 12, micro_batches: int = 12, **options: Any) -> Problem:
    """Layers that all cost the same, three times as much backward and forward as a second, by speed."""
    devices = [Device(f"gpu{at}", (1 / one,) * layers, (2 / one,) * layers) for at, one in enumerate(speeds)]
    links = ((Link(0.001),) * len(speeds),) * len(speeds)
    return Problem((Layer(1, 1, 1),) * layers, tuple(devices), links, micro_batches, **options)


@pytest.mark.parametrize("devices", [7, 8])
def test_many_devices_are_ordered_well_though_not_every_order_is_tried(devices: int) -> None:
    # Only a chain of neighbours has fast links, and the given order is not that chain.
    chain = [*range(1, devices, 2), *range(0, devices, 2)]
    problem = _uniform((1.0,) * devices, layers=devices)
    near = {frozenset(pair) for pair in pairwise(chain)}
    links = tuple(
        tuple(Link(0.01 if frozenset((one, other)) in near else 5.0) for other in range(devices))
        for one in range(devices)
    )
    problem = replace(problem, links=links)
    found = plan(problem)
    assert found.predicted_s < step_s(problem, cut(replace(problem, may_reorder=False)) or ())


def test_layers_follow_speeds() -> None:
    found = plan(_uniform((1.0, 0.5, 0.25), layers=14))
    assert sorted((stage.device, stage.layers) for stage in found.stages) == [(0, 8), (1, 4), (2, 2)]
    assert "computes longest" in found.reason
    assert found.predicted_s < equal(_uniform((1.0, 0.5, 0.25), layers=14)).predicted_s / 1.7


def test_memory_bounds_a_fast_device() -> None:
    problem = _uniform((1.0, 0.5), layers=6, micro_batches=2)
    small = replace(problem.devices[0], memory_bytes=13)
    found = plan(replace(problem, devices=(small, problem.devices[1]), may_reorder=False))
    # Three layers of one byte, two micro-batches in flight, and gradients of two are received: 3 + 6 + 2 bytes.
    assert [stage.layers for stage in found.stages] == [3, 3]


def test_what_fits_nowhere_is_refused_with_figures() -> None:
    problem = _uniform((1.0, 1.0))
    devices = tuple(replace(device, memory_bytes=5) for device in problem.devices)
    with pytest.raises(Unsatisfiable, match=r"in no partition: it takes about .*gpu0 5 B"):
        plan(replace(problem, devices=devices))


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(Unsatisfiable, match="3 layers cannot be cut into 4 stages for 2 ranks"):
        plan(_uniform((1.0, 1.0), layers=3, stages_each=2))


# --- time -------------------------------------------------------------------------------------------------------


def test_equal_stages_take_the_time_of_the_textbook() -> None:
    problem = replace(_uniform((1.0, 1.0, 1.0), layers=3, micro_batches=8), links=((Link(),) * 3,) * 3)
    assert step_s(problem, plan(problem).stages) == pytest.approx((8 + 2) * 3.0)
    two = replace(_uniform((1.0, 1.0), layers=4, micro_batches=8, stages_each=2), links=((Link(),) * 2,) * 2)
    # Interleaved, a bubble is half as long: 8 micro-batches of 2 layers, and one of a layer each way.
    assert step_s(two, plan(two).stages) == pytest.approx(8 * 6.0 + 3.0)


@given(_problems(), st.integers(1, 3))
def test_a_step_is_as_long_as_its_busiest_device_at_least_and_all_in_turn_at_most(problem: Problem, each: int) -> None:
    problem = replace(problem, stages_each=each)
    assume(len(problem.layers) >= each * len(problem.devices))
    # Torch's interleaved schedule takes whole rounds of micro-batches only.
    rounds = max(1, problem.micro_batches // len(problem.devices))
    assume(each == 1 or problem.micro_batches % rounds == 0)
    stages = equal(problem).stages
    costs = Costs(problem)
    busy = [
        problem.micro_batches * sum(costs.compute_s(stage) for stage in stages if stage.device == device)
        for device in range(len(problem.devices))
    ]
    transfers = sum(costs.transfer_s(one.device, other) for one, other in pairwise(stages))
    taken = step_s(problem, stages)
    assert max(busy) * (1 - 1e-9) <= taken <= (sum(busy) + problem.micro_batches * transfers) * (1 + 1e-9)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12))
def test_every_micro_batch_passes_every_stage_once_each_way(devices: int, each: int, micro_batches: int) -> None:
    problem = Problem((), (), (), micro_batches, each)
    assume(each == 1 or micro_batches % max(1, micro_batches // devices) == 0)
    done = [work for position in range(devices) for work in work_of(position, problem, devices)]
    assert len(set(done)) == len(done) == 2 * devices * each * micro_batches
    assert {work.stage for work in done} == set(range(devices * each))
    assert {work.micro_batch for work in done} == set(range(micro_batches))


@given(_problems(most_devices=3, most_layers=9))
def test_interleaved_stages_are_whole_fit_and_are_no_worse_than_equal_ones(problem: Problem) -> None:
    problem = replace(problem, stages_each=2, micro_batches=2 * len(problem.devices))
    assume(len(problem.layers) >= 2 * len(problem.devices))
    try:
        found = plan(problem)
    except Unsatisfiable:
        return
    assert [stage.begin for stage in found.stages] == [0, *(stage.end for stage in found.stages[:-1])]
    assert found.stages[-1].end == len(problem.layers)
    assert [stage.device for stage in found.stages] == list(found.order) * 2
    assert interleave.fits(problem, found.stages)


# --- again ------------------------------------------------------------------------------------------------------


def _busy(problem: Problem, partition: Partition, times: tuple[float, ...]) -> list[float]:
    costs = Costs(problem)
    return [
        by * problem.micro_batches * sum(costs.compute_s(one) for one in partition.stages if one.device == device)
        for device, by in enumerate(times)
    ]


def test_layers_leave_a_device_that_became_slower_and_the_reason_says_so() -> None:
    problem = _uniform((1.0, 1.0))
    before = plan(problem)
    found = review(problem, before, _busy(problem, before, (3.0, 1.0)), Move(0.0, None))
    assert found.is_moved
    assert len(found.partition.layers_of(0)) == 3
    assert found.partition.reason.startswith("gpu0 takes 3.00 times as long as before: a step should take ")
    assert set(moved_layers(before, found.partition)) <= set(before.layers_of(0))
    back = review(found.problem, found.partition, _busy(found.problem, found.partition, (1 / 3, 1.0)), Move(0, None))
    assert back.is_moved
    assert owners(back.partition).count(0) == 6
    assert "gpu0 is 3.00 times as fast as before" in back.partition.reason


@pytest.mark.parametrize(
    ("times", "move"),
    [
        ((1.0, 1.0), Move(0.0, None)),  # nothing changed
        ((1.03, 1.0), Move(0.0, None)),  # too little
        ((3.0, 1.0), Move(0.0, 0)),  # no steps are left
        ((3.0, 1.0), Move(1e3, 10)),  # moving takes longer than all that it saves
    ],
)
def test_layers_stay_when_moving_does_not_pay(times: tuple[float, ...], move: Move) -> None:
    problem = _uniform((1.0, 1.0))
    before = plan(problem)
    found = review(problem, before, _busy(problem, before, times), move)
    assert not found.is_moved
    assert found.partition.stages == before.stages


def test_what_is_measured_is_what_is_predicted_from_then_on() -> None:
    problem = _uniform((1.0, 1.0))
    before = plan(problem)
    found = review(problem, before, _busy(problem, before, (1.2, 1.2)), Move(0.0, None))
    assert not found.is_moved
    assert found.partition.predicted_s == pytest.approx(1.2 * before.predicted_s, rel=0.01)

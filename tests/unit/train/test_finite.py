"""Numbers that are not finite, on one rank: whoever calls backward, on a device that lags behind, with a scaler."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ugro.train.balance import Balance
from ugro.train.failures import Finite, NotFinite
from ugro.train.group import Group
from ugro.train.local_course import LocalStepping, Tally
from ugro.train.reporting import Notices
from ugro.train.rules.failures import MOST_IN_A_ROW, OnNan
from ugro.train.samples import Progress, Slice
from ugro.train.stepping import Stepping
from ugro.train.surroundings import Surroundings
from ugro.train.telemetry import CpuClock, History

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


NANS = [math.nan] * (MOST_IN_A_ROW - 1)


class LateClock(CpuClock):
    """Of a device whose numbers are there a step later, and at once if somebody waits for them."""

    lag = 1

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, moment: Any) -> None:
        self.waits += 1


class Training:
    """Of one weight, whose loss is what it is asked for."""

    def __init__(self, folder: Path, nan: OnNan, clock: CpuClock, *, is_local: bool = False) -> None:
        group = Group(Surroundings.of({"UGRO_NODE": "gpu2"}), torch.device("cpu"))
        parts = (group, History(clock), Balance(("gpu2",), None), Progress())
        self.stepping = LocalStepping(*parts) if is_local else Stepping(*parts)
        if isinstance(self.stepping, LocalStepping):
            self.stepping.tally = Tally(clock.now())
        self.stepping.finite = Finite(nan, clock, Notices(folder, "7.1", 0))
        self.folder = folder
        self.stepping.model = torch.nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.stepping.model.parameters(), lr=0.1)

    def step(self, factor: float, *, calls_backward: bool = False, scaler: Any = None) -> None:
        """``calls_backward``: the script, and not UGRO."""
        stepping = self.stepping
        stepping.fetched(Slice(stepping.progress.step, (1,), 1, 1, 1, [0]))
        stepping.begin()
        loss = stepping.model(torch.ones(1, 1)).mean() * factor
        stepping.forward_done(torch.ones(()) if scaler is not None else loss)
        if calls_backward:
            (loss * stepping.weight()).backward()
        else:
            stepping.backward(loss, scaler=scaler)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.zero_grad()
        stepping.finish()

    @property
    def weight(self) -> float:
        return float(next(self.stepping.model.parameters()).detach())

    @property
    def said(self) -> list[str]:
        file = self.folder / "notices" / "0.json"
        return list(json.loads(file.read_text())["notices"]) if file.exists() else []


Make = Callable[..., Training]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    made: list[Training] = []

    def training(nan: OnNan, clock: CpuClock | None = None, **more: Any) -> Training:
        made.append(Training(tmp_path, nan, CpuClock() if clock is None else clock, **more))
        return made[-1]

    yield training
    for one in made:
        one.stepping.close()


def test_a_script_alone_may_call_backward_itself(make: Make) -> None:
    stops = make(OnNan.STOP)
    stops.step(1.0, calls_backward=True)
    with pytest.raises(NotFinite, match=r"the loss of rank 0 \(gpu2\) is not finite in step 1"):
        stops.step(math.nan, calls_backward=True)


@pytest.mark.parametrize("is_local", [False, True])
def test_an_update_is_left_out_whoever_calls_backward(make: Make, is_local: bool) -> None:
    training = make(OnNan.SKIP, is_local=is_local)
    training.step(1.0, calls_backward=True)
    before = training.weight
    training.step(math.nan, calls_backward=True)
    assert training.weight == before
    [said] = training.said
    assert said.startswith("the loss of rank 0 (gpu2) was not finite")
    assert said.endswith("the update was left out")


def test_a_device_is_asked_a_step_later_and_not_waited_for(make: Make) -> None:
    clock = LateClock()
    training = make(OnNan.STOP, clock)
    training.step(1.0)
    training.step(math.nan)
    with pytest.raises(NotFinite, match="not finite in step 1"):
        training.step(1.0)
    assert clock.waits == 0


def test_to_leave_out_an_update_a_device_is_waited_for(make: Make) -> None:
    clock = LateClock()
    training = make(OnNan.SKIP, clock)
    training.step(1.0)
    before = training.weight
    training.step(math.nan)
    assert training.weight == before
    training.step(1.0)
    assert training.weight != before
    assert clock.waits > 0


def test_the_last_step_of_a_device_is_said_when_the_script_ends(make: Make) -> None:
    training = make(OnNan.STOP, LateClock())
    training.step(1.0)
    training.step(math.nan)
    assert training.said == []
    training.stepping.close()
    training.stepping.close()
    assert training.said == ["the loss of rank 0 (gpu2) was not finite in step 1"]


def test_a_scaler_that_finds_no_scale_learns_nothing_and_is_noticed(make: Make) -> None:
    """A few steps that are not finite are how it finds one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    training = make(OnNan.STOP)
    for factor in (*NANS, 1.0, *NANS):
        training.step(factor, scaler=scaler)
    assert training.said == []
    with pytest.raises(NotFinite, match=f"and so it was in {MOST_IN_A_ROW} steps in a row"):
        training.step(math.nan, scaler=scaler)
    ignores = make(OnNan.IGNORE)
    for factor in (*NANS, math.nan):
        ignores.step(factor, scaler=scaler)
    assert ["the gradients of rank 0" in text for text in ignores.said] == [True]

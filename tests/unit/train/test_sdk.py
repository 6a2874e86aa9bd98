"""Parts of the SDK that need no other ranks: its import, the sampler, the environment."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.errors import NotFound, UgroError, UsageError
from ugro.train import checkpoint
from ugro.train.rules.balance import Plan
from ugro.train.rules.shares import Mode
from ugro.train.samples import Order, Progress, Schedule, Slice, slices
from ugro.train.surroundings import Surroundings
from ugro.train.telemetry import Word

# torch says once that it found no NumPy; nothing here needs it.
pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


def test_importing_the_sdk_imports_neither_torch_nor_the_rest_of_ugro() -> None:
    code = "import sys, ugro.train; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = done.stdout.split()
    assert "torch" not in loaded
    assert "asyncio" not in loaded
    parts = {name.split(".")[1] for name in loaded if name.startswith("ugro.")}
    assert parts <= {"core", "policy", "train"}


# --- every sample once ------------------------------------------------------------------------------------------


def _plan(shares: tuple[int, ...]) -> Plan:
    return Plan(shares, (1,) * len(shares), "for a test")


@st.composite
def _plans(draw: st.DrawFn, batch: int, ranks: int) -> list[Plan]:
    cuts = st.lists(st.integers(0, batch), min_size=ranks - 1, max_size=ranks - 1)
    found = []
    for _ in range(draw(st.integers(1, 5))):
        edges = [0, *sorted(draw(cuts)), batch]
        found.append(_plan(tuple(after - before for before, after in pairwise(edges))))
    return found


def _epoch(
    order: Order, plans: list[Plan], ranks: int, progress: Progress, steps: int | None = None
) -> tuple[list[int], Progress]:
    """What all ranks use, each with a schedule of its own; plans change on the way."""
    used: list[int] = []
    last = progress
    for rank in range(ranks):
        schedule = Schedule(plans[0], lead=2)
        for number, plan in enumerate(plans[1:]):
            schedule.change(plan, after_step=progress.step + 2 * number)
        for number, slice_ in enumerate(slices(order, schedule, progress, rank)):
            if number == steps:
                break
            used += _used(slice_)
            last = Progress(progress.seed, progress.epoch, slice_.cursor, slice_.step + 1)
    return used, last


def _used(slice_: Slice) -> list[int]:
    assert slice_.indices, "a rank always has something to compute"
    return slice_.indices if slice_.own else []


@given(st.data(), st.integers(1, 300), st.integers(3, 40), st.integers(1, 3), st.integers(1, 3))
def test_every_sample_is_used_once_also_when_a_run_resumes_with_another_number_of_ranks(
    data: st.DataObject, samples: int, batch: int, before: int, after: int
) -> None:
    order = Order(samples, batch)
    stop = data.draw(st.integers(0, order.steps))
    first, progress = _epoch(order, data.draw(_plans(batch, before)), before, Progress(5, 2), stop)
    rest, _ = _epoch(order, data.draw(_plans(batch, after)), after, progress)
    assert Counter(first + rest) == Counter(range(samples))


def test_epochs_differ_and_seeds_repeat() -> None:
    order = Order(50, 10)
    assert order.of(1, 0).tolist() == order.of(1, 0).tolist()
    assert order.of(1, 0).tolist() != order.of(1, 1).tolist()
    assert Order(50, 10, is_shuffled=False).of(1, 1).tolist() == list(range(50))


def test_an_incomplete_last_batch_can_be_dropped() -> None:
    order = Order(53, 10, drops_last=True)
    used, _ = _epoch(order, [_plan((6, 4))], 2, Progress())
    assert (order.steps, len(used), len(set(used))) == (5, 50, 50)


def test_a_plan_holds_from_the_first_step_that_no_loader_has_begun_with() -> None:
    schedule = Schedule(_plan((5, 5)), lead=4)
    assert schedule.change(_plan((7, 3)), after_step=10) == 15
    assert [schedule.at(step).shares[0] for step in (13, 14, 15, 16)] == [5, 5, 7, 7]


# --- the environment, words and checkpoints ---------------------------------------------------------------------


def test_without_a_launcher_there_is_one_rank() -> None:
    found = Surroundings.of({})
    assert (found.rank, found.ranks, found.attempt, found.mode) == (0, 1, 1, Mode.ADAPTIVE)
    assert (found.resume, found.speeds) == (None, ())
    assert found.checkpoints == found.output / "checkpoints"


def test_what_ugro_says_is_taken() -> None:
    env = {
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "UGRO_NODE": "gpu2", "UGRO_ATTEMPT": "4", "UGRO_JOB": "7",
        "UGRO_OUTPUT": "/x/output", "UGRO_CHECKPOINT_DIR": "/x/checkpoints", "UGRO_RESUME_DIR": "/x/resume",
        "UGRO_BALANCE": "static", "UGRO_SPEEDS": "1, 0.5,0.25",
    }  # fmt: skip
    expected = Surroundings(
        2, 3, 1, "gpu2", 4, "7", Path("/x/output"), Path("/x/checkpoints"), Path("/x/resume"), Mode.STATIC,
        (1, 0.5, 0.25),
    )  # fmt: skip
    assert Surroundings.of(env) == expected
    assert Surroundings.of({"TORCHELASTIC_RESTART_COUNT": "2"}).attempt == 3


@pytest.mark.parametrize("env", [{"RANK": "first"}, {"UGRO_BALANCE": "sometimes"}, {"UGRO_SPEEDS": "fast,slow"}])
def test_an_environment_that_makes_no_sense_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        Surroundings.of(env)


@given(st.booleans(), st.booleans(), st.booleans(), st.none() | st.integers(1, 10**6), st.integers(-1, 10**9))
def test_a_word_arrives_as_it_was_said(stops: bool, oom: bool, clean: bool, cap: int | None, step: int) -> None:
    word = Word(stops, oom, clean, cap, step, 7, 2, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    assert Word.of(word.numbers()) == word


def test_a_checkpoint_is_whole_or_not_there_and_old_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.write(tmp_path, step, {"objects": {"x": step}}, most_kept=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000002.pt", "step_000000003.pt"]
    assert checkpoint.read(tmp_path)["objects"] == {"x": 3}
    assert checkpoint.read(tmp_path / "step_000000002.pt")["objects"] == {"x": 2}


def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path: Path) -> None:
    import torch

    with pytest.raises(NotFound):
        checkpoint.read(tmp_path)
    torch.save({"mine": 1}, tmp_path / "step_1.pt")
    with pytest.raises(UgroError, match="not a checkpoint"):
        checkpoint.read(tmp_path)


def test_random_generators_go_on_where_they_were() -> None:
    import random

    import torch

    kept = checkpoint.random_state()
    expected = (random.random(), random.gauss(0, 1), torch.rand(3).tolist())
    checkpoint.set_random_state(kept)
    assert (random.random(), random.gauss(0, 1), torch.rand(3).tolist()) == expected

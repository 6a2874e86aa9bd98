"""What the integrations of libraries are made of: portions of an update, orders, places of checkpoints, versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.errors import NotFound, UgroError
from ugro.train import checkpoint as places
from ugro.train.integrations.journal import Supported, numbers
from ugro.train.loader import Portion, cut, iterations
from ugro.train.rules.balance import Plan
from ugro.train.samples import Order, Progress, Schedule, Slice, slices

SHARES = ((14, 7, 3), (8, 8, 8), (20, 2, 2))


def schedule(shares: tuple[int, ...]) -> Schedule:
    return Schedule(Plan(shares, (1,) * len(shares), "as given"))


def epoch_of(samples: int, shares: tuple[int, ...], accumulated: int, cursor: int = 0) -> list[list[Portion]]:
    """The portions of each rank."""
    order = Order(samples, sum(shares), False)
    ranks = range(len(shares))
    return [list(iterations(order, schedule(shares), Progress(0, 0, cursor, 0), rank, accumulated)) for rank in ranks]


@given(st.integers(1, 200), st.sampled_from(SHARES), st.sampled_from([1, 2, 4]))
def test_the_portions_of_an_epoch_have_every_sample_once(samples: int, shares: tuple[int, ...], parts: int) -> None:
    by_rank = epoch_of(samples, shares, parts)
    used = [index for portions in by_rank for portion in portions if portion.own for index in portion.indices]
    assert sorted(used) == list(range(samples))
    assert len({len(portions) for portions in by_rank}) == 1, "each rank takes part in every batch"
    for together in zip(*by_rank, strict=True):
        assert sum(portion.part for portion in together) == pytest.approx(1)
        assert all(portion.indices for portion in together)


def test_batches_that_are_accumulated_are_those_of_one_process() -> None:
    by_rank = epoch_of(50, (14, 7, 3), 2)
    batches = [
        sorted(index for portion in together if portion.own for index in portion.indices)
        for together in zip(*by_rank, strict=True)
    ]
    assert batches == [list(range(begin, min(begin + 12, 50))) for begin in range(0, 50, 12)]
    assert [portion.is_first for portion in by_rank[0]] == [True, False, True, False, True]
    assert [portion.is_last for portion in by_rank[0]] == [False, True, False, True, True]
    assert by_rank[0][0].slice.own == by_rank[0][1].slice.own == 14, "the share of the whole update"


def test_an_epoch_goes_on_in_the_middle_of_an_update() -> None:
    rest = epoch_of(50, (14, 7, 3), 2, cursor=12)
    used = sorted(index for portions in rest for portion in portions if portion.own for index in portion.indices)
    assert used == list(range(12, 50))
    assert rest[0][0].is_first
    assert rest[0][0].is_last


@given(st.integers(1, 30), st.integers(1, 12))
def test_no_portion_is_larger_than_what_a_device_takes_at_once(own: int, at_once: int) -> None:
    slice_ = Slice(3, (own, 5), own, 1, 40, list(range(own)))
    portions = cut(slice_, at_once)
    assert [index for portion in portions for index in portion.indices] == list(range(own))
    assert max(portion.own for portion in portions) <= at_once
    assert [portion.is_last for portion in portions] == [False] * (len(portions) - 1) + [True]
    assert sum(portion.part for portion in portions) == pytest.approx(own / (own + 5))


def test_a_rank_without_samples_takes_part_with_some_that_do_not_count() -> None:
    order = Order(25, 24, False)
    last = list(slices(order, schedule((14, 7, 3)), Progress(), 2))[-1]
    (portion,) = cut(last, 4)
    assert (portion.own, portion.part, portion.indices) == (0, 0, [24])


# --- orders -----------------------------------------------------------------------------------------------------


def test_a_sampler_s_order_depends_on_seed_and_epoch_alone() -> None:
    torch = pytest.importorskip("torch")
    from ugro.train.loader import Sampled, order_of

    sampler = torch.utils.data.WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 50)
    order = order_of(sampler, 8, drops_last=False, agree=lambda digest: True)
    assert isinstance(order, Sampled)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = order.of(7, 0).tolist()
    assert torch.equal(before, torch.get_rng_state()), "the script's random numbers were used"
    torch.manual_seed(2)
    assert order.of(7, 0).tolist() == first
    assert order.of(7, 1).tolist() != first
    assert order.of(8, 0).tolist() != first
    with pytest.raises(UgroError, match="another order on each rank"):
        order_of(sampler, 8, drops_last=False, agree=lambda digest: False).of(7, 0)


def test_a_sampler_of_batches_is_refused() -> None:
    torch = pytest.importorskip("torch")
    from ugro.train.loader import order_of

    batches = torch.utils.data.BatchSampler(range(10), 3, False)
    with pytest.raises(UgroError, match="does not return indices"):
        order_of(batches, 8, drops_last=False).of(0, 0)


# --- places -----------------------------------------------------------------------------------------------------


def test_a_published_checkpoint_is_complete_and_the_newest_ones_stay(tmp_path: Path) -> None:
    env = {"UGRO_CHECKPOINT_DIR": str(tmp_path / "kept")}
    for step in (5, 10, 15):
        written = tmp_path / "trained" / f"checkpoint-{step}"
        (written / "inner").mkdir(parents=True)
        (written / "model").write_text(str(step))
        (written / "inner" / "more").write_text("more")
        assert places.publish(written, written.name, 2, env) == tmp_path / "kept" / written.name
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["checkpoint-10", "checkpoint-15"]
    assert (tmp_path / "kept/checkpoint-15/model").read_text() == "15"
    assert (tmp_path / "kept/checkpoint-15/inner/more").read_text() == "more"
    again = tmp_path / "trained" / "checkpoint-15"
    (again / "model").unlink()
    (again / "model").write_text("of another attempt")
    places.publish(again, again.name, None, env)
    assert (tmp_path / "kept/checkpoint-15/model").read_text() == "of another attempt"


def test_nothing_is_published_outside_ugro_or_where_it_is_already(tmp_path: Path) -> None:
    written = tmp_path / "kept" / "checkpoint-5"
    written.mkdir(parents=True)
    assert places.publish(written, written.name, None, {}) is None
    assert places.publish(written, written.name, None, {"UGRO_CHECKPOINT_DIR": str(tmp_path / "kept")}) is None


def test_a_checkpoint_of_something_else_is_named(tmp_path: Path) -> None:
    assert places.resumable("*.ckpt", {}) is None
    (tmp_path / "step_3.pt").write_text("")
    with pytest.raises(NotFound, match="not a checkpoint of this library"):
        places.resumable("*.ckpt", {"UGRO_RESUME_DIR": str(tmp_path)})
    (tmp_path / "step_3.ckpt").write_text("")
    assert places.resumable("*.ckpt", {"UGRO_RESUME_DIR": str(tmp_path)}) == tmp_path / "step_3.ckpt"


def test_the_state_of_another_version_is_refused(tmp_path: Path) -> None:
    assert places.read_state(tmp_path) is None
    places.write_state(tmp_path, {"step": 3})
    assert places.read_state(tmp_path) == {"version": 1, "step": 3}
    (tmp_path / places.STATE).write_text('{"version": 99}')
    with pytest.raises(UgroError, match="not written by this version"):
        places.read_state(tmp_path)


# --- versions ---------------------------------------------------------------------------------------------------


def test_versions_are_compared_by_their_numbers() -> None:
    assert numbers("2.6.1.post0") == (2, 6, 1)
    assert numbers("5.23.0") > numbers("5.9.1")


def test_an_unsupported_version_is_named_with_the_range() -> None:
    with pytest.raises(UgroError, match=r"pytest .* is not supported: it must be 1 or newer, and below 2") as caught:
        Supported("pytest", (1,), (2,)).check()
    assert caught.value.hint == 'pip install "pytest>=1,<2"'
    Supported("pytest", (1,), (1000,)).check()
    with pytest.raises(ImportError, match="needs no-such-library"):
        Supported("no-such-library", (1,), (2,)).check()


@pytest.mark.parametrize(
    ("name", "value", "told"), [("UGRO_SYNC", "local", "local SGD needs"), ("UGRO_MIN_RANKS", "1", "elastic training")]
)
def test_what_a_library_cannot_do_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    from ugro.train.integrations.balanced import Balanced

    monkeypatch.setenv(name, value)
    with pytest.raises(UgroError, match=told):
        Balanced()

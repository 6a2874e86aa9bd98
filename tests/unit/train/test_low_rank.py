"""Gradients of low rank: what they leave out, and what a step with gradients that are no numbers leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ugro.train.parallel.ddp import LowRank

torch = pytest.importorskip("torch")


class Bucket:
    """As DDP's, with one parameter in it."""

    def __init__(self, parameter: Any, gradient: Any) -> None:
        self._parameter, self._gradient = parameter, gradient

    def buffer(self) -> Any:
        return self._gradient

    def gradients(self) -> list[Any]:
        return [self._gradient]

    def parameters(self) -> list[Any]:
        return [self._parameter]

    def is_last(self) -> bool:
        return True


@pytest.fixture
def group() -> Iterator[None]:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sent(low_rank: LowRank, parameter: Any, gradient: Any) -> Any:
    bucket = Bucket(parameter, gradient.clone())
    return low_rank.reduce(bucket).wait()


@pytest.mark.usefixtures("group")
def test_what_is_left_out_is_sent_later() -> None:
    made = torch.Generator().manual_seed(1)
    parameter, gradient = torch.zeros(64, 64), torch.randn(64, 64, generator=made)
    low_rank = LowRank(1)
    total = sum(sent(low_rank, parameter, gradient) for _ in range(200)) / 200
    assert float((total - gradient).norm() / gradient.norm()) < 0.2


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_scale_that_was_too_large_spoils_one_step_only(wrong: float) -> None:
    """A GradScaler tries such a scale now and then, sees it in the gradients, and skips the step."""
    made = torch.Generator().manual_seed(1)
    parameter, gradient = torch.zeros(64, 64), torch.randn(64, 64, generator=made)
    low_rank = LowRank(1)
    sent(low_rank, parameter, gradient)
    spoilt = gradient.clone()
    spoilt[3, 4] = wrong
    assert not sent(low_rank, parameter, spoilt).isfinite().all()
    assert sent(low_rank, parameter, gradient).isfinite().all()

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.features.services.inference.loading import NoRoom, _not_loaded


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()])
def test_too_little_memory_may_be_enough_at_the_next_start(error: Exception) -> None:
    assert isinstance(_not_loaded(Path("model"), error), NoRoom)
    assert not isinstance(_not_loaded(Path("model"), ValueError("unknown model type")), NoRoom)

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from ugro.node.process.execute import is_readable

HIGH = 1500


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its reading end has a number that ``select.select`` does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= HIGH:
        pytest.skip("no descriptor here is that high")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 1), hard))
    low, write = os.pipe()
    read = os.dup2(low, HIGH)
    os.close(low)
    try:
        yield read, write
    finally:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_high_descriptor_is_waited_for(pipe: tuple[int, int]) -> None:
    read, write = pipe
    assert not is_readable(read, 0)
    assert not is_readable(read, 0.001)
    os.write(write, b"x")
    assert is_readable(read, None)
    os.read(read, 1)
    os.close(write)
    assert is_readable(read, 1), "its end can be read, too"

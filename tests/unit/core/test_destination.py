"""Machines as people type them."""

from __future__ import annotations

import pytest

from ugro.kernel.agent.model import Destination
from ugro.kernel.support.errors import UsageError


@pytest.mark.parametrize(
    ("word", "host", "user", "port"),
    [
        ("gpu1", "gpu1", None, None),
        ("gpu1.lan:2222", "gpu1.lan", None, 2222),
        ("ann@10.0.0.7", "10.0.0.7", "ann", None),
        ("ann@10.0.0.7:22", "10.0.0.7", "ann", 22),
        ("ann@lab.org@gpu1", "gpu1", "ann@lab.org", None),
        ("fe80::1", "fe80::1", None, None),
        ("ann@fe80::1%eth0", "fe80::1%eth0", "ann", None),
        ("[::1]:2222", "::1", None, 2222),
        ("ann@[::1]", "::1", "ann", None),
    ],
)
def test_a_machine_is_told_from_its_user_and_its_port(word: str, host: str, user: str | None, port: int | None) -> None:
    assert Destination.parse(word) == Destination(host, user, port)


@pytest.mark.parametrize("word", ["", "@", "ann@", "@gpu1", "gpu1:", "gpu1:0", "gpu1:65536", "[::1]x", "a:²"])
def test_what_names_no_machine_is_refused_with_an_example(word: str) -> None:
    with pytest.raises(UsageError, match="is not a host") as caught:
        Destination.parse(word)
    assert "USER@HOST:PORT" in str(caught.value.hint)

from __future__ import annotations

import pytest

from ugro.kernel.agent.model import ClusterFacts, Destination, KnownHost


@pytest.mark.parametrize("word", ["gpu1", "ann@gpu1", "ann@10.0.0.7:2222", "::1", "ann@[::1]:2222", "fe80::1%eth0"])
def test_a_host_is_written_as_it_is_read(word: str) -> None:
    assert KnownHost("name", Destination.parse(word)).word == word


def test_a_host_is_known_by_its_name_or_by_where_it_is() -> None:
    file = ClusterFacts((KnownHost("gpu1", Destination("10.0.0.7", "ann")),), has_local=False, ssh_config=None)
    assert [word for word in ("gpu1", "ann@10.0.0.7", "10.0.0.7", "ann@10.0.0.7:22", "gpu2") if file.has(word)] == [
        "gpu1",
        "ann@10.0.0.7",
    ]

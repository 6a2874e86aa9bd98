"""Packages without a wheel, which are built for nobody but the owner: seen before uv starts, and in what it says."""

from __future__ import annotations

import pytest

from ugro.policy.python_env.wheels_only import source_archive, unbuilt


@pytest.mark.parametrize(
    "line",
    [
        "thing @ https://host/thing-1.0.tar.gz",
        "thing[a]@https://host/thing-1.0.zip",
        "thing @ https://host/thing-1.0.tar.gz#/thing.whl",
        "thing @ https://host/thing-1.0.tar.gz?name=thing.whl",
        "thing @ https://[host/thing.whl",
    ],
)
def test_an_archive_of_source_code_is_named(line: str) -> None:
    assert source_archive(["numpy==2.0", line]) == "thing"


def test_wheels_and_packages_of_an_index_are_taken() -> None:
    lines = ["numpy==2.0 --hash=sha256:aa", "x @ https://host/x-1.0-py3-none-any.whl#sha256=aa ; python_version>'3'"]
    assert source_archive(lines) is None

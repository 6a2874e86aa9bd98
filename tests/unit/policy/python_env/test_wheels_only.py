"""Packages without a wheel, which are built for nobody but the owner: seen before uv starts, and in what it says."""

from __future__ import annotations

import pytest

from ugro.features.environments.rules.requirements import BadRequirement, requirements_from_web, source_archive, unbuilt

A, B = "a" * 64, "b" * 64


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


@pytest.mark.parametrize(
    "said",
    [
        "error: No solution found\n  cause: Because thing==1.0 has no usable wheels and only thing==1.0\n is available",
        "hint: Wheels are required for `thing` because building from source is\n      disabled for all packages",
        "  cause: Building source distributions for `thing` is disabled\n",
    ],
)
def test_what_uv_would_have_built_is_named(said: str) -> None:
    assert unbuilt(said) == "thing"


def test_a_package_for_other_platforms_is_not_taken_for_one_without_a_wheel() -> None:
    assert unbuilt("Because thing==1.0 has no wheels with a matching platform tag") is None


def lock(*packages: str) -> str:
    return "\n".join(f"[[packages]]\n{package}" for package in packages)


def file(url: str, sha256: str = A) -> str:
    return f'{{ url = "{url}", hashes = {{ sha256 = "{sha256}" }} }}'


def test_what_uv_resolved_is_pinned_with_its_hashes() -> None:
    wheels = f"{file('https://h/a-1.whl', B)}, {file('http://h/a-1b.whl')}"
    text = lock(
        f'name = "a"\nversion = "1"\nmarker = "python_version > \'3\'"\nwheels = [{wheels}]',
        f'name = "b"\nversion = "2"\narchive = {file("https://h/b-2.whl")}',
        f'name = "c"\nversion = "3"\nwheels = [{file("file:///srv/my%20wheels/c-3.whl")}]',
    )
    assert requirements_from_web(text, ["/srv/my wheels"]).splitlines() == [
        f"a==1 ; python_version > '3' --hash=sha256:{A} --hash=sha256:{B}",
        f"b @ https://h/b-2.whl --hash=sha256:{A}",
        f"c==3 --hash=sha256:{A}",
    ]
    assert requirements_from_web('lock-version = "1.0"\n', []) == ""


@pytest.mark.parametrize(
    ("package", "message"),
    [
        (f'wheels = [{file("https://h/x.whl")}, {file("file:///home/owner/x.whl")}]', "x is a file of the agent"),
        (f'wheels = [{file("file:///srv/wheels/../../home/owner/x.whl")}]', "x is a file of the agent"),
        (f'wheels = [{file("file:///srv/wheels2/x.whl")}]', "x is a file of the agent"),
        ('wheels = [{ path = "x.whl" }]', "x is a file of the agent"),
        ('archive = { path = "/home/owner/x.whl" }', "x is a file of the agent"),
        (f'sdist = {file("https://h/x.tar.gz")}', "x has no wheel"),
        ('vcs = { type = "git", url = "https://h/x" }', "x has no wheel"),
        ('directory = { path = "/home/owner/x" }', "x has no wheel"),
    ],
)
def test_what_is_not_from_the_web_is_refused(package: str, message: str) -> None:
    with pytest.raises(BadRequirement, match=message):
        requirements_from_web(lock(f'name = "x"\nversion = "1"\n{package}'), ["/srv/wheels"])

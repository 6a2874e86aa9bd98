"""Names of environments: the same for the same contents, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.features.environments.model import EnvHost, EnvOverride, EnvRequest, Platform, Whose
from ugro.features.environments.rules.naming import (
    common_python,
    environment_name,
    files_key,
    label_of,
    pythons_of,
    request_key,
    uv_platform,
    wheel_platforms,
    with_override,
    without_hash,
)
from ugro.features.environments.rules.requirements import versions, with_given_hashes

A, B = "a" * 64, "b" * 64
HERE = Platform("x86_64", "glibc", (2, 36), "3.11")
PINNED = f"numpy==2.0 \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}\ntorch==2.13.0 \\\n    --hash=sha256:{B}\n"


def test_a_name_does_not_depend_on_order_or_spelling() -> None:
    other = f"Torch==2.13.0 --hash=sha256:{B}\nnumpy==2.0 --hash=sha256:{B} --hash=sha256:{A}\n"
    assert environment_name(PINNED, HERE) == environment_name(other, HERE)


@pytest.mark.parametrize(
    ("text", "platform"),
    [
        (PINNED.replace(A, "c" * 64), HERE),
        (PINNED.replace("2.13.0", "2.13.1"), HERE),
        (PINNED.partition("torch")[0], HERE),
        (PINNED, replace(HERE, python="3.12")),
        (PINNED, replace(HERE, arch="aarch64")),
        (PINNED, replace(HERE, libc_version=(2, 31))),
    ],
)
def test_whatever_decides_what_is_inside_changes_the_name(text: str, platform: Platform) -> None:
    assert environment_name(text, platform) != environment_name(PINNED, HERE)


def test_a_request_is_the_same_with_another_password_and_in_another_order() -> None:
    one = EnvRequest(requirements=("a", "b"), index_url="https://ann:old@host/simple")
    same = replace(one, requirements=("b", "a"), index_url="https://bob:new@host/simple", offline=True)
    assert request_key(one, HERE) == request_key(same, HERE)
    assert request_key(one, HERE) != request_key(replace(one, index_url="https://other/simple"), HERE)
    assert request_key(one, HERE) != request_key(one, replace(HERE, python="3.12"))


def test_what_others_chose_is_resolved_apart_from_what_the_owner_did() -> None:
    keys = {whose: request_key(EnvRequest(requirements=("a",), whose=whose), HERE) for whose in Whose}
    assert keys[Whose.OWNER] == keys[Whose.CLUSTER], "the owner wrote the cluster file"
    assert keys[Whose.OWNER] != keys[Whose.OTHER]


def test_what_a_member_gets_with_a_login_is_theirs_alone() -> None:
    bare = EnvRequest(requirements=("a",), index_url="https://host/simple", whose=Whose.OTHER, user="ann")
    login = replace(bare, index_url="https://ann:old@host/simple")
    for others in (replace(bare, user="bob"), replace(login, user="bob"), replace(login, whose=Whose.OWNER, user="")):
        assert request_key(others, HERE) != request_key(login, HERE)
        assert files_key(others, HERE, "x") != files_key(login, HERE, "x")
    newer = replace(login, index_url="https://ann:new@host/simple")
    assert request_key(newer, HERE) == request_key(login, HERE), "another password is no other environment"
    assert request_key(replace(bare, user="bob"), HERE) == request_key(bare, HERE), "what needs no login is shared"
    assert files_key(bare, HERE, "x") != files_key(bare, HERE, "y"), "it was resolved again"
    owners = replace(login, whose=Whose.OWNER, user="")
    assert files_key(owners, HERE, "x") == files_key(EnvRequest(), HERE, "x"), "the owner's are found by name"


def test_an_override_replaces_packages_of_the_same_name_where_the_label_is() -> None:
    override = EnvOverride("pascal", ("Torch==2.6.0+cu118",), "https://old/simple", ("https://more/simple",))
    request = EnvRequest(requirements=("torch>=2", "numpy"), index_url="https://i/simple", overrides=(override,))
    assert label_of(request, ("fast", "pascal")) == "pascal"
    assert label_of(request, ("fast",)) == ""
    assert with_override(request, "") == replace(request, overrides=())
    there = with_override(request, "pascal")
    assert there.requirements == ("numpy", "Torch==2.6.0+cu118")
    assert (there.index_url, there.extra_index_url) == ("https://old/simple", ("https://more/simple",))


def test_the_first_override_that_a_node_has_a_label_of_counts() -> None:
    request = EnvRequest(overrides=(EnvOverride("a", ("x",)), EnvOverride("b", ("y",))))
    assert label_of(request, ("b", "a")) == "a"


def host(*pythons: str) -> EnvHost:
    return EnvHost("x86_64", "glibc", (2, 36), tuple((one, f"/usr/bin/python{one}") for one in pythons))


def test_nodes_agree_on_their_own_python_or_on_one_that_all_have() -> None:
    assert common_python({"n1": host("3.11.2", "3.12.1"), "n2": host("3.11.9")}) == "3.11"
    assert common_python({"n1": host("3.9.1", "3.12.1", "3.10.1"), "n2": host("3.12.0", "3.10.2")}) == "3.12"
    assert common_python({"n1": host("3.9.1"), "n2": host("3.12.0")}) is None
    assert pythons_of({"n1": host("3.9.1"), "n2": host("3.12.0", "3.12.1")}) == "n1 has 3.9; n2 has 3.12"


def test_a_platform_is_named_as_uv_and_pip_name_it() -> None:
    assert uv_platform(HERE) == "x86_64-manylinux_2_36"
    assert uv_platform(replace(HERE, libc_version=(2, 30))) == "x86_64-manylinux_2_28"
    assert uv_platform(replace(HERE, libc_version=(2, 99))) == "x86_64-manylinux_2_40"
    assert uv_platform(replace(HERE, libc_version=(2, 12))) is None
    assert uv_platform(Platform("aarch64", "musl", (1, 2), "3.11")) == "aarch64-unknown-linux-musl"
    assert uv_platform(replace(HERE, arch="ppc64le")) is None
    tags = wheel_platforms(replace(HERE, libc_version=(2, 17)))
    assert tags[:2] == ["manylinux_2_17_x86_64", "manylinux2014_x86_64"]
    assert tags[-2:] == ["manylinux1_x86_64", "linux_x86_64"]
    assert wheel_platforms(Platform("aarch64", "musl", (1, 1), "3.11"))[0] == "musllinux_1_1_aarch64"


def test_hashes_that_were_given_stay_the_only_ones() -> None:
    given = [f"numpy==2.0 ; python_version > '3' --hash=sha256:{A}", "torch==2.13.0"]
    text = with_given_hashes(PINNED, given)
    assert text.splitlines()[0] == f"numpy==2.0 --hash=sha256:{A}"
    assert f"torch==2.13.0 --hash=sha256:{B}" in text
    assert with_given_hashes(PINNED, ["numpy"]) == PINNED
    assert versions(PINNED) == [("numpy", "2.0"), ("torch", "2.13.0")]


def test_a_package_without_a_hash_is_found() -> None:
    assert without_hash(PINNED) == []
    assert without_hash(PINNED + "x @ git+https://host/x\n") == ["x @ git+https://host/x"]

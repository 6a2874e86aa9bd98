"""Requirements files: what is read from them, and what is refused because nodes could not install it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ugro.features.environments.rules.requirements import (
    BadRequirement,
    Found,
    checked,
    project,
    read_constraints,
    read_requirements,
)

HASH = "a" * 64


def read(files: Mapping[str, str], first: str = "/job/requirements.txt") -> Found:
    return read_requirements(first, lambda path: files[path], ["/job"])


def refused(text: str) -> BadRequirement:
    with pytest.raises(BadRequirement) as caught:
        read({"/job/requirements.txt": text})
    return caught.value


def test_comments_and_continued_lines_are_read_as_pip_reads_them() -> None:
    text = (
        "# what we need\ntorch==2.13.0  # the newest\n\n"
        f"numpy==2.0 \\\n    --hash=sha256:{HASH}\nx[a,b] >=1; python_version>'3'\n"
    )
    assert read({"/job/requirements.txt": text}).requirements == [
        "torch==2.13.0",
        f"numpy==2.0 --hash=sha256:{HASH}",
        "x[a,b] >=1; python_version>'3'",
    ]


def test_included_files_of_the_folder_are_followed_once() -> None:
    files = {
        "/job/requirements.txt": "-r sub/base.txt\n--constraint=limits.txt\nb\n-rsub/base.txt\n",
        "/job/sub/base.txt": "a\n-r ../requirements.txt\n",
        "/job/limits.txt": "numpy<2\n",
    }
    found = read(files)
    assert (found.requirements, found.constraints) == (["a", "b"], ["numpy<2"])


def test_indexes_and_folders_in_the_file_are_used() -> None:
    text = "-i https://a/simple\n--extra-index-url https://b/simple\n--find-links wheels\n--no-index\n--prefer-binary\n"
    found = read({"/job/requirements.txt": text})
    assert (found.index_url, found.extra_index_url, found.find_links) == (
        "https://a/simple",
        ["https://b/simple"],
        ["/job/wheels"],
    )
    assert found.no_index


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-e .", "requirements.txt:2: an editable package is a folder of this machine"),
        ("--editable=./lib", "requirements.txt:2: an editable package"),
        ("./lib", "requirements.txt:2: a path of this machine"),
        ("/opt/x.whl", "requirements.txt:2: a path of this machine"),
        ("x-1.0-py3-none-any.whl", "requirements.txt:2: a path of this machine"),
        ("https://host/x.whl", "requirements.txt:2: an address without a name"),
        ("x @ file:///opt/x.whl", "requirements.txt:2: a path of this machine"),
        ("x @ git+https://github.com/a/x", "requirements.txt:2: x is taken from a repository"),
        ("x @ FILE:///opt/x.whl", "requirements.txt:2: a path of this machine"),
        ("x @ GIT+https://github.com/a/x", "requirements.txt:2: x is taken from a repository"),
        ("x @ https://github.com/a/x.git", "requirements.txt:2: x is taken from a repository"),
        ("x @ https://github.com/a/x.git@v1 ; python_version>'3'", "requirements.txt:2: x is taken from a repository"),
        ("x @ ssh://host/x.whl", "requirements.txt:2: the address of x does not start with https:// or http://"),
        ("x @ https://ann:secret@host/x.whl", "requirements.txt:2: the address of x has a password in it"),
        ("x @ https://host/${HF_TOKEN}/x.whl", "requirements.txt:2: a variable in a package is not replaced"),
        ("x==${VERSION}", "requirements.txt:2: a variable in a package is not replaced"),
        ("-r ../other.txt", "requirements.txt:2: ../other.txt is outside the folder of the job"),
        ("-r https://host/r.txt", "requirements.txt:2: an included file must be on this machine"),
        ("--pre", "requirements.txt:2: the option --pre is not supported"),
        ("torch 2.13", "requirements.txt:2: not a package: torch 2.13"),
    ],
)
def test_what_nodes_could_not_install_is_refused_with_its_line(line: str, message: str) -> None:
    error = refused(f"numpy\n{line}\n")
    assert error.message.startswith(message)
    assert "secret" not in error.message
    assert error.hint


def test_uv_replaces_no_variable_of_the_agent_in_a_constraint() -> None:
    with pytest.raises(BadRequirement) as caught:
        read_constraints("/job/limits.txt", lambda path: "x @ https://host/${HF_TOKEN}\n")
    assert caught.value.message.startswith("limits.txt:1: a variable in a package is not replaced")


def test_a_package_cannot_smuggle_in_a_line_of_its_own() -> None:
    with pytest.raises(BadRequirement, match="not a package"):
        checked("x==1.0\r--find-links /wheels")


def test_a_requirement_of_an_address_is_taken() -> None:
    assert checked("x @ https://host/x-1.0.tar.gz") == "x @ https://host/x-1.0.tar.gz"


def test_names_are_compared_as_indexes_do() -> None:
    assert project("Foo._Bar[x]>=1") == "foo-bar"

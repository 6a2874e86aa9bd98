"""Environments of people who do not have the agent's account: nothing of its machine is theirs to name."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path

import pytest

from ugro.features.environments.model import EnvRequest, Whose
from ugro.features.environments.service.reading import environment_of, with_variables
from ugro.kernel.access.caller import enter
from ugro.kernel.access.model import Caller, Role
from ugro.kernel.config.load import parse_config
from ugro.kernel.files.client_files import Item, Offer, serving
from ugro.kernel.jobs.config.file import edited_job, parse_job
from ugro.kernel.jobs.config.options import Given
from ugro.kernel.support.errors import ConfigError

ANN, BOB = (Caller(name, Role.USER, "pid 1") for name in ("ann", "bob"))
OWNER = Caller("root", Role.ADMIN, "pid 2", shares_account=True)
CLUSTER = "nodes: [n1]\n"


def read(
    text: str, folder: Path, cluster: str = CLUSTER, *, caller: Caller = ANN, sent: str | None = None
) -> EnvRequest:
    """``sent``: the text of the client's requirements.txt, which is on another machine then."""

    def reading() -> EnvRequest | None:
        enter(caller)
        draft = parse_job(f"command: [ls]\n{text}", folder / "job.yaml", fields={})
        config = parse_config(cluster, folder / "cluster.yaml", {})
        if sent is None:
            return environment_of(draft, folder, config)
        offer = Offer("key", "laptop")
        offer.add(Item("text", str(folder / "requirements.txt"), sent))
        with serving(offer):
            return environment_of(draft, folder, config)

    found = _alone(reading)
    assert found is not None
    return found


def _alone(work: Callable[[], EnvRequest | None]) -> EnvRequest | None:
    """In a context of its own, as a request has one."""
    return copy_context().run(work)


def refusal(text: str, folder: Path, *, caller: Caller = ANN, sent: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, folder, caller=caller, sent=sent)
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("packages: [a], find_links: ['file:///home/owner/wheels']", "find_links"),
        ("packages: [a], find_links: ['https://h/,/home/owner/wheels']", "find_links"),
        ("packages: [a], index_url: 'file:///home/owner'", "index_url"),
        ("packages: [a], extra_index_url: ['https://h/s', 'file:///home/owner']", "extra_index_url"),
        ("packages: [a], overrides: {old: {index_url: 'file:///home/owner'}}", "overrides"),
        ('requirements: "a\\n--find-links /home/owner/wheels\\n"', "requirements"),
        ('requirements: "a\\n--find-links FILE:///home/owner/wheels\\n"', "requirements"),
        ('requirements: "a\\n--find-links https://h/ /home/owner/wheels\\n"', "requirements"),
        ('requirements: "a\\n-i file:///home/owner\\n"', "requirements"),
        ('requirements: "a\\n--extra-index-url ${HOME}\\n"', "requirements"),
        ("index_url: 'file:///home/owner'", "index_url"),
    ],
)
@pytest.mark.parametrize("sent", [None, ""])
def test_a_member_has_packages_from_the_web_alone(text: str, key: str, sent: str | None, tmp_path: Path) -> None:
    cluster = f"{CLUSTER}environment: {{packages: [b]}}\n"
    with pytest.raises(ConfigError, match=rf"environment\.{key}: an? (folder of|address has)"):
        read(f"environment: {{{text}}}\n", tmp_path, cluster, sent=sent)


@pytest.mark.parametrize("line", ["--find-links wheels", "-f /home/owner/wheels"])
def test_a_file_of_another_machine_names_no_folders(line: str, tmp_path: Path) -> None:
    for caller in (ANN, OWNER):
        text = "environment: {requirements: requirements.txt}\n"
        said = refusal(text, tmp_path, caller=caller, sent=f"numpy\n{line}\n")
        assert "environment.requirements: a folder of another machine cannot be used" in said


def test_the_owner_names_folders_as_ever(tmp_path: Path) -> None:
    text = 'environment: {requirements: "a\\n-f /wheels\\n", index_url: "file:///srv/simple", find_links: [/more]}\n'
    found = read(text, tmp_path, caller=OWNER)
    assert (found.index_url, found.find_links) == ("file:///srv/simple", ("/more", "/wheels"))
    assert found.whose is Whose.OWNER


def test_a_member_has_the_folders_that_the_cluster_file_names(tmp_path: Path) -> None:
    cluster = f"{CLUSTER}environment: {{packages: [a], find_links: [/srv/wheels]}}\n"
    for sent in (None, ""):
        default, own = (
            read(text, tmp_path, cluster, sent=sent) for text in ("", "environment: {packages: [b]}\n")
        )
        assert (default.find_links, default.whose) == (("/srv/wheels",), Whose.CLUSTER)
        assert (own.find_links, own.whose) == (("/srv/wheels",), Whose.OTHER)


@pytest.mark.parametrize(
    ("text", "cluster", "whose"),
    [
        ("", "{packages: [a]}", Whose.CLUSTER),
        ("environment: {upgrade: true}\n", "{packages: [a]}", Whose.CLUSTER),
        ("environment: {packages: [a]}\n", "{packages: [a]}", Whose.OTHER),
        ("environment: {index_url: 'https://h/s'}\n", "{packages: [a]}", Whose.OTHER),
        ("environment: {find_links: []}\n", "{packages: [a]}", Whose.OTHER),
        # The address is what the submitter's variable makes of it.
        ("", "{packages: [a], index_url: 'https://x:${TOKEN}@h/s'}", Whose.OTHER),
    ],
)
def test_what_the_cluster_file_says_is_the_owners_as_long_as_nobody_changes_it(
    text: str, cluster: str, whose: Whose, tmp_path: Path
) -> None:
    assert read(text, tmp_path, f"{CLUSTER}environment: {cluster}\n").whose is whose


@pytest.mark.parametrize(
    ("address", "env"),
    [
        ("https://ann:${TOKEN}@h/s", {"TOKEN": "x@h/s,/home/owner/wheels"}),
        ("https://ann:${TOKEN}@h/s", {"TOKEN": "x@h/s /home/owner/wheels"}),
        ("https://ann:${TOKEN}@h/s", {"TOKEN": "${AWS_SECRET_ACCESS_KEY}"}),
        ("https://h/${A${B}}", {"B": "WS_SECRET_ACCESS_KEY"}),
        ("https://h/${1X}", {}),
    ],
)
def test_the_value_of_a_variable_makes_no_second_address_and_no_other_variable(
    address: str, env: dict[str, str], tmp_path: Path
) -> None:
    found = read(f"environment: {{packages: [a], find_links: ['{address}']}}\n", tmp_path)
    with pytest.raises(ConfigError, match="a space, a comma or"):
        with_variables(found, env)


def test_a_password_in_a_variable_is_a_members_too(tmp_path: Path) -> None:
    found = read("environment: {packages: [a], index_url: 'https://ann:${TOKEN}@h/s'}\n", tmp_path)
    filled = with_variables(found, {"TOKEN": "hunter2"})
    assert filled is not None
    assert (filled.index_url, filled.whose) == ("https://ann:hunter2@h/s", Whose.OTHER)


def test_it_is_recorded_which_member_chose_the_packages(tmp_path: Path) -> None:
    text = "environment: {packages: [a]}\n"
    callers = (ANN, BOB, OWNER)
    assert [read(text, tmp_path, caller=caller).user for caller in callers] == ["ann", "bob", ""]
    cluster = f"{CLUSTER}environment: {{packages: [a]}}\n"
    assert read("", tmp_path, cluster).user == "", "the cluster file is everybody's"


def test_a_browser_names_no_folder_in_the_text_of_its_requirements(tmp_path: Path) -> None:
    config = parse_config(CLUSTER, tmp_path / "cluster.yaml", {})
    text = 'command: [ls]\nenvironment: {{requirements: "a\\n-f {}\\n"}}\n'
    old = EnvRequest(find_links=("/wheels",))
    with pytest.raises(ConfigError, match="a folder of this machine cannot be named here"):
        environment_of(edited_job(text.format("/secret"), Given()), Path("/"), config, old)
    found = environment_of(edited_job(text.format("/wheels"), Given()), Path("/"), config, old)
    assert found is not None
    assert found.find_links == ("/wheels",)

"""The files of a client on another machine: asked for, and never looked for on the agent's own disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ugro.features.environments.service.reading import environment_of
from ugro.features.recipes import service as model_files
from ugro.kernel.config.schema import Config
from ugro.kernel.files.client_files import Item, Offer, Offers, expect_local, remote_client, serving
from ugro.kernel.jobs.config.file import parse_job
from ugro.kernel.jobs.result_cache import _content_hash
from ugro.kernel.jobs.submission import Submit, _draft
from ugro.kernel.support.errors import ConfigError, NotAllowed, UsageError, Wanted


def offer(**texts: str) -> Offer:
    found = Offer("key", "laptop")
    for path, text in texts.items():
        found.add(Item("text", path, text))
    return found


def send(offers: Offers, key: str, user: str, text: str = "x") -> None:
    found = offers.of(f"{key} laptop", user)
    found.add(Item("text", "/a", text))
    offers.keep(found)


def is_kept(offers: Offers, key: str, user: str) -> bool:
    try:
        return bool(offers.of(f"{key} laptop", user).text("/a"))
    except Wanted:
        return False


def test_each_request_has_what_was_sent_for_it_and_old_ones_are_forgotten() -> None:
    offers = Offers()
    send(offers, "k1", "ann")
    assert offers.of("k1 laptop", "ann").text("/a") == "x"
    with pytest.raises(Wanted):
        offers.of("k2 laptop", "ann").text("/a")
    for number in range(300):
        send(offers, f"n{number}", "ann")
    with pytest.raises(Wanted):
        offers.of("k1 laptop", "ann").text("/a")


def test_nobody_has_or_pushes_out_what_another_has_sent() -> None:
    offers = Offers()
    send(offers, "k1", "ann")
    assert not is_kept(offers, "k1", "bob"), "a key is its user's own"
    for number in range(300):
        send(offers, f"n{number}", "bob", "x" * (1 << 20))
    for number in range(300):
        offers.of(f"m{number} laptop", "ann")  # without anything that was sent
    assert is_kept(offers, "k1", "ann")
    kept = sum(is_kept(offers, f"n{number}", "bob") for number in range(300))
    assert 16 <= kept <= 32, "the newest, of 32 MiB in all"


def test_what_all_have_sent_together_is_bounded_and_who_has_most_loses_the_oldest() -> None:
    offers = Offers()
    send(offers, "k1", "small")
    for user in "abcdefgh":
        for number in range(31):
            send(offers, f"n{number}", user, "x" * (1 << 20))
    kept = {user: sum(is_kept(offers, f"n{number}", user) for number in range(31)) for user in "abcdefgh"}
    assert 100 <= sum(kept.values()) <= 128, kept
    assert min(kept.values()) >= 10, kept
    assert is_kept(offers, "k1", "small")


def test_one_request_does_not_fill_the_memory_whatever_it_sends() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    too_large: tuple[Item, ...] = (
        Item("code", "/x", [[] for _ in range(200_000)]),
        Item("code", "/x", {"skipped": ["x" * (6 << 20)]}),
        Item("folder", "/x", {"x" * (6 << 20): 1}),
        Item("folder", "/x", deep),
        Item("text", "/x", problem="x" * (6 << 20)),
    )
    for item in too_large:
        found = offer()
        with pytest.raises(UsageError, match="too large to take"):
            found.add(item)
        assert found.size == 0
    found = offer()
    for _ in range(50):
        found.add(Item("text", "/same", "x" * (1 << 20)))
    for number in range(14):
        found.add(Item("text", f"/{number}", "x" * (1 << 20)))
    with pytest.raises(UsageError, match="more than 16 MiB"):
        found.add(Item("text", "/14", "x" * (1 << 20)))
    assert 15 << 20 < found.size <= 16 << 20
    found.forget("text", "/same")
    found.add(Item("text", "/14", "x" * (1 << 20)))


@pytest.mark.parametrize("header", ["", "key", "k ../x", "k a b", "k\n laptop", "x" * 100 + " a"])
def test_a_header_of_somebody_else_is_refused(header: str) -> None:
    with pytest.raises(UsageError, match="invalid header"):
        Offers().of(header, "ann")


def test_a_job_file_is_asked_for_although_there_is_one_of_that_name_here(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("script: here.py")
    submit = Submit("ann", "key", file=file, here=tmp_path)
    found = offer()
    with serving(found):
        with pytest.raises(Wanted) as wanted:
            _draft(submit)
        found.add(Item("text", str(file), "script: there.py"))
        assert _draft(submit).section.script == "there.py"
    assert (wanted.value.what, wanted.value.path) == ("text", str(file))
    assert remote_client() is None
    assert _draft(submit).section.script == "here.py"


def test_why_a_file_cannot_be_sent_is_the_users_error() -> None:
    found = offer()
    found.add(Item("text", "/j", problem="/j: no such file"))
    with pytest.raises(ConfigError, match="/j: no such file"):
        found.text("/j")


def test_requirements_are_those_of_the_client_and_their_includes_too(tmp_path: Path) -> None:
    (tmp_path / "reqs.txt").write_text("from-here\n")
    text = "script: x.py\nenvironment: {requirements: reqs.txt}\n"
    draft = parse_job(text, tmp_path / "job.yaml", fields={})
    found = offer()
    with serving(found):
        for name, text in (("reqs.txt", "-r more.txt\nnumpy\n"), ("more.txt", "torch\n")):
            with pytest.raises(Wanted) as wanted:
                environment_of(draft, tmp_path, Config(nodes=()))
            assert wanted.value.path == str(tmp_path / name)
            found.add(Item("text", str(tmp_path / name), text))
        request = environment_of(draft, tmp_path, Config(nodes=()))
    assert request is not None
    assert sorted(request.requirements) == ["numpy", "torch"]


def test_folders_of_wheels_and_models_on_another_machine_are_refused(tmp_path: Path) -> None:
    text = "script: x.py\nenvironment: {packages: [numpy], find_links: [wheels]}\n"
    (tmp_path / "llama").mkdir()
    with serving(offer()):
        with pytest.raises(ConfigError, match="another machine"):
            environment_of(parse_job(text, tmp_path / "job.yaml", fields={}), tmp_path, Config(nodes=()))
        with pytest.raises(NotAllowed, match="cannot be used from another machine"):
            model_files.path_of("./llama", tmp_path)
        assert model_files.path_of("llama", tmp_path) is None
        assert model_files.cached("model", "org/llama", {"HF_HOME": str(tmp_path)}) is None
    assert model_files.path_of("llama", tmp_path) == tmp_path / "llama"


def test_the_hash_of_an_input_is_the_clients(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text("here")
    found = offer()
    found.add(Item("hash", str(file), "abc"))
    with serving(found):
        assert _content_hash(f"laptop:{file}") == "abc"
    with pytest.raises(ConfigError, match="no such file"):  # of a job that is launched again, without its client
        _content_hash(f"laptop:{file}")


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    expect_local("the folder x", "hint")
    with serving(offer()), pytest.raises(NotAllowed, match="the folder x"):
        expect_local("the folder x", "hint")

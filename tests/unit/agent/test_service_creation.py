from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.agent.services.creation import _kept, _listed
from ugro.core.folder import Folder
from ugro.core.job import JobSpec, Stop

OLD = JobSpec(
    "chat",
    ("serve.py", "{port}"),
    env=(("A", "old"), ("B", "old")),
    cwd="sub",
    snapshot="abc",
    setup="true",
    is_preemptible=True,
    stop=Stop(grace_s=5.0),
    folders=(Folder("model", "/old", "1"), Folder("base", "/base", "2"), Folder("words", "/words", "3")),
)
NEW = JobSpec("chat", ("serve.py", "{port}"), env=(("B", "new"),), cwd="/home/ann")


def test_an_update_keeps_what_was_not_given() -> None:
    model = Folder("model", "/new", "9")
    made = _kept(replace(NEW, folders=(model,)), OLD, {})
    assert made == replace(OLD, env=(("A", "old"), ("B", "new")), folders=(model, OLD.folders[2]))
    assert _kept(NEW, OLD, {}).folders == OLD.folders, "a new command for the same model"


def test_an_update_changes_what_was_given() -> None:
    made = _kept(replace(NEW, snapshot="new"), OLD, {"command": ["x"], "preemptible": False, "stop_grace": "30s"})
    assert (made.snapshot, made.cwd, made.is_preemptible, made.stop) == ("new", "/home/ann", False, NEW.stop)


@pytest.mark.parametrize(
    ("given", "words"),
    [(None, []), ([], []), ("a b", ["a b"]), (["a", 1], ["a", "1"]), (5, ["5"]), ({"model": "/m"}, ["model=/m"])],
)
def test_what_a_file_gives_in_another_form_is_words_too(given: object, words: list[str]) -> None:
    assert _listed(given) == words

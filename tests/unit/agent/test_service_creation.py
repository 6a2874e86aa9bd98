from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ugro.features.services.service.creation import Creation, _kept, _listed
from ugro.kernel.files.model import JobResults, ResultState
from ugro.kernel.files.results.service import ResultService
from ugro.kernel.jobs.model import Folder, Job, JobSpec, JobState, Stop
from ugro.kernel.jobs.service import JobService

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


def test_a_service_of_a_private_job_says_neither_its_name_nor_its_number(tmp_path: Path) -> None:
    """Services are for all to see."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    made = JobResults(7, 1, str(tmp_path), ResultState.HOME, 1, 2, (), (), ())

    async def find(word: str) -> Job:
        return Job(7, JobSpec("secret", ("x",), private=word == "private"), "ann", JobState.SUCCEEDED, "", "")

    async def parts(job: Job) -> list[Any]:
        return [SimpleNamespace(name="", path=str(tmp_path))]

    async def brief(job: Job) -> JobResults:
        return made

    jobs, results = SimpleNamespace(find=find), SimpleNamespace(parts=parts, brief=brief)
    nobody: Any = None
    creation = Creation(nobody, cast(JobService, jobs), cast(ResultService, results), nobody)
    for word, said in (("private", ("a private job", "")), ("open", ("job 7 secret", "secret"))):
        found, *words = asyncio.run(creation._model(word, None, tmp_path))
        assert found is not None
        assert (found.path, *words) == (model, *said)

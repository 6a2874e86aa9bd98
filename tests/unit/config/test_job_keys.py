"""Jobs from Python: keys mean what they mean in a job file, and errors name what was given."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rig.job_files import by_name, load
from ugro.client import job_keys
from ugro.client.client import Client
from ugro.client.reach import OwnAgent, OwnWish
from ugro.kernel.config.section import Section
from ugro.kernel.jobs.config.file import draft_job
from ugro.kernel.jobs.config.options import in_keys
from ugro.kernel.jobs.config.schema import JobSection
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.support.errors import ConfigError, UgroError, UsageError
from ugro.kernel.support.state_dir import StateDir

Fields = Mapping[str, Any]


class Asked(Exception):
    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body


class Asking(OwnAgent):
    def ask(self, method: str, path: str, body: Any = None, **limits: float) -> Any:
        raise Asked(body)


def body_of(*given: Any, **keys: Any) -> dict[str, Any]:
    """What a client sends to the agent."""

    with pytest.raises(Asked) as caught:
        Client.through(Asking(StateDir(Path("/")), OwnWish())).jobs.submit(*given, **keys)
    return caught.value.body


def made(*given: Any, **keys: Any) -> JobSpec:
    """As the agent reads it."""
    body = body_of(*given, **keys)
    path = None if body["file"] is None else Path(body["file"])
    return draft_job(path, fields=body["fields"], as_options=body["as_options"]).spec({}, by_name)


def refusal(*given: Any, **keys: Any) -> str:
    with pytest.raises(UgroError) as caught:
        made(*given, **keys)
    return f"{caught.value}\n{caught.value.hint or ''}"


EVERYTHING = """
name: full
script: train.py
args: --epochs 10
env: {A: "1", B: two}
resources: {nodes: 2..4, gpus_per_node: 2, gpu: {memory: 8GB..}, memory: 4GB, only: [gpu1, gpu2]}
time_limit: 8h
priority: batch
after: {ok: [prepare], any: [last]}
retry: {max: 3, "on": [cuda_oom]}
checkpoint: {dir: ckpt, every: 10m}
stop: {signal: INT, grace: 5}
outputs: [a.csv, b.csv]
results: {checkpoints: last 3, limit: 20GB}
seed: 42
inputs: [data.csv]
cache: true
notify: [mail]
elastic: {min_ranks: 1}
"""


def test_a_mapping_or_keywords_mean_what_they_mean_in_a_file() -> None:
    tree = yaml.safe_load(EVERYTHING)
    assert made(tree) == made(**tree) == made(fields=tree) == load(EVERYTHING)
    ways = {"resources": {"any_of": [{"gpus_per_node": 2}, {"nodes": 2, "gpus_per_node": 1}]}, "script": "a.py"}
    assert made(ways) == load(yaml.safe_dump(ways))


def test_keywords_override_a_mapping_and_a_file_key_by_key(tmp_path: Path) -> None:
    tree = {"script": "train.py", "resources": {"nodes": 2, "gpus_per_node": 4}, "env": {"A": "1"}}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(tree))
    expected = load('{script: b.py, resources: {nodes: 3, gpus_per_node: 4}, env: {A: "1", B: "2"}}')
    changed: Fields = {"script": "b.py", "resources": {"nodes": 3}, "env": {"B": "2"}}
    for given in (tree, file, str(file)):
        assert made(given, **changed) == expected
    assert made(tree, script="b.py", nodes=3, env={"B": "2"}) == expected, "names of options are taken, too"
    assert made(tree, env={}, args=[], name=None) == made(tree), "nothing is not given"
    assert body_of(options={"nodes": "3"})["as_options"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"comand": ["true"]}, "comand: unknown key\ndid you mean command?"),
        ({"script": "a.py", "resources": {"node": 2}}, "resources.node: unknown key\ndid you mean nodes?"),
        (
            {"script": "a.py", "resources": {"nodes": "two"}},
            "resources.nodes: expected a number of nodes such as 3, a range such as 2..4, or all, got \"two\"\n"
            "for example: resources={'nodes': '2..4'}",
        ),
        ({"script": "a.py", "nodes": "two"}, "nodes: expected a number of nodes"),
        ({"script": "a.py", "resources": 2}, "resources: expected a map of keys to values, got 2"),
        ({"script": "a.py", "resources": {"gpu": {"memori": 1}}}, "resources.gpu.memori: unknown key"),
        ({"command": ["a", 3]}, "command[1]: expected words as texts"),
        ({"command": ["a"], "env": {"1A": ""}}, "env: expected names of letters"),
        ({"command": ["a"], "env": {"A": 1}}, "env['A']: expected a text\nfor example: env={'HF_HOME'"),
        ({"script": "a.py", "gpus": 1}, "gpus: unknown key\ndid you mean gpus_per_node?"),
        ({"script": "a.py", "resources": {"gpus": 1}}, "resources.gpus: unknown key\ndid you mean gpus_per_node?"),
        ({"command": ["a"], "env": ["A=1", 3]}, "env: expected a map of names to texts\nfor example: env={'HF_HOME'"),
        ({"command": ["a"], "time_limit": "soon"}, "time_limit: expected a duration"),
        ({"command": ["a"], "retry": {"max": -1}}, "retry.max: expected a whole number"),
        ({}, "there is nothing to run"),
        ({"script": "a.py", "command": ["b"]}, "script: there is a command, too"),
    ],
)
def test_an_error_names_what_was_given_and_no_option_of_a_command(given: Fields, said: str) -> None:
    for text in (refusal(given), refusal(**given), refusal(fields=given)):
        assert text.startswith(said)
        assert "--" not in text


def test_what_is_no_job_and_values_that_cannot_be_sent_are_clear_errors() -> None:
    for given in (3, ["true"], {"true"}):
        with pytest.raises(UsageError, match="expected the path of a job file or a mapping of its keys, got"):
            body_of(given)
    with pytest.raises(UsageError, match=r"args\[1\]: expected texts, numbers, lists and mappings, got a .*object"):
        body_of(script="a.py", args=["a", object()])
    sent = body_of(script=Path("a.py"), args=("a", 3.5), folders={"model": Path("/models/a")})["fields"]
    assert sent == {"script": "a.py", "args": ["a", 3.5], "folders": {"model": "/models/a"}}


def test_what_a_hint_says_of_options_is_said_of_keys() -> None:
    said = "--min-ranks 2 at most, or with --gpus-per-node 1 -- and --unknown x"
    assert in_keys(said) == "elastic.min_ranks 2 at most, or with resources.gpus_per_node 1 -- and --unknown x"


def test_the_command_line_s_options_keep_their_names() -> None:
    with pytest.raises(ConfigError, match=r"^--nodes: expected"):
        made(options={"script": "a.py", "nodes": "two"})


def documented(name: str) -> dict[str, str]:
    """The keys of a class with what is written below each."""
    [found] = [one for one in ast.parse(inspect.getsource(job_keys)).body if getattr(one, "name", "") == name]
    assert isinstance(found, ast.ClassDef)
    texts: dict[str, str] = {}
    for one, below in zip(found.body, [*found.body[1:], ast.Pass()], strict=True):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            texts[one.target.id] = " ".join(str(below.value.value).split()) if is_text else ""  # type: ignore[attr-defined]
    return texts


def sections(of: type[Section]) -> list[type[Section]]:
    return [of, *(inner for one in of.sections().values() for inner in sections(one))]


def test_the_types_and_texts_of_keys_are_those_of_the_schema() -> None:
    for section in sections(JobSection):
        found = documented(f"{section.__name__.removesuffix('Section')}Keys")
        keys = section.known_keys()
        assert list(found) == list(keys), section
        for name, key in keys.items():
            meaning = key.meaning or " ".join((key.section.__doc__ or "").split()) if key.section else key.meaning
            assert meaning.startswith(found[name]), name
            assert found[name], name


def test_very_many_keys_are_one_error_and_little_work() -> None:
    many = {f"k{number}": 1 for number in range(200_000)}
    text = refusal({"command": ["true"], "resources": many})
    assert text.startswith("resources: expected at most 1000 keys, got 200000")
    assert len(refusal(many)) < 600

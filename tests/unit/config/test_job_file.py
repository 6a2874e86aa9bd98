"""A job file, the options of a command, or both, as a ``JobSpec`` that survives being sent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rig.job_files import by_name, load
from ugro.kernel.config.kinds import BadValueError
from ugro.kernel.config.reference import job_sections
from ugro.kernel.config.section import NO_OPTION, is_job_name
from ugro.kernel.jobs.config.file import draft_job
from ugro.kernel.jobs.config.options import OPTIONS
from ugro.kernel.jobs.model import (
    ALL_GPUS,
    ANY_GPUS,
    After,
    Cause,
    Checkpoint,
    Disconnect,
    JobSpec,
    Launcher,
    OnLost,
    Resources,
    Retry,
    Stop,
)
from ugro.kernel.support.codec import decode, dumps


def job_from_fields(fields: Mapping[str, object], *, env: Mapping[str, str]) -> JobSpec:
    return draft_job(None, fields=fields).spec(env)


def workdir(path: Path | None, **fields: object) -> Path:
    return draft_job(path, fields=fields).workdir


def test_a_script_alone_is_a_job_with_all_defaults() -> None:
    assert load("script: src/train.py") == JobSpec(
        name="train", argv=("src/train.py",), launcher=Launcher.DDP, resources=Resources(gpus_per_node=ANY_GPUS)
    )


def test_a_command_alone_is_a_job_with_all_defaults() -> None:
    assert load("command: [./prepare.sh, --all, --all]") == JobSpec("prepare.sh", ("./prepare.sh", "--all", "--all"))


def test_every_key_reaches_the_spec() -> None:
    text = """
name: big-run
script: train.py
args: --epochs 10 --note 'a b'
launcher: torchrun
balance: off
train_sync: local
nan: skip
env: {B: "2", A: ""}
setup: |
  pip install x
workdir: code
cwd: ~/project
resources:
  nodes: 2..4
  gpus_per_node: all
  gpu: {memory: 8GB.., model: [RTX4090, RTX 3090]}
  cpus: 4
  memory: 16GiB
  labels: [fast, lab2]
priority: urgent
preemptible: true
time_limit: 2d12h
after: {ok: [3, prepare], any: ["12", last]}
retry: {max: 3, on: [cuda_oom, "exit_code:3"], never_on: [import_error]}
checkpoint: {dir: /data/run, every: 10m}
disconnect: {lost_after: 1h, on_lost: restart}
stop: {signal: SIGUSR1, grace: 0}
outputs: ['results/*.csv']
notify: [mail]
"""
    assert load(text) == JobSpec(
        name="big-run",
        argv=("train.py", "--epochs", "10", "--note", "a b"),
        launcher=Launcher.TORCHRUN,
        env=(("A", ""), ("B", "2")),
        setup="pip install x\n",
        cwd="~/project",
        resources=Resources(
            min_nodes=2,
            max_nodes=4,
            gpus_per_node=ALL_GPUS,
            gpu_memory_bytes=8 * 10**9,
            gpu_models=("RTX4090", "RTX 3090"),
            cpus=4,
            memory_bytes=16 * 2**30,
            labels=("fast", "lab2"),
        ),
        priority=90,
        is_preemptible=True,
        time_limit_s=216000.0,
        after=After(ok=(3, 7), any=(12, 9)),
        retry=Retry(3, ("cuda_oom", "exit_code:3"), ("import_error",)),
        checkpoint=Checkpoint("/data/run", 600.0),
        disconnect=Disconnect(3600.0, OnLost.RESTART),
        stop=Stop("USR1", 0.0),
        outputs=("results/*.csv",),
        notify=("mail",),
        balance="off",
        train_sync="local",
        nan="skip",
    )


def test_a_text_as_command_goes_to_a_shell() -> None:
    spec = load("command: |\n  cd data && ./fetch.sh $HOME\n")
    assert spec.argv == ("sh", "-c", "cd data && ./fetch.sh $HOME\n")
    assert (spec.name, spec.launcher) == ("cd", Launcher.COMMAND)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nodes: 3", Resources(3, 3, ANY_GPUS)),
        ('nodes: "3"', Resources(3, 3, ANY_GPUS)),
        ("nodes: 2 .. 4", Resources(2, 4, ANY_GPUS)),
        ("nodes: 2..2", Resources(2, 2, ANY_GPUS)),
        ("gpus_per_node: 2", Resources(gpus_per_node=2)),
        ("gpus_per_node: 0", Resources()),
        ("gpus_per_node: all", Resources(gpus_per_node=ALL_GPUS)),
        ("gpu: {memory: 8GB}", Resources(gpus_per_node=1, gpu_memory_bytes=8 * 10**9)),
        ("gpu: {memory: 1.5GB..}", Resources(gpus_per_node=1, gpu_memory_bytes=1_500_000_000)),
        ("gpu: {memory: 512 MiB ..}", Resources(gpus_per_node=1, gpu_memory_bytes=512 * 2**20)),
        ("gpu: {model: RTX4090}", Resources(gpus_per_node=1, gpu_models=("RTX4090",))),
        ("{gpu: {model: H100}, gpus_per_node: 8}", Resources(gpus_per_node=8, gpu_models=("H100",))),
        ("memory: 500MB", Resources(gpus_per_node=ANY_GPUS, memory_bytes=500 * 10**6)),
        ("gpu:", Resources(gpus_per_node=ANY_GPUS)),
        ("cpus: 0", Resources(gpus_per_node=ANY_GPUS, cpus=0)),
        ("cpus: null", Resources(gpus_per_node=ANY_GPUS)),
        (
            "any_of: [{gpus_per_node: 2}, {nodes: 2, gpu: {memory: 8GB..}}]",
            Resources(
                any_of=(
                    Resources(gpus_per_node=2),
                    Resources(min_nodes=2, max_nodes=2, gpus_per_node=1, gpu_memory_bytes=8 * 10**9),
                )
            ),
        ),
    ],
)
def test_resources_are_read_in_every_form(text: str, expected: Resources) -> None:
    inner = text if text.startswith("{") else f"\n  {text}"
    assert load(f"script: train.py\nresources: {inner}").resources == expected


@pytest.mark.parametrize(
    ("text", "priority", "is_preemptible"),
    [
        ("priority: urgent", 90, False),
        ("priority: normal", 50, False),
        ("priority: batch", 10, True),
        ("priority: 0", 0, True),
        ("priority: 11", 11, False),
        ("priority: 100", 100, False),
        ("{priority: batch, preemptible: false}", 10, False),
        ("preemptible: true", 50, True),
    ],
)
def test_batch_jobs_make_way_unless_they_say_otherwise(text: str, priority: int, is_preemptible: bool) -> None:
    job = text.strip("{}").replace(", ", "\n")
    spec = load(f"script: train.py\n{job}")
    assert (spec.priority, spec.is_preemptible) == (priority, is_preemptible)


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("script: my model.py", "my-model"),
        ("script: 2024.py", "job-2024"),
        ("script: last.py", "job-last"),
        ("script: ü.py", "job"),
        ("command: [/usr/bin/env, x]", "env"),
        ("command: '  ./a/b.sh | tee x'", "b.sh"),
        (f"script: {'a' * 90}.py", "a" * 64),
    ],
)
def test_a_job_without_a_name_is_called_after_what_it_runs(job: str, name: str) -> None:
    assert load(job).name == name
    assert is_job_name(name)


def test_a_variable_without_a_value_comes_from_the_submitter() -> None:
    text = 'script: a.py\nenv: {A: x, B: , C: "", D: }\n'
    spec = load(text, {"env": {"D": "from the flag"}}, {"A": "ignored", "B": "from here", "D": "ignored", "E": "no"})
    assert dict(spec.env) == {"A": "x", "B": "from here", "C": "", "D": "from the flag"}


def test_flags_go_over_the_file_and_variables_are_added() -> None:
    text = "script: a.py\nargs: [x]\nenv: {A: '1', B: '2'}\nresources: {nodes: 2, labels: [a]}\nretry: {max: 1}\n"
    flags = {
        "args": ("y", "z"),
        "env": ("B=3", "C=x=y"),
        "nodes": "3..5",
        "gpus_per_node": "all",
        "label": ["b", "c"],
        "retry_on": "oom,killed",
        "priority": "20",
        "preemptible": "yes",
        "time_limit": "90",
        "after": ("12", "prepare"),
        "stop_grace": 5,
        "name": None,
        "output": (),
    }
    spec = load(text, flags)
    assert spec.argv == ("a.py", "y", "z")
    assert dict(spec.env) == {"A": "1", "B": "3", "C": "x=y"}
    assert spec.resources == Resources(min_nodes=3, max_nodes=5, gpus_per_node=ALL_GPUS, labels=("b", "c"))
    assert spec.retry == Retry(1, ("oom", "killed"))
    assert (spec.priority, spec.is_preemptible, spec.time_limit_s) == (20, True, 90.0)
    assert spec.after.ok == (12, 7)
    assert spec.stop.grace_s == 5.0
    assert (spec.name, spec.outputs) == ("a", ())


def test_fields_alone_are_a_job() -> None:
    fields = {"command": ("python3", "-c", "print(1)"), "gpu_memory": "8GB", "env": ["HOME"], "cpus": "2"}
    assert job_from_fields(fields, env={"HOME": "/home/ann"}) == JobSpec(
        name="python3",
        argv=("python3", "-c", "print(1)"),
        env=(("HOME", "/home/ann"),),
        resources=Resources(gpus_per_node=1, gpu_memory_bytes=8 * 10**9, cpus=2),
    )


def test_every_key_that_a_command_line_has_room_for_has_a_flag() -> None:
    keys = {
        (*path, key)
        for path, section in job_sections()
        for key, declared in section.known_keys().items()
        if declared.section is None and declared.option != NO_OPTION
    }
    assert keys == {option.path for option in OPTIONS.values()}
    assert len(keys) == len(OPTIONS), "no two keys have an option of the same name"


def test_the_help_of_an_option_is_the_first_sentence_of_its_keys_meaning() -> None:
    assert OPTIONS["retries"].help == "Retry up to N times if the program fails. Default: 0."
    assert OPTIONS["sync"].help == "Send the code in --workdir to the nodes."
    assert OPTIONS["label"].help == "Use only nodes that have all of these labels. May be repeated."
    assert OPTIONS["stop_grace"].help.endswith("Default: 30s.")
    for option in OPTIONS.values():
        assert option.help.endswith("."), option.name
        assert "`" not in option.help


def test_a_file_is_read_with_flags_over_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("script: a.py\nenv: {A: }\nafter: {ok: [prepare]}\nresources: {cpus: 2}\n")
    spec = draft_job(path, fields={"nodes": "3"}).spec({"A": "x"}, by_name)
    assert spec.resources == Resources(3, 3, ANY_GPUS, cpus=2)
    assert (spec.env, spec.after) == ((("A", "x"),), After(ok=(7,)))


def test_the_working_directory_is_seen_from_where_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("script: a.py")
    assert workdir(path) == tmp_path
    assert workdir(path, workdir="there") == Path("there")
    path.write_text("script: a.py\nworkdir: ../code")
    assert workdir(path) == tmp_path / "../code"
    path.write_text("script: a.py\nworkdir: /code")
    assert workdir(path) == Path("/code")
    assert workdir(None, script="a.py") == Path()


def test_every_default_and_every_example_is_good() -> None:
    for option in OPTIONS.values():
        key = option.key
        key.kind.parse(key.example)
        assert key.kind.parse(key.kind.written(key.default)) == key.default
        with pytest.raises(BadValueError):
            key.kind.parse(object())


# Good values of every flag, so that any choice of them that is a job can be sent and read back.
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
GOOD: dict[str, st.SearchStrategy[object]] = {
    "args": st.lists(WORDS, min_size=1, max_size=4),
    "name": st.from_regex(r"[a-z][a-z0-9._-]{0,20}", fullmatch=True).filter(is_job_name),
    "env": st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), WORDS, max_size=3),
    "nodes": st.tuples(st.integers(1, 50), st.integers(50, 90)).map(lambda ends: f"{ends[0]}..{ends[1]}"),
    "gpus_per_node": st.integers(1, 8) | st.just("all"),
    "gpu_memory": st.integers(1, 80).map(lambda size: f"{size}GB.."),
    "gpu_model": st.lists(st.sampled_from(["RTX4090", "H100", "RTX 3070 Ti"]), min_size=1, unique=True),
    "memory": st.floats(0.1, 900).map(lambda size: f"{size:.2f}GiB"),
    "priority": st.integers(0, 100) | st.sampled_from(["urgent", "normal", "batch"]),
    "preemptible": st.booleans(),
    "time_limit": st.floats(0.001, 10**6),
    "after": st.lists(st.integers(1, 2**63 - 1), max_size=3, unique=True),
    "retries": st.integers(1, 100),
    "retry_on": st.lists(st.sampled_from([*Cause, "exit_code:3"]), max_size=3, unique=True),
    "checkpoint_every": st.floats(0.5, 1000),
    "on_lost": st.sampled_from(["wait", "restart"]),
    "stop_signal": st.sampled_from(["TERM", "SIGINT", "usr1"]),
}


def read_back(spec: JobSpec) -> JobSpec:
    return decode(JobSpec, json.loads(dumps(spec)))


@given(st.fixed_dictionaries({"retries": GOOD["retries"]}, optional={k: v for k, v in GOOD.items() if k != "retries"}))
def test_every_job_survives_being_sent(fields: dict[str, object]) -> None:
    spec = job_from_fields({"script": "train.py", **fields}, env={})
    assert read_back(spec) == spec


def test_alternatives_survive_being_sent() -> None:
    spec = load("script: a.py\nresources:\n  any_of: [{gpus_per_node: 2}, {nodes: 2..4, gpu: {memory: 8GB..}}]\n")
    assert len(spec.resources.any_of) == 2
    assert read_back(spec) == spec


def test_words_that_are_no_utf_8_survive_being_sent() -> None:
    word = os.fsdecode(b"caf\xe9.txt")
    spec = job_from_fields({"command": ("cat", word)}, env={})
    assert read_back(spec).argv == ("cat", word)



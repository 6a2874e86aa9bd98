"""A job file or an option that is wrong: one error, with the file and the line, or the option, and a hint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from tests.rig.job_files import by_name, load
from ugro.kernel.jobs.config.file import Resolve, draft_job
from ugro.kernel.jobs.config.options import OPTIONS, flag_of
from ugro.kernel.jobs.model import Elastic, JobSpec
from ugro.kernel.support.errors import ConfigError, Unreachable

SECRET = "hunter2"
def job_from_fields(fields: Mapping[str, object], *, env: Mapping[str, str], resolve: Resolve | None) -> JobSpec:
    return draft_job(None, fields=fields).spec(env, resolve)


def error_of(text: str, overrides: Mapping[str, object] | None = None, env: Mapping[str, str] | None = None) -> str:
    """The message, and below it the hint."""
    with pytest.raises(ConfigError) as caught:
        load(text, overrides, env)
    return f"{caught.value}\n{caught.value.hint or ''}"


def flag_error_of(**fields: object) -> str:
    with pytest.raises(ConfigError) as caught:
        job_from_fields({"script": "train.py", **fields}, env={}, resolve=by_name)
    return f"{caught.value}\n{caught.value.hint or ''}"


@pytest.mark.parametrize("env", [{}, {"TOKEN": ""}])
def test_a_variable_that_nobody_gives_is_an_error(env: Mapping[str, str]) -> None:
    error = error_of("script: a.py\nenv:\n  A: x\n  TOKEN:\n", env=env)
    assert error.startswith("job.yaml:4: env.TOKEN: it has no value here")
    assert "--env TOKEN=VALUE" in error


def test_no_message_shows_the_value_of_a_variable() -> None:
    for value in (SECRET + "\0", SECRET + "\ud800"):
        assert SECRET not in error_of("script: a.py\nenv: {A: }", env={"A": value})
        assert SECRET not in flag_error_of(env={"A": value})
        assert SECRET not in flag_error_of(env=[f"A={value}"])
    assert SECRET not in flag_error_of(env=[f"A B={SECRET}"])
    assert "123456" not in error_of("script: a.py\nenv: {A: 123456}")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("script: a.py\nresorces: {}\n", "job.yaml:2: resorces: unknown key", "did you mean resources?"),
        ("script: a.py\nzzz: 1\n", "job.yaml:2: zzz: unknown key", "the keys of this map are name, command"),
        ("script: a.py\nnodes: 2\n", "job.yaml:2: nodes: unknown key", "did you mean resources: {nodes: …}?"),
        ("script: a.py\nretries: 2\n", "job.yaml:2: retries: unknown key", "did you mean retry: {max: …}?"),
        ("script: a.py\ngpus: 2\n", "job.yaml:2: gpus: unknown key", "did you mean resources: {gpus_per_node: …}?"),
        ("script: a.py\nresources: {gpus: 2}\n", "job.yaml:2: resources.gpus: unknown", "did you mean gpus_per_node?"),
        (
            "script: a.py\nresources:\n  nodes: 1\n  gpu_per_node: 2\n",
            "job.yaml:4: resources.gpu_per_node: unknown key",
            "did you mean gpus_per_node?",
        ),
        (
            "script: a.py\nresources:\n  gpu:\n    mem: 8GB\n",
            "job.yaml:4: resources.gpu.mem: unknown key",
            "did you mean memory?",
        ),
        (
            "script: a.py\nresources:\n  any_of:\n  - gpus_per_node: 2\n  - node: 2\n",
            "job.yaml:5: resources.any_of.node: unknown key",
            "did you mean nodes?",
        ),
        (
            "script: a.py\nresources:\n  any_of:\n  - gpus_per_node: 2\n  - {gpu: {memory: lots}}\n",
            "job.yaml:5: resources.any_of.gpu.memory: expected a least size with a unit, such as 8GB or 8GB.., got",
            'for example: memory: "8GB.."',
        ),
        (
            "script: a.py\nresources:\n  any_of:\n  - gpus_per_node: 2\n  - 5\n",
            "job.yaml:5: resources.any_of: expected a map of keys to values, got 5",
            "for example: any_of: [{gpus_per_node: 2}",
        ),
        (
            "script: a.py\nresources: {any_of: {nodes: 2}}\n",
            "job.yaml:2: resources.any_of: expected a list of maps, got a map",
            "for example: any_of: [{",
        ),
        (
            "script: a.py\nresources:\n  any_of: [{any_of: []}]\n",
            "job.yaml:3: resources.any_of.any_of: unknown key",
            "the keys of this map are nodes",
        ),
        (
            "script: a.py\nresources:\n  any_of: [{nodes: 2}]\n  cpus: 2\n",
            "job.yaml:4: resources.cpus: cannot be used beside any_of",
            "each alternative",
        ),
        ("script: a.py\nresources: 3\n", "job.yaml:2: resources: expected a map of keys", "for example: resources: {"),
        (
            "script: a.py\nresources:\n  nodes: 4..2\n",
            'job.yaml:3: resources.nodes: the range "4..2" ends before it begins',
            "write it as 2..4",
        ),
        (
            "script: a.py\nresources: {nodes: 2..}\n",
            "job.yaml:2: resources.nodes: expected a number of nodes such as 3, a range such as 2..4, or all",
            "needs both ends",
        ),
        ("script: a.py\nresources: {nodes: 0..2}\n", "job.yaml:2: resources.nodes: expected 1 to", "example: nodes"),
        (
            "script: a.py\nresources: {gpu: {memory: ..16GB}}\n",
            'job.yaml:2: resources.gpu.memory: "..16GB" has an upper end',
            "8GB..",
        ),
        (
            "script: a.py\nresources: {gpu: {memory: 8GB..16GB}}\n",
            'job.yaml:2: resources.gpu.memory: "8GB..16GB" has an upper end',
            "8GB..",
        ),
        (
            "script: a.py\nresources: {memory: 32}\n",
            "job.yaml:2: resources.memory: expected a size with a unit, such as 8GB or 512MiB, got 32",
            "say in which unit",
        ),
        (
            "script: a.py\nresources: {gpus_per_node: 0, gpu: {model: H100}}\n",
            "job.yaml:2: resources.gpus_per_node: 0 GPUs cannot have a model or a memory size",
            "at least one GPU",
        ),
        (
            "script: a.py\nresources: {gpu: {model: 4090}}\n",
            "job.yaml:2: resources.gpu.model: expected a model's name, got 4090",
            'put it in quotes: "4090"',
        ),
        (
            "command: [x]\nresources:\n  nodes: 2..3\n",
            "job.yaml:3: resources.nodes: a command runs on one node, got 2..3",
            "a script runs on several",
        ),
        (
            "command: [x]\nresources:\n  any_of:\n  - {nodes: 1}\n  - {nodes: 2}\n",
            "job.yaml:5: resources.any_of.nodes: a command runs on one node, got 2",
            "a script runs on several",
        ),
        ("name: x\n", "job.yaml:1: there is nothing to run", "give a script such as train.py, or a command"),
        ("script: a.py\ncommand: [b]\n", "job.yaml:1: script: there is a command, too", "one of them"),
        ("command: [b]\nbalance: off\n", "job.yaml:2: balance: a command runs in one process", "a script can"),
        ("command: [b]\ntrain_sync: local\n", "job.yaml:2: train_sync: a command runs in one process", "a script can"),
        ("script: a.py\nnan: 3\n", "job.yaml:2: nan: expected stop, skip or ignore, got 3", "skip"),
        ("script: a.py\ntrain_sync: 3\n", "job.yaml:2: train_sync: expected step or local, got 3", "train_sync: step"),
        ("script: a.py\nbalance: on\n", "job.yaml:2: balance: expected off, static or adaptive, got true", "static"),
        ("command: [b]\nargs: [x]\n", "job.yaml:2: args: only a script has args", "into the command itself"),
        ("command: [b]\nlauncher: ddp\n", "job.yaml:2: launcher: ddp runs a Python script", "give a script"),
        ("script: b.py\nlauncher: command\n", "job.yaml:2: launcher: a script is run by ddp", "python3 train.py"),
        (
            "script: b.py\nlauncher: mpi\n",
            'job.yaml:2: launcher: expected command, ddp, torchrun or ray, got "mpi"',
            "for example: launcher: ddp",
        ),
        (
            "script: b.py\nargs:\n- --epochs\n- 10\n",
            "job.yaml:4: args: expected words as texts that a program can be given, got 10",
            'put it in quotes: "10"',
        ),
        ("script: b.py\nargs: it's\n", "job.yaml:2: args: a quote in it is not closed", "a list of words"),
        ("command: []\n", "job.yaml:1: command: expected at least the program's name", "for example: command: ["),
        ("script: b.py\nname: 12\n", "job.yaml:2: name: expected a job's name", 'put it in quotes: "12"'),
        (
            "script: b.py\npriority: high\n",
            'job.yaml:2: priority: expected urgent, normal, batch, or a whole number from 0 to 100, got "high"',
            "for example: priority: batch",
        ),
        (
            "script: b.py\nretry:\n  max: 2\n  on:\n  - oom\n  - cuda_om\n",
            'job.yaml:6: retry.on: expected a cause of failure such as node_lost or exit_code:3, got "cuda_om"',
            "did you mean cuda_oom?",
        ),
        ("script: b.py\nretry: {max: 1, on: [zz]}\n", "job.yaml:2: retry.on: expected a cause", "the causes are ra"),
        ("script: b.py\nretry: {on: [oom]}\n", "job.yaml:2: retry.on: there are no retries", "how many"),
        (
            "script: b.py\nretry: {max: 1, on: [oom], never_on: [oom]}\n",
            "job.yaml:2: retry.never_on: oom is in on, too",
            "remove it from one",
        ),
        ("script: b.py\nstop: {signal: KILL}\n", "job.yaml:2: stop.signal: expected TERM, INT", "a grace of 0"),
        ("script: b.py\nafter: {ok: [12, gone]}\n", "job.yaml:2: after.ok: there is no job gone", "ugro status"),
        ("script: b.py\nafter: [12]\n", "job.yaml:2: after: expected a map of keys to values, got a", "after: {ok"),
        ("script: b.py\nscript: c.py\n", "job.yaml:2: script: given twice, in line 1 and in line 2", "remove one"),
        ("", "job.yaml:1: the file is empty", "for example: script: train.py"),
        ("# only this\n", "job.yaml:1: the file is empty", "for example: script: train.py"),
        ("- a\n", "job.yaml:1: expected a map of keys to values, got a list", "for example: script: train.py"),
        ("script: [a\n", "job.yaml:2: not valid YAML", ""),
    ],
)
def test_a_mistake_is_named_with_its_line_its_key_and_a_hint(text: str, message: str, hint: str) -> None:
    complaint, _, got = error_of(text).partition("\n")
    assert complaint.startswith(message)
    assert hint in got


@pytest.mark.parametrize(
    "fields",
    [
        "name: ''",
        "name: a b",
        "name: last",
        "name: '007'",
        f"name: {'a' * 65}",
        "script: -c",
        "script: 5",
        "command: 5",
        "command: ''",
        "command: ['', a]",
        'command: ["a\\0b"]',
        'command: "a\\0b"',
        "command: {a: b}",
        "args: 5",
        "args: {a: b}",
        'args: ["\\ud800"]',
        "env: [A]",
        "env: {A: 1}",
        "env: {A: true}",
        "env: {A: [x]}",
        "env: {'A B': x}",
        "env: {'A=B': x}",
        "setup: ' '",
        "setup: [a]",
        "workdir: ''",
        "cwd: project",
        "cwd: 5",
        "priority: -1",
        "priority: 101",
        "priority: 50.0",
        "priority: true",
        "priority: null",
        "preemptible: 1",
        "preemptible: 'yes'",
        "time_limit: 0",
        "time_limit: -5",
        "time_limit: 2y",
        "time_limit: 366d",
        "time_limit: .nan",
        "time_limit: true",
        "outputs: results",
        "outputs: [/etc/passwd]",
        "outputs: [~/x]",
        "outputs: [a/../../b]",
        "outputs: [..]",
        "outputs: ['']",
        "notify: mail",
        "notify: [5]",
        "resources: {nodes: 0}",
        "resources: {nodes: -1}",
        "resources: {nodes: true}",
        "resources: {nodes: 2.5}",
        "resources: {nodes: 2-4}",
        "resources: {nodes: 2...4}",
        "resources: {nodes: 2..4..6}",
        "resources: {nodes: ..}",
        "resources: {nodes: 99999999}",
        "resources: {nodes: null}",
        "resources: {gpus_per_node: -1}",
        "resources: {gpus_per_node: 257}",
        "resources: {gpus_per_node: some}",
        "resources: {gpus_per_node: 1.0}",
        "resources: {gpus_per_node: true}",
        "resources: {cpus: -1}",
        "resources: {cpus: 1.5}",
        "resources: {memory: 0GB}",
        "resources: {memory: -1GB}",
        "resources: {memory: '32'}",
        "resources: {memory: 8GB..}",
        "resources: {labels: fast}",
        "resources: {labels: ['a b']}",
        "resources: {any_of: 3}",
        "resources: {any_of: null}",
        "resources: {gpu: RTX4090}",
        "resources: {gpu: {memory: 8}}",
        "resources: {gpu: {memory: ..}}",
        "resources: {gpu: {memory: 8GB..x}}",
        "resources: {gpu: {memory: x..8GB}}",
        "resources: {gpu: {model: ''}}",
        "resources: {gpu: {model: {a: b}}}",
        "after: {ok: 3}",
        "after: {ok: [0]}",
        "after: {ok: [-1]}",
        "after: {ok: [true]}",
        "after: {ok: ['a b']}",
        "after: {ok: [99999999999999999999]}",
        "retry: {max: -1}",
        "retry: {max: 101}",
        "retry: {max: 1, on: oom}",
        "retry: {max: 1, on: ['exit_code:0']}",
        "retry: {max: 1, on: ['exit_code:256']}",
        "retry: {max: 1, on: [3]}",
        "checkpoint: {dir: ../x}",
        "checkpoint: {every: 0}",
        "disconnect: {lost_after: 0}",
        "disconnect: {on_lost: panic}",
        "stop: {signal: 9}",
        "stop: {signal: STOP}",
        "stop: {grace: -1}",
        "stop: {grace: 2h}",
    ],
)
def test_nonsense_is_refused(fields: str) -> None:
    job = fields if fields.startswith(("script", "command")) else f"{fields}\nscript: a.py"
    complaint = error_of(job).partition("\n")[0]
    assert complaint.startswith(f"job.yaml:1: {fields.partition(':')[0]}")
    assert "expected" in complaint
    assert complaint.isprintable()


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({"nodes": "four"}, "--nodes: expected a number of nodes such as 3, a range such as 2..4, or all, got", "2..4"),
        ({"nodes": "4..2"}, '--nodes: the range "4..2" ends before it begins', "2..4"),
        ({"gpus_per_node": "some"}, "--gpus-per-node: expected", "for example: --gpus-per-node all"),
        ({"gpu_memory": "8"}, "--gpu-memory: expected a least size with a unit", "say in which unit"),
        ({"label": ("a b",)}, "--label: expected a word", "for example: --label fast"),
        ({"priority": "high"}, "--priority: expected urgent, normal, batch", "for example: --priority batch"),
        ({"retry_on": ("oom",)}, "--retry-on: there are no retries", "how many"),
        ({"env": ("A B=x",)}, "--env: expected names of letters, digits and _", "--env HF_HOME=/data/hf"),
        ({"env": "=x"}, "--env: expected names of letters, digits and _", "--env HF_HOME=/data/hf"),
        ({"env": 5}, "--env: expected NAME=VALUE or NAME", "--env HF_HOME=/data/hf"),
        ({"env": ("GONE",)}, "--env GONE: it has no value here", "export GONE"),
        ({"after": ("gone",)}, "--after: there is no job gone", "ugro status"),
        ({"command": ("x",)}, "SCRIPT: there is a command, too", "one of them"),
        ({"script": "-c"}, "SCRIPT: expected a Python file", "for example: train.py"),
        ({"script": None}, "there is nothing to run", "give a script such as train.py, or a command"),
        ({"gpu_mem": "8GB"}, "--gpu-mem: unknown option", "did you mean --gpu-memory?"),
        ({"zzzz": "8GB"}, "--zzzz: unknown option", "the options are --name, COMMAND"),
    ],
)
def test_a_mistake_in_a_flag_names_the_flag(fields: dict[str, object], message: str, hint: str) -> None:
    complaint, _, got = flag_error_of(**fields).partition("\n")
    assert complaint.startswith(message)
    assert hint in got


def test_a_flag_that_does_not_go_with_the_file_is_named() -> None:
    text = "command: [x]\nresources:\n  any_of: [{cpus: 2}]\n"
    assert error_of(text, {"nodes": 2}).startswith("--nodes: cannot be used beside any_of")
    assert error_of(text, {"launcher": "ddp"}).startswith("--launcher: ddp runs a Python script")
    assert error_of("script: a.py\nresources: 5\n", {"nodes": 2}).startswith("job.yaml:2: resources: expected a map")
    assert error_of("script: a.py\nenv: 5\n", {"env": ["A=1"]}).startswith("job.yaml:2: env: expected a map")


def test_a_flag_mends_a_mistake_in_the_file() -> None:
    text = "script: a.py\nresources: {nodes: none}\n"
    assert "resources.nodes" in error_of(text)
    assert load(text, {"nodes": "2"}).resources.min_nodes == 2


def test_several_mistakes_are_one_error_about_the_first_line() -> None:
    error = error_of("script: a.py\npriority: x\nresources: {nodes: x, cpus: x}\nzzz: 1\n").partition("\n")[0]
    assert error.startswith("job.yaml:2: priority: ")
    assert error.endswith("(and 3 more)")


def test_a_name_that_cannot_be_looked_up_here_is_an_error() -> None:
    assert load("script: a.py\nafter: {ok: [3]}", resolve=None).after.ok == (3,)
    with pytest.raises(ConfigError, match=r"job\.yaml:2: after\.ok: expected a job's id, got the name prepare"):
        load("script: a.py\nafter: {ok: [prepare]}", resolve=None)


def test_one_job_by_id_and_by_name_is_waited_for_once() -> None:
    assert load("script: a.py\nafter: {ok: [7, prepare]}").after.ok == (7,)


def test_an_agent_that_cannot_be_asked_is_not_called_a_mistake_in_the_file() -> None:
    def nobody(word: str) -> int:
        raise Unreachable("the agent does not answer")

    with pytest.raises(Unreachable):
        load("script: a.py\nafter: {ok: [prepare]}", resolve=nobody)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "gone", Path("nul\0"), tmp_path / "x/y"):
        with pytest.raises(ConfigError) as caught:
            draft_job(path, fields={})
        assert "cluster" not in f"{caught.value} {caught.value.hint}"


# Pieces of YAML and of the schema, so that much of it gets past the first character.
CHARACTERS = list(" :-?[]{},#|>'\"=~*a1\n\r\t\\\x85\ufeff\u2028")
PIECES = st.one_of(
    st.sampled_from(CHARACTERS),
    st.sampled_from(["script", "resources", "nodes", "any_of", "gpu", "env", "on", "-1", "1.5", ".nan", "null"]),
    st.sampled_from(["true", "!!int", "!x", ": ", "- ", "&a ", "*a", "<<", "\\0", "\n  ", "%YAML 1.1\n", "---\n"]),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["2..4", "8GB..", "all"])
)
KEYS = st.sampled_from(
    sorted({str(key) for option in OPTIONS.values() for key in option.path} | {"any_of", "A"})
)
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


def complaint_about(text: str) -> str:
    """What a user would be told; anything but a ConfigError goes through and fails the test."""
    try:
        load(text)
    except ConfigError as error:
        return f"{error} {error.hint}"
    return "job.yaml: nothing"


@given(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.lists(PIECES, max_size=30).map("".join)))
@example("script: 2001-99-99")
@example("script: !!python/object:os.system {}")
@example("{script: a.py, resources: {any_of: [null, {}, []]}}")
@example("{script: a.py, env: {<<: 3}}")
def test_no_text_raises_anything_but_a_configuration_error(text: str) -> None:
    complaint = complaint_about(text)
    assert complaint.startswith("job.yaml:")
    assert "pydantic" not in complaint
    assert "cluster" not in complaint


@given(st.dictionaries(KEYS, TREES))
@example({"script": "a.py", "resources": {"any_of": [{"gpu": 3}, [], None]}})
@example({"script": "a.py", "after": {"ok": [{}]}, "retry": {"on": [[]]}})
def test_no_tree_of_values_raises_anything_but_a_configuration_error(tree: dict[str, object]) -> None:
    assert complaint_about(yaml.safe_dump(tree, allow_unicode=True)).startswith("job.yaml:")


@given(
    st.dictionaries(st.sampled_from(sorted(OPTIONS)) | st.text(max_size=5), TREES | st.binary(max_size=3)),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3)),
)
@example({"env": {"A": 1}}, {})
@example({"env": [1]}, {})
@example({"env": {"\ud800": None}}, {})
def test_no_fields_raise_anything_but_a_configuration_error(fields: dict[str, object], env: dict[str, str]) -> None:
    with contextlib.suppress(ConfigError):
        job_from_fields(fields, env=env, resolve=by_name)


@given(st.sampled_from(sorted(OPTIONS)), TREES)
def test_a_bad_value_is_blamed_on_its_flag(name: str, value: object) -> None:
    fields = {"script": "train.py", "retries": 1, name: value}
    complaint = flag_of(name)
    try:
        job_from_fields(fields, env={}, resolve=by_name)
    except ConfigError as error:
        complaint = str(error)
    assert complaint.startswith((flag_of(name), "SCRIPT", "there is nothing to run"))




def test_a_training_can_go_on_with_fewer_ranks_and_nothing_else_can() -> None:
    spec = load("script: train.py\nelastic: {min_ranks: 2, timeout: 90, rejoins: 0}\n")
    assert spec.elastic == Elastic(2, 90.0, 0)
    assert load("script: train.py\n").elastic == Elastic()
    for text in ("command: [x]\nelastic: {min_ranks: 1}\n", "script: t.py\nlauncher: ray\nelastic: {min_ranks: 1}\n"):
        with pytest.raises(ConfigError, match="only a training can go on with fewer ranks"):
            load(text)
    for wrong in ("min_ranks: 0", "timeout: 0", "rejoins: -1"):
        with pytest.raises(ConfigError):
            load(f"script: train.py\nelastic: {{{wrong}}}\n")

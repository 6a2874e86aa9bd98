"""A job as a form: what the fields show, and what their changes mean for the job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.kernel.jobs.config.file import Draft, edited_job, job_file
from ugro.kernel.jobs.config.options import FIELDS, form_values, read_form
from ugro.kernel.jobs.config.schema import JobSection
from ugro.kernel.jobs.model import ALL_GPUS, JobSpec, Launcher, Resources, Retry
from ugro.kernel.support.errors import ConfigError

SPEC = JobSpec(
    "train",
    ("train.py", "--lr", "1e-3", "two words"),
    Launcher.DDP,
    env=(("RATE", "1"), ("WANDB_API_KEY", "hush")),
    resources=Resources(min_nodes=2, max_nodes=4, gpus_per_node=ALL_GPUS),
    time_limit_s=7200.0,
    retry=Retry(max_retries=2),
    priority=10,
    is_preemptible=True,
    snapshot="abc",
)
COMMAND = JobSpec("list", ("sh", "-c", "ls | wc"))


def _edited(spec: JobSpec, **texts: str) -> JobSpec:
    return _draft(spec, **texts).spec(dict(spec.env))


def _draft(spec: JobSpec, **texts: str) -> Draft:
    return edited_job(job_file(spec), read_form(texts))


def test_the_fields_show_the_job_and_no_secrets() -> None:
    assert form_values(SPEC) == {
        "name": "train",
        "args": "--lr 1e-3 'two words'",
        "time_limit": "2h",
        "priority": "batch",
        "retries": "2",
        "nodes": "2..4",
        "gpus_per_node": "all",
        "env": "RATE=1\nWANDB_API_KEY",
    }
    assert form_values(COMMAND) == {
        "name": "list",
        "command": "sh -c 'ls | wc'",
        "time_limit": "",
        "priority": "normal",
        "retries": "0",
        "nodes": "1",
        "gpus_per_node": "",
        "env": "",
    }


@pytest.mark.parametrize(("seconds", "text"), [(7200.0, "2h"), (90.0, "90s"), (1800.0, "30m"), (0.5, "0.5s")])
def test_a_time_limit_is_said_in_the_largest_exact_unit(seconds: float, text: str) -> None:
    spec = replace(SPEC, time_limit_s=seconds)
    assert form_values(spec)["time_limit"] == text
    assert _edited(spec, time_limit=text).time_limit_s == seconds


@pytest.mark.parametrize("spec", [SPEC, COMMAND], ids=lambda spec: spec.name)
def test_a_form_that_is_sent_back_whole_changes_nothing(spec: JobSpec) -> None:
    assert _edited(spec) == replace(spec, snapshot=None)
    assert _edited(spec, **form_values(spec)) == replace(spec, snapshot=None)


def test_a_changed_field_overrides_the_file() -> None:
    found = _edited(SPEC, name="other", args="--lr 0.1", nodes="3", time_limit="30m", retries="0")
    assert (found.name, found.argv) == ("other", ("train.py", "--lr", "0.1"))
    assert (found.resources.min_nodes, found.resources.max_nodes) == (3, 3)
    assert (found.time_limit_s, found.retry.max_retries) == (1800.0, 0)
    assert _edited(COMMAND, command="echo 'a b'").argv == ("echo", "a b")


def test_an_emptied_field_means_the_default() -> None:
    found = _edited(SPEC, time_limit="", args=" ", nodes="", priority="", name="")
    assert (found.time_limit_s, found.argv, found.resources.max_nodes) == (None, ("train.py",), 1)
    assert (found.priority, found.name) == (50, "train")


def test_variables_are_all_of_them_and_a_name_alone_keeps_its_value() -> None:
    assert _edited(SPEC, env="WANDB_API_KEY\nNEW=a=b\n").env == (("NEW", "a=b"), ("WANDB_API_KEY", "hush"))
    assert _edited(SPEC, env="").env == ()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"nodes": "many"}, "--nodes: expected"),
        ({"time_limit": "soon"}, "--time-limit: expected"),
        ({"args": "'open"}, "ARGS: no closing quotation"),
        ({"env": "=x"}, "--env: "),
        ({"workdir": "/"}, "workdir: not a field of this form"),
    ],
)
def test_a_field_that_is_wrong_is_named(texts: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        _edited(SPEC, **texts)
    assert error.value.message.startswith(message)


def test_a_mistake_in_the_file_has_its_line() -> None:
    with pytest.raises(ConfigError, match=r"^job\.yaml:3: tiem_limit: unknown key"):
        edited_job("name: a\nscript: b.py\ntiem_limit: 3h\n", read_form({}))


def test_what_says_which_code_is_used_cannot_be_changed() -> None:
    before = JobSection.of_spec(SPEC)
    keys, reason = ("workdir", "cwd", "sync"), "cannot be changed here"
    _draft(SPEC).refuse_changes(before, keys, reason)
    for line in ("workdir: /etc", "cwd: /root", "sync: false"):
        draft = edited_job(job_file(SPEC) + line + "\n", read_form({}))
        with pytest.raises(ConfigError, match="cannot be changed here"):
            draft.refuse_changes(before, keys, reason)


def test_a_variable_without_a_value_that_the_old_job_did_not_have_is_refused() -> None:
    _draft(SPEC).refuse_lack(["RATE", "WANDB_API_KEY"], "none", "")
    with pytest.raises(ConfigError, match=r"env\.AWS_SECRET: none"):
        edited_job(job_file(SPEC).replace("env:\n", "env:\n  AWS_SECRET:\n"), read_form({})).refuse_lack([], "none", "")


def test_variables_of_several_lines_are_left_to_the_file() -> None:
    spec = replace(SPEC, env=(("TEXT", "a\nb"),))
    assert "env" not in form_values(spec)
    assert set(form_values(SPEC)) < set(FIELDS)

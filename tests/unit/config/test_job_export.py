"""A job that becomes a job file, and that file read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.jobs.config.file import job_file, parse_job
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
    ResultRule,
    Retry,
    Stop,
)

words = st.from_regex(r"[a-z][a-z0-9_.-]{0,8}[a-z0-9]", fullmatch=True)
texts = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1, max_size=12)
seconds = st.integers(1, 10**6).map(float)
sizes = st.integers(1, 10**12)
flags = st.booleans()


def again(spec: JobSpec, **env: str) -> JobSpec:
    return parse_job(job_file(spec), Path("job.yaml"), fields={}).spec(env)


def resources(launcher: Launcher) -> st.SearchStrategy[Resources]:
    most = 1 if launcher is Launcher.COMMAND else 4
    usual = 0 if launcher is Launcher.COMMAND else ANY_GPUS
    one = st.builds(
        lambda nodes, gpus, **others: Resources(min(nodes), max(nodes), gpus, **others),
        st.tuples(st.integers(1, most), st.integers(1, most)),
        st.sampled_from([usual, ALL_GPUS, 0, 1, 3]),
        cpus=st.none() | st.integers(0, 64),
        memory_bytes=st.just(0) | sizes,
        labels=st.lists(words, max_size=2, unique=True).map(tuple),
    )
    chosen = st.builds(
        lambda base, memory, models: replace(
            base, gpus_per_node=2 if base.gpus_per_node in (0, ANY_GPUS) else base.gpus_per_node,
            gpu_memory_bytes=memory, gpu_models=models,
        ),
        one, sizes, st.lists(words, max_size=2, unique=True).map(tuple),
    )  # fmt: skip
    simple = one | chosen
    return simple | st.lists(simple, min_size=1, max_size=3).map(lambda ways: Resources(any_of=tuple(ways)))


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    launcher = draw(st.sampled_from(list(Launcher)))
    is_script = launcher is not Launcher.COMMAND
    retries = draw(st.integers(0, 3))
    causes = st.lists(st.sampled_from(sorted(Cause)), max_size=2, unique=True)
    on = draw(causes) if retries else []
    return JobSpec(
        name=draw(words),
        argv=(draw(words) + ".py" if is_script else draw(words), *draw(st.lists(texts, max_size=3))),
        launcher=launcher,
        env=tuple(sorted((name, draw(texts)) for name in draw(st.sets(st.sampled_from(["MODE", "HF_HOME"]))))),
        cwd=draw(st.none() | words.map("/data/{}".format)),
        setup=draw(st.none() | words),
        resources=draw(resources(launcher)),
        priority=draw(st.integers(0, 100)),
        is_preemptible=draw(flags),
        time_limit_s=draw(st.none() | seconds),
        after=After(tuple(draw(st.lists(st.integers(1, 99), max_size=2, unique=True))), ()),
        retry=Retry(retries, tuple(on), tuple(cause for cause in draw(causes) if cause not in on)),
        checkpoint=Checkpoint(draw(st.none() | words), draw(st.none() | seconds)),
        disconnect=Disconnect(draw(seconds), draw(st.sampled_from(list(OnLost)))),
        stop=Stop(draw(st.sampled_from(["TERM", "INT", "USR1"])), float(draw(st.integers(0, 3600)))),
        outputs=tuple(draw(st.lists(words, max_size=2, unique=True))),
        results=ResultRule(draw(st.sampled_from(["all", "none", "best", "last 3"])), draw(st.none() | sizes)),
        seed=draw(st.none() | st.integers(0, 99)),
        is_cached=draw(flags),
        notify=tuple(draw(st.lists(words, max_size=2, unique=True))),
        balance=draw(st.sampled_from([None, "off", "static", "adaptive"])) if is_script else None,
        nan=draw(st.sampled_from([None, "stop", "skip", "ignore"])),
        train_sync=draw(st.sampled_from([None, "step", "local"])) if is_script else None,
    )  # fmt: skip


@given(specs())
def test_the_file_of_a_job_is_that_job_again(spec: JobSpec) -> None:
    assert again(spec) == spec


def test_only_what_differs_from_the_usual_is_told() -> None:
    wanted = Resources(2, 4, ANY_GPUS)
    spec = JobSpec("train", ("train.py", "--lr", "0.1"), Launcher.DDP, snapshot="a" * 64, resources=wanted)
    assert yaml.safe_load(job_file(spec)) == {
        "name": "train",
        "script": "train.py",
        "args": ["--lr", "0.1"],
        "resources": {"nodes": "2..4"},
    }


def test_what_looks_secret_is_asked_for_anew() -> None:
    spec = JobSpec("train", ("true",), env=(("HF_TOKEN", "hush"), ("MODE", "fast")), snapshot="a" * 64)
    assert "hush" not in job_file(spec)
    assert again(spec, HF_TOKEN="other").env == (("HF_TOKEN", "other"), ("MODE", "fast"))

"""Jobs for other systems: what is mapped, what is named as not mapped, and that no secret is in it."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import yaml

from ugro.features.environments.model import EnvRequest
from ugro.features.export.client import TARGETS, export
from ugro.kernel.jobs.model import (
    ALL_GPUS,
    ANY_GPUS,
    After,
    Job,
    JobSpec,
    JobState,
    Launcher,
    Origin,
    Placement,
    Resources,
    Retry,
    Share,
    Stop,
)
from ugro.kernel.support.errors import Unsatisfiable
from ugro.kernel.support.secrets import HIDDEN

TRAINING = JobSpec(
    "Exp 1: BERT!",
    ("train.py", "--lr", "1e-3", "--note", "it's $HOME `x` $(y)\n"),
    Launcher.DDP,
    env=(("EPOCHS", "3"), ("HF_TOKEN", "hf_topsecret"), ("DB", "postgresql://ann:topsecret@db/x"), ("ODD", "a'b $c")),
    snapshot="1a2b3c4d5e6f7788",
    setup="pip install -e .",
    resources=Resources(2, 4, gpus_per_node=2, cpus=8, memory_bytes=16 << 30, labels=("fast",)),
    priority=10,
    time_limit_s=3601,
    after=After(ok=(3,)),
    retry=Retry(2),
    stop=Stop(grace_s=45),
    seed=7,
    sdk=True,
    environment=EnvRequest(python="3.11", requirements=("torch==2.13.0",), index_url="https://u:topsecret@pypi.lan"),
)
PLACED = Placement((Share("gpu1", (0, 1)), Share("gpu2", (3, 4))))


def job_of(spec: JobSpec, placement: Placement | None = PLACED, **fields: Any) -> Job:
    origin = Origin("0123456789abcdef", is_dirty=True)
    return Job(12, spec, "ann", JobState.RUNNING, "", "2026-01-01T00:00:00", 1, placement, origin=origin, **fields)


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def manifest(job: Job, **wanted: str) -> dict[str, Any]:
    return dict(yaml.safe_load(export(job, "kubernetes", **wanted)))


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    [group] = document["spec"]["replicatedJobs"]
    return dict(group["template"]["spec"]["template"]["spec"])


@pytest.mark.parametrize("target", TARGETS)
def test_no_secret_is_in_it_and_its_name_is(target: str) -> None:
    words = (*TRAINING.argv, "--api-key", "topsecret", "--wandb-token=topsecret")
    text = export(job_of(replace(TRAINING, argv=words, setup="curl -H 'Authorization: topsecret' x")), target)
    assert "topsecret" not in text
    for name in ("HF_TOKEN", "DB", "UGRO_SECRET_6", "UGRO_SECRET_7"):
        assert name in text
    assert "setup: it holds something that looks secret" in text


@pytest.mark.parametrize("target", TARGETS)
def test_its_head_says_how_code_gets_there_and_what_is_not_mapped(target: str) -> None:
    text = export(job_of(TRAINING), target)
    plain = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    for part in (
        "Job 12 (Exp 1: BERT!), as placed on gpu1 GPU 0–1, gpu2 GPU 3–4.",
        "tree 1a2b3c4d5e6f, git commit 0123456789ab with changes that were not committed",
        "labels: fast",
        "after: jobs 3",
        "nodes: 2..4, of which 2 are taken",
        "Python 3.11 with: torch==2.13.0",
        "pip install ugro==",
    ):
        assert part in plain, plain


@pytest.mark.parametrize("target", ["slurm", "torchrun"])
@pytest.mark.parametrize("launcher", [Launcher.DDP, Launcher.TORCHRUN, Launcher.COMMAND])
def test_the_scripts_are_bash(target: str, launcher: Launcher) -> None:
    placement = PLACED if launcher is not Launcher.COMMAND else Placement((Share("gpu1", (0,)),))
    text = export(job_of(replace(TRAINING, launcher=launcher), placement), target)
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_slurm_gets_nodes_devices_time_and_priority() -> None:
    text = export(job_of(TRAINING), "slurm")
    assert options(text) == [
        "--job-name=exp-1-bert",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=2",
        "--cpus-per-task=8",
        "--mem=16384M",
        "--time=61",
        "--signal=TERM@45",
        "--nice=4000",
        "--output=exp-1-bert-%j.log",
    ]
    assert "retry: 2 times; Slurm repeats a job only when a node failed" in text
    assert text.splitlines()[0] == "#!/bin/bash"
    first_command = text.index("set -euo pipefail")
    assert text.rindex("#SBATCH") < first_command  # Slurm reads no option after the first command


def test_a_high_priority_is_named_as_not_mapped() -> None:
    text = export(job_of(replace(TRAINING, priority=90)), "slurm")
    assert "priority 90" in text
    assert "--nice" not in text


def test_a_jobset_has_a_pod_for_each_node_that_finds_the_first_by_name() -> None:
    document = manifest(job_of(TRAINING), image="me/train:1")
    assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert document["spec"]["failurePolicy"] == {"maxRestarts": 2}
    [group] = document["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    assert job["activeDeadlineSeconds"] == 3601
    pod = pod_of(document)
    [container] = pod["containers"]
    assert container["image"] == "me/train:1"
    assert container["resources"] == {
        "requests": {"cpu": 8, "memory": "16384Mi"},
        "limits": {"nvidia.com/gpu": 2, "memory": "16384Mi"},
    }
    assert "--master-addr=exp-1-bert-node-0-0.exp-1-bert" in container["command"]
    assert container["command"][-5:] == ["train.py", "--lr", "1e-3", "--note", "it's $HOME `x` $$(y)\n"]
    assert {"name": "ODD", "value": "a'b $c"} in container["env"]
    secret = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "exp-1-bert-secrets", "key": "HF_TOKEN"}}}
    assert secret in container["env"]


COMMAND = replace(TRAINING, launcher=Launcher.COMMAND, argv=("train.py", "--api-key=topsecret"))


@pytest.mark.proof
@pytest.mark.proof
@pytest.mark.parametrize(
    ("spec", "nodes"),
    [(TRAINING, 1), (TRAINING, 2), (TRAINING, 5), (COMMAND, 1), (JobSpec("echo", ("true",)), 1)],
    ids=["one node", "two nodes", "five nodes", "a command", "the least"],
)
def test_the_jobs_and_pods_of_a_jobset_follow_the_published_schemas(spec: JobSpec, nodes: int) -> None:
    """JobSet's own schema is not among them; that of the Job that it makes is, with its pods."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    placed = Placement(tuple(Share(f"gpu{number}", (0, 1) if spec is TRAINING else ()) for number in range(nodes)))
    document = manifest(job_of(spec, placed))
    [group] = document["spec"]["replicatedJobs"]
    spec = group["template"]["spec"]
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": document["metadata"], "spec": spec}
    assert made["spec"]["completions"] == nodes
    validate.validate(made, validate.latest_version(), strict=True)
    [container] = made["spec"]["template"]["spec"]["containers"]
    container["comand"] = container.pop("command")
    with pytest.raises(validate.ValidationError):
        validate.validate(made, validate.latest_version(), strict=True)


def test_a_secret_in_a_word_of_the_command_comes_from_a_variable() -> None:
    spec = replace(TRAINING, argv=("train.py", "--api-key=topsecret"), launcher=Launcher.COMMAND)
    placement = Placement((Share("gpu1"),))
    script = export(job_of(spec, placement), "torchrun")
    last = script.splitlines()[-1]
    assert shlex.split(last)[-2:] == ["train.py", "--api-key=${UGRO_SECRET_1}"]
    [container] = pod_of(manifest(job_of(spec, placement)))["containers"]
    assert container["command"][-1] == "--api-key=$(UGRO_SECRET_1)"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("word", ["--api-key", "bash"])
def test_stars_in_a_word_hide_no_secret_of_it(target: str, word: str) -> None:
    text = 'echo "*** start ***"; HF_TOKEN=topsecret python t.py --db postgresql://ann:topsecret@db/x --n 3'
    words = {"bash": ("bash", "-c", text), "--api-key": ("train.py", "--api-key", "***topsecret")}[word]
    spec = JobSpec("stars", words, setup='echo "***"; curl -H "Authorization: topsecret" x')
    exported = export(job_of(spec, Placement((Share("gpu1"),))), target)
    assert "topsecret" not in exported
    assert "setup: it holds something that looks secret" in exported


def test_two_secrets_in_a_word_are_two_variables(tmp_path: Any) -> None:
    command = 'echo "*** $0"; A_TOKEN=one B_TOKEN=two printenv A_TOKEN B_TOKEN'
    spec = JobSpec("two", ("bash", "-c", command, "it's"))
    text = export(job_of(spec, Placement((Share("gpu1"),))), "torchrun")
    given = {"PATH": "/usr/bin:/bin", "UGRO_SECRET_2": "first", "UGRO_SECRET_2_2": "second"}
    done = subprocess.run(["bash", "-c", text], env=given, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("*** it's\nfirst\nsecond\n", "")
    [container] = pod_of(manifest(job_of(spec, Placement((Share("gpu1"),)))))["containers"]
    assert "A_TOKEN=$(UGRO_SECRET_2) B_TOKEN=$(UGRO_SECRET_2_2) printenv" in container["command"][2]
    assert [one["name"] for one in container["env"]] == ["UGRO_SECRET_2", "UGRO_SECRET_2_2"]


@pytest.mark.parametrize("target", TARGETS)
def test_values_that_only_their_user_sees_have_to_be_set(target: str) -> None:
    spec = JobSpec("echo", ("printenv", "EPOCHS"), env=(("EPOCHS", HIDDEN), ("HF_TOKEN", HIDDEN)))
    text = export(job_of(spec, Placement((Share("gpu1"),))), target)
    assert HIDDEN not in text
    assert "because only ann sees their values: EPOCHS, HF_TOKEN. Set them before." in text


def test_passwords_of_packages_are_not_in_it() -> None:
    environment = EnvRequest(requirements=("mine @ https://ann:topsecret@pypi.lan/mine.whl",))
    text = export(job_of(replace(TRAINING, environment=environment)), "slurm")
    assert "mine @ https://ann:***@pypi.lan/mine.whl" in text


def test_a_plain_command_is_one_process_with_its_words_unchanged(tmp_path: Any) -> None:
    spec = JobSpec("echo", ("printf", "%s|", "it's", "$HOME", "a\nb", "*"), env=(("ODD", "x 'y' $z"),))
    text = export(job_of(spec, Placement((Share("gpu1"),))), "torchrun")
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("it's|$HOME|a\nb|*|", "")


def test_a_script_stops_if_a_secret_was_not_given() -> None:
    spec = JobSpec("echo", ("printenv", "API_KEY"), env=(("API_KEY", "topsecret"),))
    text = export(job_of(spec, Placement((Share("gpu1"),))), "torchrun")
    done = subprocess.run(["bash", "-c", text], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode != 0
    assert "API_KEY: is not in this script, because it looks secret: set it before" in done.stderr
    given = {"PATH": "/usr/bin:/bin", "API_KEY": "mine"}
    done = subprocess.run(["bash", "-c", text], env=given, capture_output=True, text=True)
    assert done.stdout == "mine\n"


def test_unequal_nodes_keep_their_processes_with_torchrun_and_are_named_for_slurm() -> None:
    placement = Placement((Share("gpu1", (0, 1)), Share("gpu2", (5,))))
    script = export(job_of(TRAINING, placement), "torchrun")
    assert "  0) export CUDA_VISIBLE_DEVICES=0,1; processes=2 ;;  # gpu1" in script
    assert "  1) export CUDA_VISIBLE_DEVICES=5; processes=1 ;;  # gpu2" in script
    assert "unequal nodes: processes per node were gpu1 2, gpu2 1" in export(job_of(TRAINING, placement), "slurm")


@pytest.mark.parametrize("target", TARGETS)
def test_a_job_that_was_never_placed_is_exported_by_what_it_asks_for(target: str) -> None:
    text = export(job_of(TRAINING, None), target)
    assert {"slurm": "--nodes=2", "torchrun": "--nnodes=2", "kubernetes": "--nnodes=2"}[target] in text
    assert "it was never placed" not in text


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("gpus", [ALL_GPUS, ANY_GPUS])
def test_a_number_of_gpus_that_nobody_knows_is_named(target: str, gpus: int) -> None:
    spec = replace(TRAINING, resources=replace(TRAINING.resources, gpus_per_node=gpus))
    assert "it was never placed, and 1 on each node is taken" in export(job_of(spec, None), target)
    assert "it was never placed" not in export(job_of(spec), target)


def test_a_name_becomes_one_line_whatever_is_in_it() -> None:
    for target in TARGETS:
        text = export(job_of(replace(TRAINING, name="a\nrm -rf /\x1b[2J")), target)
        assert "\nrm" not in text
        assert "\x1b" not in text


def test_names_begin_with_a_letter() -> None:
    for name, made in (("3d", "job-3d"), ("…", "job-12"), ("x" * 80, "x" * 40)):
        assert manifest(job_of(replace(TRAINING, name=name)))["metadata"]["name"] == made


def test_a_ray_job_is_not_exported() -> None:
    with pytest.raises(Unsatisfiable, match="cannot be exported"):
        export(job_of(replace(TRAINING, launcher=Launcher.RAY)), "slurm")

"""A job as a JobSet (jobset.x-k8s.io): its pods are the nodes, and find each other by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ugro.features.export.rules import DEFAULT_PRIORITY, Subject

_CODE = "/code"
_PORT = 29500
_START = 'exec "${UGRO_PYTHON:-python3}" -u -m torch.distributed.run --node-rank="$JOB_COMPLETION_INDEX" "$@"'


def comments(subject: Subject) -> Iterator[str]:
    yield from subject.header()
    yield ""
    yield f"The claim {_claim(subject)} holds the code, and is mounted at {_CODE}: put the folder there."
    if subject.secrets:
        words = " ".join(f"--from-literal={name}=…" for name in subject.secrets)
        yield f"kubectl create secret generic {_secret(subject)} {words}"
    yield "JobSet has to be installed in the cluster. Then: kubectl apply -f FILE"
    if left := [*subject.unmapped(), *_unmapped(subject)]:
        yield ""
        yield "Not mapped, because there is no word for it here:"
        yield from (f"  {line}" for line in left)


def jobset(subject: Subject, image: str) -> dict[str, Any]:
    spec = subject.spec
    pods = len(subject.hosts) if subject.is_training else 1
    limit = {"activeDeadlineSeconds": max(1, math.ceil(spec.time_limit_s))} if spec.time_limit_s is not None else {}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(spec.stop.grace_s),
        "containers": [_container(subject, image, pods)],
        "volumes": _volumes(subject),
    }
    job = {
        "completionMode": "Indexed",
        "parallelism": pods,
        "completions": pods,
        "backoffLimit": 0,
        **limit,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": subject.name, "labels": {"app.kubernetes.io/managed-by": "ugro"}},
        "spec": {
            "failurePolicy": {"maxRestarts": spec.retry.max_retries},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _container(subject: Subject, image: str, pods: int) -> dict[str, Any]:
    return {
        "name": "main",
        "image": image,
        "workingDir": subject.spec.cwd or _CODE,
        "command": _command(subject, pods),
        "env": [*_env(subject)],
        "resources": _resources(subject),
        "volumeMounts": [
            {"name": "code", "mountPath": _CODE},
            *([{"name": "shared-memory", "mountPath": "/dev/shm"}] if subject.is_training else []),
        ],
    }


def _command(subject: Subject, pods: int) -> list[str]:
    """Words as they are: no shell reads those of the job."""
    words = [word.joined(_plain, lambda name: f"$({name})") for word in subject.words]
    before = [f"{subject.setup}\n"] if subject.setup is not None else []
    if subject.is_training:
        meeting = [f"--master-addr={subject.name}-node-0-0.{subject.name}", f"--master-port={_PORT}"]
        options = [f"--nnodes={pods}", f"--nproc-per-node={subject.processes}", *meeting, "--max-restarts=0"]
        return ["bash", "-euo", "pipefail", "-c", _plain("".join([*before, _START])), "torchrun", *options, *words]
    if before:
        return ["bash", "-euo", "pipefail", "-c", _plain("".join([*before, 'exec "$@"'])), "job", *words]
    return words


def _plain(text: str) -> str:
    """Kubernetes replaces $(NAME) by a variable, unless the dollar is doubled."""
    return text.replace("$(", "$$(")


def _env(subject: Subject) -> Iterator[dict[str, Any]]:
    yield from ({"name": name, "value": _plain(value)} for name, value in subject.env)
    for name in subject.secrets:
        yield {"name": name, "valueFrom": {"secretKeyRef": {"name": _secret(subject), "key": name}}}


def _resources(subject: Subject) -> dict[str, Any]:
    requests: dict[str, Any] = {}
    if subject.cpus:
        requests["cpu"] = subject.cpus
    if memory := subject.resources.memory_bytes:
        requests["memory"] = f"{math.ceil(memory / 2**20)}Mi"
    limits: dict[str, Any] = {"nvidia.com/gpu": subject.gpus} if subject.gpus else {}
    if "memory" in requests:
        limits["memory"] = requests["memory"]
    named = {"requests": requests, "limits": limits}
    return {name: values for name, values in named.items() if values}


def _volumes(subject: Subject) -> list[dict[str, Any]]:
    code = {"name": "code", "persistentVolumeClaim": {"claimName": _claim(subject)}}
    # Loaders of several processes and NCCL need more than the 64 MB that a container gets.
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    return [code, memory] if subject.is_training else [code]


def _claim(subject: Subject) -> str:
    return f"{subject.name}-code"


def _secret(subject: Subject) -> str:
    return f"{subject.name}-secrets"


def _unmapped(subject: Subject) -> Iterator[str]:
    if subject.spec.priority != DEFAULT_PRIORITY:
        yield f"priority {subject.spec.priority}: name a class of the cluster, priorityClassName, in the pod's spec"

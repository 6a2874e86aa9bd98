"""A job as a shell script that is run on each of its nodes."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from ugro.policy.export import shell
from ugro.policy.export.subject import DEFAULT_PRIORITY, Subject

_PORT = 29500


def script(subject: Subject) -> str:
    lines = [
        "#!/usr/bin/env bash",
        *shell.comments(subject, _usage(subject), _unmapped(subject)),
        "",
        "set -euo pipefail",
        *_place(subject),
        *shell.preparation(subject),
        *([f"bash -euo pipefail -c {shlex.quote(subject.setup)}"] if subject.setup is not None else []),
        _start(subject),
    ]
    return "\n".join([*lines, ""])


def _usage(subject: Subject) -> Iterator[str]:
    yield ""
    if len(subject.hosts) == 1:
        yield "Run it in the folder of the code, or with UGRO_CODE=/path: bash FILE"
        return
    yield f"Run it on each of {len(subject.hosts)} nodes, in the folder of the code or with UGRO_CODE=/path:"
    yield "  bash FILE NODE_RANK MASTER_ADDR [PORT]"
    yield "MASTER_ADDR is an address of the node with NODE_RANK 0 that the others reach."


def _place(subject: Subject) -> Iterator[str]:
    if not subject.is_training:
        return
    last = len(subject.hosts) - 1
    if last:
        yield f"node_rank=${{1:?NODE_RANK, 0 to {last}}} master=${{2:?MASTER_ADDR}} port=${{3:-{_PORT}}}"
    else:
        yield f"node_rank=0 master=127.0.0.1 port=${{PORT:-{_PORT}}}"
    yield 'case "$node_rank" in'
    for rank, host in enumerate(subject.hosts):
        devices = f" export CUDA_VISIBLE_DEVICES={','.join(map(str, host.gpus))};" if host.gpus else ""
        comment = f"  # {shlex.quote(host.name)}" if host.name else ""
        yield f"  {rank}){devices} processes={host.processes} ;;{comment}"
    yield f'  *) echo "NODE_RANK is 0 to {last}, not $node_rank" >&2; exit 2 ;;'
    yield "esac"


def _start(subject: Subject) -> str:
    words = shell.command(subject.words)
    if subject.is_training:
        nodes = f'--nnodes={len(subject.hosts)} --node-rank="$node_rank" --nproc-per-node="$processes"'
        meeting = f'--master-addr="$master" --master-port="$port" --max-restarts={subject.spec.retry.max_retries}'
        words = f"{shell.TORCHRUN} {nodes} {meeting} {words}"
    return f"exec {_limit(subject)}{words}"


def _limit(subject: Subject) -> str:
    limit_s, stop = subject.spec.time_limit_s, subject.spec.stop
    if limit_s is None:
        return ""
    return f"timeout --signal={stop.signal} --kill-after={math.ceil(stop.grace_s)} {math.ceil(limit_s)} "


def _unmapped(subject: Subject) -> Iterator[str]:
    spec, need = subject.spec, subject.resources
    if spec.priority != DEFAULT_PRIORITY:
        yield f"priority {spec.priority}: it starts at once"
    if need.cpus or need.memory_bytes:
        yield "cpus and memory: nothing limits them here"
    if spec.retry.max_retries and not subject.is_training:
        yield f"retry: {spec.retry.max_retries} times"

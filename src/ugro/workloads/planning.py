"""From a job and its placement to the plan of an attempt: one process, or torchrun's environment on every device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ugro.core.job import Job, Launcher, Placement, Share
from ugro.core.plan import NodePlan, Plan, RankPlan, Rendezvous

Env = dict[str, str]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What planning must know of the world: where ranks meet, and each node's Python."""

    rendezvous: Rendezvous | None
    pythons: Mapping[str, str]


def plan(job: Job, attempt: int, placement: Placement, surroundings: Surroundings) -> Plan:
    build = _BUILDERS[job.spec.launcher]
    nodes = build(job, placement, surroundings)
    return Plan(job.id, attempt, nodes, surroundings.rendezvous)


def needs_rendezvous(job: Job) -> bool:
    return job.spec.launcher is not Launcher.COMMAND


def _command(job: Job, placement: Placement, surroundings: Surroundings) -> tuple[NodePlan, ...]:
    share = placement.shares[0]
    env = {**dict(job.spec.env), **_devices(share)}
    return (NodePlan(share.node, (RankPlan(0, 0, job.spec.argv, tuple(env.items())),), job.spec.cwd),)


def _ddp(job: Job, placement: Placement, surroundings: Surroundings) -> tuple[NodePlan, ...]:
    counts = [_processes(share) for share in placement.shares]
    world_size = sum(counts)
    nodes = []
    first_rank = 0
    for group, (share, count) in enumerate(zip(placement.shares, counts, strict=True)):
        ranks = []
        for local in range(count):
            env = {
                **dict(job.spec.env),
                **_devices(share),
                **_meeting(surroundings.rendezvous, share.node),
                "RANK": str(first_rank + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(count),
                "GROUP_RANK": str(group),
                "NODE_RANK": str(group),
                "GROUP_WORLD_SIZE": str(len(counts)),
            }
            argv = (surroundings.pythons[share.node], "-u", *job.spec.argv)
            ranks.append(RankPlan(first_rank + local, local, argv, tuple(env.items())))
        nodes.append(NodePlan(share.node, tuple(ranks), job.spec.cwd))
        first_rank += count
    return tuple(nodes)


def _torchrun(job: Job, placement: Placement, surroundings: Surroundings) -> tuple[NodePlan, ...]:
    """PyTorch's own launcher, one per node: static rendezvous and no restarts of its own, which are ours to make."""
    meeting = surroundings.rendezvous
    assert meeting is not None
    nodes = []
    for group, share in enumerate(placement.shares):
        argv = (
            *(surroundings.pythons[share.node], "-u", "-m", "torch.distributed.run"),
            *(f"--nnodes={len(placement.shares)}", f"--node-rank={group}", f"--nproc-per-node={_processes(share)}"),
            *(f"--master-addr={meeting.address}", f"--master-port={meeting.port}", "--max-restarts=0"),
            *job.spec.argv,
        )
        env = {**dict(job.spec.env), **_devices(share), **_interface(meeting, share.node)}
        nodes.append(NodePlan(share.node, (RankPlan(group, 0, argv, tuple(env.items())),), job.spec.cwd))
    return tuple(nodes)


_BUILDERS: dict[Launcher, Callable[[Job, Placement, Surroundings], tuple[NodePlan, ...]]] = {
    Launcher.COMMAND: _command,
    Launcher.DDP: _ddp,
    Launcher.TORCHRUN: _torchrun,
}


def _processes(share: Share) -> int:
    """One per GPU; on a node that gives none, one that computes on its cores."""
    return len(share.gpus) or 1


def _devices(share: Share) -> Env:
    # Also where a job gets no GPU: it must not find one that somebody else holds.
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in share.gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _meeting(rendezvous: Rendezvous | None, node: str) -> Env:
    assert rendezvous is not None
    return {
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        **_interface(rendezvous, node),
    }


def _interface(rendezvous: Rendezvous, node: str) -> Env:
    name = dict(rendezvous.interfaces).get(node)
    return {"NCCL_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name} if name else {}

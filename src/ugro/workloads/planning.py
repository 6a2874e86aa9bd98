"""From a job and its placement to the plan of an attempt: one process, or torchrun's environment on every device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ugro.core.job import Job, JobSpec, Launcher, Placement, Share
from ugro.core.plan import NodePlan, Plan, RankPlan, Rendezvous
from ugro.policy.balance.hardware_speed import Speeds

Env = dict[str, str]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What planning must know of the world: where ranks meet, and of each node its Python and variables."""

    rendezvous: Rendezvous | None
    pythons: Mapping[str, str]
    # What the user gave to everything on a node; ranks inherit it there.
    node_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # What ranks are told beside all else; nothing overrides it.
    extra_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    speeds: Speeds | None = None  # of the ranks, for a static balance


@dataclass(frozen=True, slots=True)
class _Group:
    """The ranks of one node among those of all."""

    share: Share
    number: int
    first_rank: int
    world_size: int
    group_count: int

    @property
    def node(self) -> str:
        return self.share.node

    @property
    def size(self) -> int:
        return _processes(self.share)


def plan(job: Job, attempt: int, placement: Placement, surroundings: Surroundings) -> Plan:
    build = _BUILDERS[job.spec.launcher]
    nodes = build(job, placement, surroundings)
    return Plan(job.id, attempt, nodes, surroundings.rendezvous)


def follows_from_spec(spec: JobSpec) -> bool:
    """Whether an attempt's plan follows from its spec and placement: nothing has to be found out or set up first."""
    return spec.launcher is Launcher.COMMAND and not (spec.setup or spec.checkpoint.is_given or spec.is_cached)


def needs_rendezvous(job: Job) -> bool:
    return job.spec.launcher is not Launcher.COMMAND


def _command(job: Job, placement: Placement, surroundings: Surroundings) -> tuple[NodePlan, ...]:
    share = placement.shares[0]
    env = _environment(job, share, surroundings, {}, {})
    return (NodePlan(share.node, (RankPlan(0, 0, job.spec.argv, env),), job.spec.cwd),)


def _ddp(job: Job, placement: Placement, surroundings: Surroundings) -> tuple[NodePlan, ...]:
    return tuple(
        NodePlan(
            group.node,
            tuple(_rank(job, group, local, surroundings) for local in range(group.size)),
            job.spec.cwd,
        )
        for group in _groups(placement)
    )


def _rank(job: Job, group: _Group, local: int, surroundings: Surroundings) -> RankPlan:
    rank = group.first_rank + local
    argv = (surroundings.pythons[group.node], "-u", *job.spec.argv)
    defaults = _defaults(group, surroundings)
    fixed = {**_standing(job, group, local), **_meeting(surroundings)}
    return RankPlan(rank, local, argv, _environment(job, group.share, surroundings, defaults, fixed))


def _torchrun(job: Job, placement: Placement, surroundings: Surroundings) -> tuple[NodePlan, ...]:
    """PyTorch's own launcher, one per node: static rendezvous and no restarts of its own, which are ours to make."""
    meeting = _place(surroundings)
    nodes = []
    for group in _groups(placement):
        argv = (
            *(surroundings.pythons[group.node], "-u", "-m", "torch.distributed.run"),
            *(f"--nnodes={group.group_count}", f"--node-rank={group.number}", f"--nproc-per-node={group.size}"),
            *(f"--master-addr={meeting.address}", f"--master-port={meeting.port}", "--max-restarts=0"),
            *job.spec.argv,
        )
        env = _environment(job, group.share, surroundings, _interface(meeting, group.node), {})
        nodes.append(NodePlan(group.node, (RankPlan(group.number, 0, argv, env),), job.spec.cwd))
    return tuple(nodes)


_BUILDERS: dict[Launcher, Callable[[Job, Placement, Surroundings], tuple[NodePlan, ...]]] = {
    Launcher.COMMAND: _command,
    Launcher.DDP: _ddp,
    Launcher.TORCHRUN: _torchrun,
}


def _groups(placement: Placement) -> list[_Group]:
    world_size = sum(_processes(share) for share in placement.shares)
    groups = []
    first_rank = 0
    for number, share in enumerate(placement.shares):
        groups.append(_Group(share, number, first_rank, world_size, len(placement.shares)))
        first_rank += _processes(share)
    return groups


def _processes(share: Share) -> int:
    """One per GPU; on a node that gives none, one that computes on its cores."""
    return len(share.gpus) or 1


# --- a rank's environment ---------------------------------------------------------------------------------------


def _environment(
    job: Job, share: Share, surroundings: Surroundings, defaults: Env, fixed: Env
) -> tuple[tuple[str, str], ...]:
    """``defaults`` give way to what the user said of the node or the job; ``fixed`` does not."""
    given = dict(job.spec.env)
    own = surroundings.node_env.get(share.node, {})
    defaults = {**defaults, **_speeds(surroundings.speeds)}
    balance = {"UGRO_BALANCE": job.spec.balance} if job.spec.balance else {}
    env = {
        **{name: value for name, value in defaults.items() if name not in own},
        **given,
        **_devices(share),
        **balance,
        **fixed,
        "UGRO_NODE": share.node,
        **({"UGRO_SEED": str(job.spec.seed)} if job.spec.seed is not None else {}),
        **surroundings.extra_env.get(share.node, {}),
    }
    return tuple(env.items())


def _standing(job: Job, group: _Group, local: int) -> Env:
    """Who a rank is, in the words of torchrun. Its store is left out: a rank's own process group makes one."""
    rank = str(group.first_rank + local)
    world_size = str(group.world_size)
    retries = max(0, job.attempt - 1)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(group.size),
        "GROUP_RANK": str(group.number),
        "NODE_RANK": str(group.number),
        "GROUP_WORLD_SIZE": str(group.group_count),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": str(job.id),
        "TORCHELASTIC_RESTART_COUNT": str(retries),
        # Some retries are free of charge, so there may be more than were allowed.
        "TORCHELASTIC_MAX_RESTARTS": str(max(retries, job.spec.retry.max_retries)),
    }


def _defaults(group: _Group, surroundings: Surroundings) -> Env:
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **_interface(_place(surroundings), group.node)}
    # As torchrun does: several processes that each take all cores are slower than one.
    return {**env, "OMP_NUM_THREADS": "1"} if group.size > 1 else env


def _speeds(speeds: Speeds | None) -> Env:
    if speeds is None:
        return {}
    source = {"UGRO_SPEEDS_SOURCE": speeds.source}
    return {"UGRO_SPEEDS": str(speeds), **source} if speeds.values else source


def _devices(share: Share) -> Env:
    # Also where a job gets no GPU: it must not find one that somebody else holds.
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in share.gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _meeting(surroundings: Surroundings) -> Env:
    meeting = _place(surroundings)
    return {"MASTER_ADDR": meeting.address, "MASTER_PORT": str(meeting.port)}


def _interface(rendezvous: Rendezvous, node: str) -> Env:
    name = dict(rendezvous.interfaces).get(node)
    return {"NCCL_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name} if name else {}


def _place(surroundings: Surroundings) -> Rendezvous:
    assert surroundings.rendezvous is not None
    return surroundings.rendezvous

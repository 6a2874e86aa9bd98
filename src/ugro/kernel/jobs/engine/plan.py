"""Plans an attempt of a job on its placement: one process, or one per device with torchrun's environment."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from ugro.features.environments.model import Made
from ugro.features.hardware.rules import Speeds
from ugro.features.ray.jobs import RayRole, gang_settings, key_of, rank_argv, rank_env
from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.model import Job, JobSpec, Launcher, Placement, Share
from ugro.kernel.jobs.records import NODE_PYTHON, NodePlan, Plan, RankPlan, Rendezvous
from ugro.kernel.support.codec import DecodeError, decode, values_getter
from ugro.kernel.support.secrets import sealed, unsealed

# --- tickets ----------------------------------------------------------------------------------------------------------
# A ticket says what a run is. Its agent seals it and the node keeps it, so that an agent with an older state can catch
# up. It is the job at its start, without the fields that have their default values: thousands of small jobs carry one.


_PLAIN = frozenset({str, int, float, bool, type(None)})
_encode = json.JSONEncoder(separators=(",", ":")).encode


def ticket_of(key: bytes, agent: str, job: Job) -> str | None:
    """None without a key."""
    return sealed(key, _encode({"agent": agent, "job": _compact(job)})) if key else None


def read_ticket(key: bytes, agent: str, message: object) -> Job | None:
    """The job at its start; None for a ticket that is not proven to be ours."""
    text = unsealed(key, message)
    if text is None:
        return None
    with contextlib.suppress(ValueError, DecodeError, KeyError, TypeError):
        document = json.loads(text)
        return decode(Job, document["job"]) if document["agent"] == agent else None
    return None


def _compact(value: Any) -> Any:
    kind: type = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, tuple):
        return [_compact(one) for one in value]
    if not dataclasses.is_dataclass(kind):
        return value
    names, defaults, values_of = _fields(kind)
    given = zip(names, values_of(value), defaults, strict=True)
    return {name: _compact(one) for name, one, default in given if one is not default and one != default}


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, ...], tuple[Any, ...], Callable[[Any], tuple[Any, ...]]]:
    """Their names and defaults, and what reads all of them at once."""
    fields = dataclasses.fields(kind)
    names = tuple(field.name for field in fields)
    return names, tuple(_default(field) for field in fields), values_getter(names)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


# --- the processes of an attempt --------------------------------------------------------------------------------------


Env = dict[str, str]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What planning needs besides the job: where ranks meet, and each node's Python and variables."""

    rendezvous: Rendezvous | None
    pythons: Mapping[str, str]
    # The variables that the cluster file sets on a node; ranks inherit them there.
    node_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Variables that nothing overrides.
    extra_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    speeds: Speeds | None = None  # of the ranks, for a static balance
    # The Python environments that nodes have for this job; none: their own Python is used.
    environments: Mapping[str, Made] = field(default_factory=dict)
    secret: str = ""  # that only the processes of this attempt know
    sdk: str | None = None  # the tree with UGRO's own package, if it goes with the job

    def python(self, node: str) -> str:
        made = self.environments.get(node)
        return made.python if made is not None else self.pythons[node]


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
    is_prepared = spec.setup or spec.environment or spec.checkpoint.is_given or spec.is_cached or spec.sdk
    return spec.launcher is Launcher.COMMAND and not is_prepared


def ranks_on(spec: JobSpec, placement: Placement, node: str) -> range:
    """The ranks that a plan of the job starts on one of its nodes."""
    group = next(group for group in _groups(placement) if group.node == node)
    if spec.launcher is Launcher.DDP:
        return range(group.first_rank, group.first_rank + group.size)
    if spec.launcher in (Launcher.TORCHRUN, Launcher.RAY):  # one process on each node
        return range(group.number, group.number + 1)
    return range(1 if group.number == 0 else 0)


def cpu_limit(job: Job, share: Share) -> int:
    """Only what the job asked for: one core per process is where it is counted, not what it may use. 0: no limit."""
    ways = job.spec.resources.any_of or (job.spec.resources,)
    return share.cpus if all(way.cpus is not None for way in ways) else 0


def needs_rendezvous(job: Job) -> bool:
    return job.spec.launcher is not Launcher.COMMAND


def _command(job: Job, placement: Placement, surroundings: Surroundings) -> tuple[NodePlan, ...]:
    share = placement.shares[0]
    env = _environment(job, share, surroundings, _threads(job, share, 1), {})
    program, *words = job.spec.argv
    argv = (surroundings.python(share.node) if program == NODE_PYTHON else program, *words)
    return (_node_plan(job, share.node, (RankPlan(0, 0, argv, env),), surroundings),)


def _ddp(job: Job, placement: Placement, surroundings: Surroundings) -> tuple[NodePlan, ...]:
    nodes = tuple(
        _node_plan(
            job,
            group.node,
            tuple(_rank(job, group, local, surroundings) for local in range(group.size)),
            surroundings,
        )
        for group in _groups(placement)
    )
    if job.spec.elastic.min_ranks is None:
        return nodes
    first, *others = nodes
    return (replace(first, store=_store(first.ranks[0])), *others)


def _store(first: RankPlan) -> RankPlan:
    """On the first node, where all ranks have reached its port: it outlives each of them, and has no device."""
    argv = (first.argv[0], "-m", "ugro.train.elastic_meeting")
    return RankPlan(first.rank, first.local_rank, argv, (*first.env, ("CUDA_VISIBLE_DEVICES", "")))


def _rank(job: Job, group: _Group, local: int, surroundings: Surroundings) -> RankPlan:
    rank = group.first_rank + local
    argv = (surroundings.python(group.node), "-u", *job.spec.argv)
    defaults = _defaults(job, group, surroundings)
    fixed = {**_rank_variables(job, group, local), **_master_variables(surroundings), **_elastic(job)}
    return RankPlan(rank, local, argv, _environment(job, group.share, surroundings, defaults, fixed))


def _torchrun(job: Job, placement: Placement, surroundings: Surroundings) -> tuple[NodePlan, ...]:
    """PyTorch's own launcher, one per node, with a static rendezvous and no restarts: UGRO restarts jobs itself."""
    rendezvous = _rendezvous(surroundings)
    nodes = []
    for group in _groups(placement):
        argv = (
            *(surroundings.python(group.node), "-u", "-m", "torch.distributed.run"),
            *(f"--nnodes={group.group_count}", f"--node-rank={group.number}", f"--nproc-per-node={group.size}"),
            *(f"--master-addr={rendezvous.address}", f"--master-port={rendezvous.port}", "--max-restarts=0"),
            *job.spec.argv,
        )
        defaults = {**_interface(rendezvous, group.node), **_threads(job, group.share, group.size)}
        env = _environment(job, group.share, surroundings, defaults, {})
        nodes.append(_node_plan(job, group.node, (RankPlan(group.number, 0, argv, env),), surroundings))
    return tuple(nodes)


def _ray(job: Job, placement: Placement, surroundings: Surroundings) -> tuple[NodePlan, ...]:
    """A head with the script as its driver on the first node, a worker on each of the others."""
    rendezvous = _rendezvous(surroundings)
    nodes = []
    for group in _groups(placement):
        role = RayRole(group.number, group.group_count, cpu_limit(job, group.share) or None)
        settings = {**gang_settings(job, group.share, rendezvous, role), "id": key_of(surroundings.secret)}
        argv = rank_argv(surroundings.python(group.node), str(settings["role"]), job.spec.name)
        fixed = rank_env(settings, surroundings.secret)
        env = _environment(job, group.share, surroundings, _threads(job, group.share, 1), fixed)
        nodes.append(_node_plan(job, group.node, (RankPlan(group.number, 0, argv, env),), surroundings))
    return tuple(nodes)


def _node_plan(job: Job, node: str, ranks: tuple[RankPlan, ...], surroundings: Surroundings) -> NodePlan:
    made, sdk = surroundings.environments.get(node), surroundings.sdk
    if made is None:
        return NodePlan(node, ranks, job.spec.cwd, sdk=sdk)
    # One that a user has made is not UGRO's to keep from being removed.
    name = made.name if made.is_made else None
    return NodePlan(node, ranks, job.spec.cwd, name, (str(PurePosixPath(made.python).parent),), sdk)


_BUILDERS: dict[Launcher, Callable[[Job, Placement, Surroundings], tuple[NodePlan, ...]]] = {
    Launcher.COMMAND: _command,
    Launcher.DDP: _ddp,
    Launcher.TORCHRUN: _torchrun,
    Launcher.RAY: _ray,
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
    """One per GPU; without GPUs, one that computes on CPU cores."""
    return len(share.gpus) or 1


# --- a rank's environment ---------------------------------------------------------------------------------------------


def _environment(
    job: Job, share: Share, surroundings: Surroundings, defaults: Env, fixed: Env
) -> tuple[tuple[str, str], ...]:
    """The variables of the node and the job override ``defaults``, but not ``fixed``."""
    given = dict(job.spec.env)
    own = surroundings.node_env.get(share.node, {})
    defaults = {**defaults, **_speeds(surroundings.speeds)}
    modes = {"UGRO_BALANCE": job.spec.balance, "UGRO_SYNC": job.spec.train_sync, "UGRO_NAN": job.spec.nan}
    env = {
        **{name: value for name, value in defaults.items() if name not in own},
        **given,
        **_virtual_env(surroundings.environments.get(share.node)),
        **_devices(share),
        **{name: mode for name, mode in modes.items() if mode},
        **fixed,
        "UGRO_NODE": node_of(share.node),
        **({"UGRO_SEED": str(job.spec.seed)} if job.spec.seed is not None else {}),
        **surroundings.extra_env.get(share.node, {}),
    }
    return tuple(env.items())


def _virtual_env(made: Made | None) -> Env:
    """As if somebody had activated it; its programs are found by the plan's ``path``."""
    return {} if made is None else {"VIRTUAL_ENV": str(PurePosixPath(made.python).parent.parent)}


def _rank_variables(job: Job, group: _Group, local: int) -> Env:
    """The variables that torchrun sets, without its store: the process group creates one."""
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
        # Some retries do not count, so there may be more than retry.max.
        "TORCHELASTIC_MAX_RESTARTS": str(max(retries, job.spec.retry.max_retries)),
    }


def _defaults(job: Job, group: _Group, surroundings: Surroundings) -> Env:
    env = _interface(_rendezvous(surroundings), group.node)
    # As torchrun does: several processes that each use all cores are slower than one.
    several = {"OMP_NUM_THREADS": "1"} if group.size > 1 else {}
    return {**env, **several, **_threads(job, group.share, group.size)}


def _elastic(job: Job) -> Env:
    elastic = job.spec.elastic
    if elastic.min_ranks is None:
        return {}
    limits = {"UGRO_MIN_RANKS": str(elastic.min_ranks), "UGRO_RANK_TIMEOUT_S": str(elastic.timeout_s)}
    # The store is there already; and what hangs in NCCL is ended by the rank itself, which goes on.
    return {**limits, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def _threads(job: Job, share: Share, processes: int) -> Env:
    """Of a job that is limited to some cores: a thread for each core of the node would only wait for its turn."""
    cpus = cpu_limit(job, share)
    return {"OMP_NUM_THREADS": str(max(1, cpus // processes))} if cpus else {}


def _speeds(speeds: Speeds | None) -> Env:
    if speeds is None:
        return {}
    source = {"UGRO_SPEEDS_SOURCE": speeds.source}
    return {"UGRO_SPEEDS": str(speeds), **source} if speeds.values else source


def _devices(share: Share) -> Env:
    # Also for a job without GPUs: it must not see those of other jobs.
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in share.gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _master_variables(surroundings: Surroundings) -> Env:
    rendezvous = _rendezvous(surroundings)
    return {"MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port)}


def _interface(rendezvous: Rendezvous, node: str) -> Env:
    name = dict(rendezvous.interfaces).get(node)
    # NCCL takes all interfaces that begin with a name, without the sign; Gloo takes the one that has it.
    return {"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name} if name else {}


def _rendezvous(surroundings: Surroundings) -> Rendezvous:
    assert surroundings.rendezvous is not None
    return surroundings.rendezvous

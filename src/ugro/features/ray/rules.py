"""Decides about Ray clusters: whether nodes have what they need, where ranks go, and which step is next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ugro.features.ray.model import (
    ClusterState,
    ClusterView,
    ClusterWish,
    Part,
    Phase,
    RayCluster,
    Worker,
    head_title,
    worker_title,
)
from ugro.kernel.access.model import is_loopback
from ugro.kernel.jobs.model import Ending, Job, JobState
from ugro.kernel.support.errors import UgroError, Unsatisfiable
from ugro.kernel.support.quantities import count_of, format_size, names
from ugro.node import foreign

LEAST_RAY = (2, 52)  # the first with token authentication
LEAST_STORE_BYTES = 80 << 20
_WANTED = '"ray[default]{}"'


@dataclass(frozen=True, slots=True)
class Look:
    """What a node says of itself."""

    python: str
    ray: str | None
    has_dashboard: bool
    shared_bytes: int
    available_bytes: int
    taken_ports: tuple[int, ...] = ()
    unreached: str | None = None  # why it does not reach the head


def objection(looks: Mapping[str, Look], pythons: Mapping[str, str]) -> UgroError | None:
    """What keeps Ray from running on these nodes together.

    ``pythons``: the program that each would use; none if UGRO makes an environment for them.
    """
    checks = (_lack, _too_old, _differing_ray, _differing_python)
    return next((found for check in checks if (found := check(looks, pythons)) is not None), None)


def lack_of_connection(looks: Mapping[str, Look], address: str) -> UgroError | None:
    for node, look in looks.items():
        if look.unreached is not None:
            return Unsatisfiable(
                f"cannot connect to the head at {address}: {look.unreached}",
                hint="check all pairs of nodes: ugro doctor",
                subject=node,
            )
    return None


def note(looks: Mapping[str, Look]) -> str | None:
    """A difference that Ray is told to accept."""
    versions = _groups({node: look.python for node, look in looks.items()})
    if len(versions) < 2:
        return None
    return f"Python differs in its patch release: {_in_words(versions)}; Ray accepts that"


def lack_of_memory(wish: ClusterWish, looks: Mapping[str, Look]) -> UgroError | None:
    """The object stores of all workers of a node share its /dev/shm."""
    size = wish.size
    if size.memory_bytes and size.object_store_bytes is None and size.memory_bytes * 3 // 10 < LEAST_STORE_BYTES:
        return Unsatisfiable(
            f"{format_size(size.memory_bytes)} of memory are too little for a worker: 30% of it are for objects, of "
            f"which Ray needs {format_size(LEAST_STORE_BYTES)} at least",
            hint="give each worker more: --memory 300MB",
        )
    for node, look in looks.items():
        part = look.available_bytes * 2 // 10 // wish.workers_per_node  # for objects, roughly
        if wish.size.memory_bytes is None and part < LEAST_STORE_BYTES:
            return Unsatisfiable(
                f"too little memory: {format_size(look.available_bytes)} are free",
                hint="use fewer workers, or leave the node out: --only NODE",
                subject=node,
            )
        each = wish.size.object_store_bytes or LEAST_STORE_BYTES
        needed = each * wish.workers_per_node
        if needed > look.shared_bytes:
            return Unsatisfiable(
                f"too little shared memory: {format_size(look.shared_bytes)} are free in /dev/shm, and "
                f"{format_size(needed)} are needed",
                hint="fewer workers, a smaller --object-store-memory, or a larger /dev/shm: "
                "mount -o remount,size=4G /dev/shm",
                subject=node,
            )
    return None


def free_port(wanted: int, is_asked_for: bool, taken: Sequence[int], key: str, node: str) -> int:
    """The one of the cluster file, or the next free one if that is only the default. Raises Unsatisfiable."""
    if wanted not in taken:
        return wanted
    if not is_asked_for:
        for port in candidates(wanted):
            if port not in taken:
                return port
    raise Unsatisfiable(
        f"port {wanted} is taken ({key} in cluster.yaml)",
        hint=f"see who listens: ugro exec {node} -- ss -ltnp; or set another port",
        subject=node,
    )


def candidates(port: int) -> range:
    return range(port, min(port + 20, 65536))


def _lack(looks: Mapping[str, Look], pythons: Mapping[str, str]) -> UgroError | None:
    without = [node for node, look in looks.items() if look.ray is None]
    bare = [node for node, look in looks.items() if look.ray is not None and not look.has_dashboard]
    versions = [look.ray for look in looks.values() if look.ray is not None]
    wanted = f"=={versions[0]}" if versions else ""
    if without:
        return Unsatisfiable(f"Ray is not installed on {names(without)}", hint=_install(without, pythons, wanted))
    if bare:
        return Unsatisfiable(
            f"Ray on {names(bare)} lacks its dashboard and agents", hint=_install(bare, pythons, wanted)
        )
    return None


def _too_old(looks: Mapping[str, Look], pythons: Mapping[str, str]) -> UgroError | None:
    old = [node for node, look in looks.items() if _numbers(look.ray or "") < LEAST_RAY]
    if not old:
        return None
    least = ".".join(map(str, LEAST_RAY))
    return Unsatisfiable(
        f"Ray {looks[old[0]].ray} on {names(old)} has no token authentication, which came with {least}",
        hint=_install(old, pythons, f">={least}"),
    )


def _differing_ray(looks: Mapping[str, Look], pythons: Mapping[str, str]) -> UgroError | None:
    groups = _groups({node: look.ray or "" for node, look in looks.items()})
    if len(groups) < 2:
        return None
    wanted, *others = groups
    differ = [node for version in others for node in groups[version]]
    return Unsatisfiable(
        f"Ray differs: {_in_words(groups)}; it must be the same everywhere",
        hint=_install(differ, pythons, f"=={wanted}"),
    )


def _differing_python(looks: Mapping[str, Look], pythons: Mapping[str, str]) -> UgroError | None:
    groups = _groups({node: ".".join(look.python.split(".")[:2]) for node, look in looks.items()})
    if len(groups) < 2:
        return None
    wanted, *others = groups
    differ = [node for version in others for node in groups[version]]
    return Unsatisfiable(
        f"Python differs: {_in_words(groups)}; Ray needs the same minor version everywhere",
        hint=f"under {', '.join(differ)} in cluster.yaml: python: python{wanted}; or let UGRO make the same "
        'environment everywhere: ugro cluster start --package "ray[default]"',
    )


def _groups(versions: Mapping[str, str]) -> dict[str, list[str]]:
    """Nodes by version, the most common first."""
    found: dict[str, list[str]] = {}
    for node, version in versions.items():
        found.setdefault(version, []).append(node)
    return dict(sorted(found.items(), key=lambda group: -len(group[1])))


def _in_words(groups: Mapping[str, Sequence[str]]) -> str:
    parts = [f"{names(nodes)} {'has' if len(nodes) == 1 else 'have'} {version}" for version, nodes in groups.items()]
    return ", ".join(parts)


def _install(nodes: Sequence[str], pythons: Mapping[str, str], wanted: str) -> str:
    what = _WANTED.format(wanted)
    if not pythons:
        return f"name it with --package {what}, or below environment: packages: [{what}, …]"
    paths = {pythons[node] for node in nodes}
    python = paths.pop() if len(paths) == 1 else "python3"
    return (
        f"ugro exec {' '.join(nodes)} -- {python} -m pip install {what}; "
        f"or let UGRO install it: ugro cluster start --package {what}"
    )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (0,)


# --- placing ----------------------------------------------------------------------------------------------------------
# Which node each worker of a Ray cluster gets, and what it gets of it.


@dataclass(frozen=True, slots=True)
class Place:
    """A node that workers may use."""

    node: str
    cores: int
    python: str
    speed: float | None = None


def first_workers(wish: ClusterWish, places: Sequence[Place]) -> tuple[Worker, ...]:
    """``workers_per_node`` on each of them. Raises Unsatisfiable."""
    found: list[Worker] = []
    for place in places:
        cpus = cpus_of(wish, place)
        for _ in range(wish.workers_per_node):
            found.append(Worker(len(found) + 1, place.node, cpus, place.python, place.speed))
    return tuple(found)


def cpus_of(wish: ClusterWish, place: Place) -> int:
    if wish.size.cpus is not None:
        needed = wish.size.cpus * wish.workers_per_node
        if needed > place.cores:
            raise _too_few(place, f"{count_of(wish.workers_per_node, 'worker')} of {wish.size.cpus}")
        return wish.size.cpus
    cpus = place.cores // wish.workers_per_node
    if not cpus:
        raise _too_few(place, count_of(wish.workers_per_node, "worker"))
    return cpus


def _too_few(place: Place, what: str) -> Unsatisfiable:
    return Unsatisfiable(
        f"it has {count_of(place.cores, 'core')}, too few for {what}",
        hint="ask for fewer with --workers-per-node or --cpus",
        subject=place.node,
    )


def more_workers(
    wish: ClusterWish, workers: Sequence[Worker], places: Iterable[Place], wanted: int, first: int
) -> tuple[Worker, ...]:
    """Those to add, numbered from ``first``: always on the node that has the fewest. Raises Unsatisfiable."""
    room = {place.node: place for place in places}
    counts = {node: sum(worker.node == node for worker in workers) for node in room}
    added: list[Worker] = []
    while len(workers) + len(added) < wanted:
        free = [node for node in room if counts[node] < _most(wish, room[node])]
        if not free:
            most = len(workers) + len(added)
            raise Unsatisfiable(
                f"there is room for {count_of(most, 'worker')} of this size, not for {wanted}",
                hint="other nodes can be added: ugro node add; smaller workers: ugro cluster start --cpus N",
            )
        node = min(free, key=lambda name: counts[name])
        counts[node] += 1
        place = room[node]
        added.append(Worker(first + len(added), node, cpus_of(wish, place), place.python, place.speed))
    return tuple(added)


def _most(wish: ClusterWish, place: Place) -> int:
    return place.cores // wish.size.cpus if wish.size.cpus else wish.workers_per_node


def to_drop(workers: Sequence[Worker], wanted: int) -> tuple[Worker, ...]:
    """The newest go first."""
    return tuple(sorted(workers, key=lambda worker: worker.number)[wanted:])


# --- steps ------------------------------------------------------------------------------------------------------------
# What is to be done next for a Ray cluster: which jobs to submit, which to cancel, and when it is over.
#
# Pure: the row and its jobs in, steps out. Asked again after each change, so a step that was not done comes again.


HEAD = 0  # its number among the jobs; workers begin at 1


@dataclass(frozen=True, slots=True)
class Submit:
    worker: Worker | None  # None: the head


@dataclass(frozen=True, slots=True)
class Cancel:
    job: int


@dataclass(frozen=True, slots=True)
class Stop:
    """It cannot go on: everything of it ends."""

    failure: str | None


@dataclass(frozen=True, slots=True)
class Close:
    """Nothing of it runs any more."""


Step = Submit | Cancel | Stop | Close


def next_steps(cluster: RayCluster, jobs: Mapping[int, Job]) -> list[Step]:
    """``jobs``: those that were submitted, by number."""
    if cluster.state is ClusterState.ENDED:
        return []
    if cluster.state is ClusterState.STOPPING:
        return list(_stopping(jobs))
    head = jobs.get(HEAD)
    if head is None:
        return [Submit(None)]
    if head.is_final:
        return [Stop(None if head.state is JobState.CANCELLED else f"its head {head.state}: {head.reason}")]
    return [*_missing(cluster, head, jobs), *_unwanted(cluster, jobs)]


def _missing(cluster: RayCluster, head: Job, jobs: Mapping[int, Job]) -> Iterator[Step]:
    """Workers hold devices while they wait for their head, so they come when it runs."""
    if head.state is JobState.RUNNING:
        for worker in cluster.workers:
            if worker.number not in jobs:
                yield Submit(worker)


def _unwanted(cluster: RayCluster, jobs: Mapping[int, Job]) -> Iterator[Step]:
    for worker in cluster.dropped:
        if (job := jobs.get(worker.number)) is not None and _goes_on(job):
            yield Cancel(job.id)


def _stopping(jobs: Mapping[int, Job]) -> Iterator[Step]:
    if all(job.is_final for job in jobs.values()):
        yield Close()
        return
    for job in jobs.values():
        if _goes_on(job):
            yield Cancel(job.id)


def _goes_on(job: Job) -> bool:
    return not job.is_final and job.ending is not Ending.CANCELLED


# --- status -----------------------------------------------------------------------------------------------------------
# A Ray cluster as users see it, from its row, its jobs and what its ranks have said in their logs.


_READY = "ugro: ready"
_NODES = "ugro: nodes "
_OURS, _WAITS = "ugro: ", ("waiting for ", "starting for ")
_LONGEST_WAIT = 300
_MOST_NODES = 10_000


@dataclass(frozen=True, slots=True)
class Said:
    """What a rank's newest attempt has said."""

    is_ready: bool = False
    alive: frozenset[str] | None = None  # by a head: the nodes that Ray counts as alive
    waits: str = ""  # the last line, if it says what the rank waits for


def said_in(log: str) -> Said:
    """A node may write anything: a line that cannot be read is passed over."""
    is_ready, alive, waits = False, None, ""
    for line in log.splitlines():
        if line.strip() == _READY:
            is_ready = True
        elif line.startswith(_NODES):
            alive = _alive(line.removeprefix(_NODES)) or alive
        if line.startswith(_OURS):
            text = line.removeprefix(_OURS)[:_LONGEST_WAIT]
            waits = text if text.startswith(_WAITS) else ""
    return Said(is_ready, alive, waits)


def _alive(text: str) -> frozenset[str] | None:
    try:
        found = foreign.parsed(text)
        return frozenset(str(name) for name in found["alive"][:_MOST_NODES])
    except (ValueError, KeyError, TypeError):
        return None


def view_of(cluster: RayCluster, jobs: Mapping[int, Job], said: Mapping[int, Said]) -> ClusterView:
    alive = said.get(HEAD, Said()).alive
    head = _head(cluster, jobs.get(HEAD), said.get(HEAD, Said()), alive)
    workers = tuple(
        _worker(worker, cluster, jobs.get(worker.number), said.get(worker.number, Said()), alive)
        for worker in cluster.workers
    )
    phase = _phase(cluster, head)
    return ClusterView(
        name=cluster.name,
        key=cluster.key,
        user=cluster.user,
        phase=phase,
        reason=_reason(cluster, phase, head, workers),
        address=f"{cluster.head.address}:{cluster.head.port}",
        dashboard_port=cluster.head.dashboard_port,
        ray_version=cluster.ray_version,
        made_at=cluster.made_at,
        ended_at=cluster.ended_at,
        head=head,
        workers=workers,
        client_address=cluster.head.client_address,
    )


def _head(cluster: RayCluster, job: Job | None, said: Said, alive: frozenset[str] | None) -> Part:
    title = head_title(cluster.head.node)
    return _part(title, cluster.head.node, job, said, alive, (0, 0, HEAD))


def _worker(worker: Worker, cluster: RayCluster, job: Job | None, said: Said, alive: frozenset[str] | None) -> Part:
    title = worker_title(worker.node, worker.number)
    return _part(title, worker.node, job, said, alive, (worker.cpus, cluster.wish.size.gpus, worker.number))


def _part(
    title: str, node: str, job: Job | None, said: Said, alive: frozenset[str] | None, size: tuple[int, int, int]
) -> Part:
    cpus, gpus, number = size
    if job is None:
        return Part(title, node, None, None, cpus, gpus, number=number)
    is_running = job.state in (JobState.RUNNING, JobState.UNREACHABLE)
    if job.placement is not None:
        gpus = sum(len(share.gpus) for share in job.placement.shares)
    return Part(
        title,
        node,
        job.id,
        job.state,
        cpus,
        gpus,
        restarts=max(0, job.attempt - 1),
        is_ready=is_running and said.is_ready,
        is_alive=None if alive is None or not is_running else title in alive,
        reason=job.reason,
        number=number,
        waits=said.waits if is_running and not said.is_ready else "",
    )


def _phase(cluster: RayCluster, head: Part) -> Phase:
    if cluster.state is ClusterState.ENDED:
        return Phase.FAILED if cluster.failure else Phase.STOPPED
    if cluster.state is ClusterState.STOPPING:
        return Phase.STOPPING
    return Phase.RUNNING if head.is_ready else Phase.STARTING


def _reason(cluster: RayCluster, phase: Phase, head: Part, workers: Sequence[Part]) -> str:
    if cluster.failure:
        return cluster.failure
    if phase is Phase.STARTING:
        return _waits_for("the head", head, cluster)
    if phase is not Phase.RUNNING:
        return ""
    ready = sum(worker.has_joined for worker in workers)
    if ready == len(workers):
        return ""
    late = next(worker for worker in workers if not worker.has_joined)
    are = f"{count_of(len(workers), 'worker')} {'has' if len(workers) == 1 else 'have'}"
    return f"{ready} of {are} joined; {_waits_for(f'worker {late.number}', late, cluster)}"


def _waits_for(what: str, part: Part, cluster: RayCluster) -> str:
    if part.state is None:
        return f"{what} is not submitted yet"
    if part.state is JobState.RUNNING:
        text = f"{what} on {part.node} is {part.waits}" if part.waits else f"{what} starts Ray on {part.node}"
        if part.waits and part.number and is_loopback(cluster.head.address):
            text += "; that is a loopback address, which nodes on other machines or in containers do not reach"
        if part.restarts:
            log = f"ugro cluster logs {cluster.name}" + (f" -w {part.number}" if part.number else "")
            text += f"; it was started again {count_of(part.restarts, 'time')}: {log}"
        return text
    return f"{what} is {part.state}: {part.reason}" if part.reason else f"{what} is {part.state}"

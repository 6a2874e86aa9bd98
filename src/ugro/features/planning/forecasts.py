"""What is known of a training before it is launched: trials that are kept, and the predictions that follow from them.

A trial is kept by all that may change how long a step takes: the code, the arguments, the variables, the device and its
driver. Nothing is measured here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from ugro.features.hardware.store import HardwareStore
from ugro.features.planning.model import DeviceNeed, Forecast, JointFailure, JointTrial, NodeTrial, Prediction
from ugro.features.planning.rules import Exchange, Knowledge, Link, predict
from ugro.features.planning.rules_trials import needs, that_matter
from ugro.features.planning.store import TrialStore
from ugro.features.recipes.rules_memory import Device, devices_of
from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.model import ANY_GPUS, After, Job, JobSpec, Launcher, Placement, Resources, Share
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.model import Facts
from ugro.kernel.links.node import Node
from ugro.kernel.support.codec import dumps
from ugro.train.rules.shares import Mode
from ugro.train.rules.sync import SyncMode

_DEFAULT = JobSpec("", ())


@dataclass(frozen=True, slots=True)
class Known:
    """What is kept of a training on some nodes."""

    trials: Mapping[str, NodeTrial]  # by node
    joint: JointTrial | None  # on these nodes, perhaps together with others
    others: Mapping[str, NodeTrial] = field(default_factory=dict)  # of those others
    can_join: bool = True  # False: the newest trial on all nodes together has failed


class Forecasts:
    def __init__(
        self, store: TrialStore, hardware: HardwareStore, cluster: Cluster, facts: Callable[[Node], Facts | None]
    ) -> None:
        self._store = store
        self._hardware = hardware
        self._cluster = cluster
        self._facts = facts

    async def known(self, spec: JobSpec, shares: Sequence[Share]) -> Known:
        if spec.snapshot is None:
            return Known({}, None)  # other code may be there the next time
        newest = await self._newest_joint(spec, shares)
        joint = newest if isinstance(newest, JointTrial) else None
        can_join = len(shares) == 1 or not isinstance(newest, JointFailure)
        names = [name for name in (joint.distinct if joint else ()) if name not in {share.node for share in shares}]
        others = [share for name in names if (share := self.whole(name, spec.resources)) is not None]
        return Known(await self._trials(spec, shares), joint, await self._trials(spec, others), can_join)

    async def _trials(self, spec: JobSpec, shares: Sequence[Share]) -> dict[str, NodeTrial]:
        keys = {share.node: self.key(spec, share) for share in shares}
        found = await self._store.get(NodeTrial, list(keys.values()))
        return {node: found[key] for node, key in keys.items() if key in found}

    async def _newest_joint(self, spec: JobSpec, shares: Sequence[Share]) -> JointTrial | JointFailure | None:
        """What was measured of exactly these nodes, or the newest trial that has all of them."""
        exact, wider = self.joint_key(spec, shares), self._member_key(spec, shares[0])
        measured = await self._store.get(JointTrial, [exact, wider])
        if exact in measured:
            return measured[exact]
        failed = await self._store.get(JointFailure, [exact, wider])
        found: list[JointTrial | JointFailure] = [*measured.values(), *failed.values()]
        names = {share.node for share in shares}
        return max((one for one in found if names <= set(one.nodes)), key=lambda one: one.at, default=None)

    async def keep(self, spec: JobSpec, shares: Sequence[Share], found: NodeTrial | JointTrial | JointFailure) -> None:
        """``shares``: the one of a node's trial, or all of a joint one."""
        if spec.snapshot is None:
            return
        keys = [self.key(spec, shares[0])]
        if not isinstance(found, NodeTrial):
            keys = [self.joint_key(spec, shares), *(self._member_key(spec, share) for share in shares)]
        await self._store.put(dict.fromkeys(keys, found), _now())

    async def knowledge(self, spec: JobSpec, known: Known) -> Knowledge:
        links = await self.links(list(known.trials))
        gradient_bytes = next(iter(known.trials.values())).gradient_bytes
        exchange = Exchange(gradient_bytes, known.joint, links)
        balance = Mode(spec.balance) if spec.balance else Mode.ADAPTIVE
        return Knowledge(known.trials, exchange, balance, known.others, can_join=known.can_join)

    async def links(self, nodes: Sequence[str]) -> dict[frozenset[str], Link]:
        """What ``ugro node bench`` has measured between these nodes; the slower direction counts."""
        return {
            frozenset((one.source, one.target)): Link(min(one.bytes_per_s, one.back_bytes_per_s), one.latency_s / 2)
            for one in await self._hardware.links(nodes)
            if one.bytes_per_s and one.back_bytes_per_s and one.latency_s is not None
        }

    async def predict(self, spec: JobSpec, placement: Placement) -> Prediction | None:
        """None if some of these nodes have not been measured with this training, or not together because that failed.

        Neither is there one if it does not exchange every step.
        """
        if spec.launcher is Launcher.COMMAND or spec.train_sync == SyncMode.LOCAL:
            return None
        known = await self.known(spec, placement.shares)
        if len(known.trials) < len(placement.shares) or not known.can_join:
            return None
        if any(trial.is_of_local for trial in known.trials.values()):
            return None
        return predict(placement.nodes, await self.knowledge(spec, known))

    async def memory(self, spec: JobSpec, placement: Placement) -> tuple[DeviceNeed, ...]:
        """Nothing if none of these nodes was measured with this training."""
        known = await self.known(spec, placement.shares)
        return self.needs(known.trials, placement.shares)

    def needs(self, trials: Mapping[str, NodeTrial], shares: Sequence[Share]) -> tuple[DeviceNeed, ...]:
        """What each device of these nodes needs, in each way to spread the model."""
        trial = next((one for one in trials.values() if one.size is not None), None)
        devices = self.devices(shares)
        if trial is None or trial.size is None or not devices:
            return ()
        return tuple(needs(trial.size, trial.global_batch, devices, can_accumulate=trial.can_accumulate))

    def devices(self, shares: Sequence[Share]) -> list[Device]:
        found: list[Device] = []
        for share in shares:
            node = self._cluster.inventory.find(node_of(share.node))
            facts = self._facts(node) if node is not None else None
            found += devices_of(share.node, share.gpus, facts) if facts is not None else []
        return found

    async def note(self, job: Job) -> None:
        """Remembers what is predicted of a job whose nodes are decided as it is submitted."""
        wanted = job.spec.resources
        if not wanted.only or wanted.min_nodes != len(wanted.only):
            return
        shares = [share for name in wanted.only if (share := self.whole(name, wanted)) is not None]
        if len(shares) == len(wanted.only):
            prediction = await self.predict(job.spec, Placement(tuple(shares)))
            if prediction is not None:
                await self._store.note(job.id, Forecast(prediction, _now()))

    async def of(self, job: int) -> Forecast | None:
        return await self._store.forecast(job)

    # --- keys ---------------------------------------------------------------------------------------------------

    def whole(self, name: str, wanted: Resources) -> Share | None:
        """What a job with these demands gets of an idle node, as far as a trial's key depends on it."""
        node = self._cluster.inventory.find(name)
        if node is None:
            return None
        facts = self._facts(node)
        gpus = tuple(gpu.index for gpu in facts.gpus if gpu.error is None) if facts else ()
        count = len(gpus) if wanted.gpus_per_node < 0 else wanted.gpus_per_node
        return Share(name, gpus[:count])

    def device(self, share: Share) -> str:
        """For people: ``2 × RTX 4070``, or the model of the processor."""
        node = self._cluster.inventory.find(node_of(share.node))
        facts = self._facts(node) if node is not None else None
        models = [gpu.model for gpu in facts.gpus if gpu.index in share.gpus] if facts else []
        if models:
            return models[0] if len(models) == 1 else f"{len(models)} × {models[0]}"
        machine = node.machine if node is not None else None
        return f"{machine.cpu_model}, {machine.cores} cores" if machine is not None else "a processor"

    def key(self, spec: JobSpec, share: Share) -> str:
        node = self._cluster.inventory.find(node_of(share.node))
        facts = self._facts(node) if node is not None else None
        machine = node.machine if node is not None else None
        driver = facts.gpu_driver if facts and share.gpus else None
        python = (machine.machine_id or machine.hostname, machine.python_path, machine.cores) if machine else ()
        return _hash("solo", that_counts(spec), share.node, self.device(share), len(share.gpus), driver, python)

    def joint_key(self, spec: JobSpec, shares: Sequence[Share]) -> str:
        return _hash("joint", spec.balance, *sorted(self.key(spec, share) for share in shares))

    def _member_key(self, spec: JobSpec, share: Share) -> str:
        """Of the newest joint trial that a node was part of."""
        return _hash("member", spec.balance, self.key(spec, share))


def that_counts(spec: JobSpec) -> JobSpec:
    """A job without what does not change how long its steps take."""
    wanted = spec.resources
    default = _DEFAULT
    return replace(
        spec,
        name="",
        argv=(spec.argv[0], *that_matter(spec.argv[1:])),
        resources=Resources(gpus_per_node=ANY_GPUS, cpus=wanted.cpus, memory_bytes=wanted.memory_bytes),
        priority=default.priority,
        is_preemptible=False,
        time_limit_s=None,
        after=After(),
        retry=default.retry,
        checkpoint=default.checkpoint,
        disconnect=default.disconnect,
        elastic=default.elastic,
        stop=default.stop,
        outputs=(),
        results=default.results,
        seed=None,
        inputs=(),
        is_cached=False,
        notify=(),
        balance=None,
        environment=None if spec.environment is None else replace(spec.environment, upgrade=False),
    )


def _hash(*parts: object) -> str:
    return hashlib.sha256(dumps(list(parts)).encode()).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

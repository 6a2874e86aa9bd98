"""The owner of a machine comes first: a real person at a real terminal, and jobs on real node programs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest

from tests.rig.engine import SOON_S, EngineRig, gated, in_loop, is_final, running, seen_soon, soon, submitted
from tests.rig.person import Person
from tests.rig.waiting import name_of, wait_until
from ugro.features.power.model import OwnerReport
from ugro.kernel.jobs.engine.reconciler import Engine
from ugro.kernel.jobs.model import Checkpoint, Ending, Job, JobSpec, JobState, Launcher, Resources, Stop
from ugro.kernel.jobs.scheduling.why import why
from ugro.kernel.store.database import Store
from ugro.kernel.support.moments import boot_clock_s

# It saves on SIGTERM, and goes on from what it saved.
SAVING = """
cd "$UGRO_CHECKPOINT_DIR"
trap 'echo saved > step_1.new; mv step_1.new step_1.pt; exit 143' TERM
echo "attempt $UGRO_ATTEMPT resumes from ${UGRO_RESUME_DIR:+$(ls "$UGRO_RESUME_DIR")}" >> "$LEDGER"
until [ -e "$LEDGER.go" ]; do sleep 0.05; done
"""
GANG = """
import os, time
with open(os.environ["LEDGER"], "a") as file:
    file.write(os.environ["UGRO_ATTEMPT"] + " " + os.environ["RANK"] + chr(10))
while not os.path.exists(os.environ["LEDGER"] + ".go"):
    time.sleep(0.05)
"""


class OwnedRig(EngineRig):
    """Its first node has an owner; all are this machine, and somebody must take the rest."""

    rule = "{when: active, then: pause, quiet: 1500ms}"
    owned: tuple[str, ...] = ("n1",)
    more = ""

    @property
    def dev(self) -> Path:
        """The terminals that count: others may be used while the test runs."""
        return self.folder / "dev"

    def _entry(self, name: str, root: str) -> str:
        env = f"env: {{UGRO_PRESENCE_DEV: {self.dev}}}"
        owner = f", owner: {self.rule}, {env}" if name in self.owned else ""
        return f"{super()._entry(name, root)[:-1]}{owner}{self.more}}}"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OwnedRig]:
    place = OwnedRig(tmp_path, 1)
    yield place
    place.end()


def saving(ledger: Path) -> JobSpec:
    return JobSpec(
        "saving",
        ("sh", "-c", SAVING),
        env=(("LEDGER", str(ledger)),),
        priority=90,
        checkpoint=Checkpoint(every_s=60.0),
        stop=Stop(grace_s=10.0),
    )


async def reason_to_wait(place: EngineRig, engine: Engine, job: Job) -> str:
    return why(await place.scheduler_input.take(engine.live), job.id, engine.live.queue).text


def test_a_job_makes_way_for_a_person_and_resumes_from_its_checkpoint_when_it_is_quiet(
    place: OwnedRig, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"

    async def work() -> None:
        async with place.agent() as (store, engine):
            job, _ = await running(store, await submitted(store, engine, saving(ledger)))
            async with somebody_who_types(place) as ann:
                job = await soon(store, job, lambda seen: seen.state is JobState.RECOVERING)
                assert job.reason.startswith("it made way for the owner of n1 (")
                assert "; it is tried again from its last checkpoint when there is room" in job.reason
                assert (job.tries.charged, job.tries.free) == (0, 0), "that costs no retry"
                assert ann.name in job.reason
                text = await reason_to_wait(place, engine, job)
                assert f"n1 is used by its owner ({user()} types on {ann.name})" in text, text
            job = await soon(store, job, lambda seen: seen.state is JobState.RUNNING)
            Path(f"{ledger}.go").touch()
            ended = await soon(store, job, is_final)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 2)
            told = [event.text for event in await store.jobs.events() if event.kind == "owner"]
            assert told[0].startswith("it is used by its owner (")
            assert told[-1].startswith("it was quiet for 1.50 s: its owner is gone")

    in_loop(work())
    assert ledger.read_text() == "attempt 1 resumes from \nattempt 2 resumes from step_1.pt\n"


@pytest.mark.proof
def test_an_owner_who_comes_again_and_again_ends_a_job_once_in_a_quiet_time(place: OwnedRig, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    place.rule = "{when: active, quiet: 6s}"
    place._write()

    async def work() -> None:
        async with place.agent() as (store, engine):
            job, _ = await running(store, await submitted(store, engine, saving(ledger)))
            with Person(place.dev):
                job = await soon(store, job, lambda seen: seen.state is JobState.RECOVERING)
            for _ in range(4):  # each before it was quiet
                began_s = boot_clock_s()
                with Person(place.dev):
                    await noticed(place, partial(_was_noticed_since, began_s))
                assert (await store.jobs.get(job.id)).state is JobState.RECOVERING
            await soon(store, job, lambda seen: seen.state is JobState.RUNNING)

    in_loop(work())
    assert len(ledger.read_text().splitlines()) == 2


async def node_of_another(store: Store, engine: Engine) -> str:
    """Where a job runs that is submitted now, and that is over when this returns."""
    spec = JobSpec("other", ("sleep", "600"))
    job, node = await running(store, await submitted(store, engine, spec, "other"))
    await store.jobs.ask_to_end(job.id, Ending.CANCELLED)
    engine.wake()
    await soon(store, job, is_final)
    return node


@pytest.mark.proof
def test_a_job_on_two_nodes_makes_way_as_a_whole_if_the_owner_of_one_comes(tmp_path: Path) -> None:
    place = OwnedRig(tmp_path, 2)
    place.more = f", python: {sys.executable}"
    place._write()
    script, ledger = tmp_path / "gang.py", tmp_path / "ledger"
    script.write_text(GANG)
    resources = Resources(min_nodes=2, max_nodes=2)
    env = (("LEDGER", str(ledger)),)
    spec = JobSpec("gang", (str(script),), Launcher.DDP, resources=resources, balance="off", env=env)

    async def work() -> None:
        async with place.agent() as (store, engine):
            job, _ = await running(store, await submitted(store, engine, spec))
            async with somebody_who_types(place):
                job = await soon(store, job, lambda seen: seen.state is JobState.RECOVERING)
                assert job.reason.startswith("it made way for the owner of n1 (")
                assert "n1 is used by its owner (" in await reason_to_wait(place, engine, job)
                assert await node_of_another(store, engine) == "n2", "it is free for others meanwhile"
            job = await soon(store, job, lambda seen: seen.state is JobState.RUNNING)
            Path(f"{ledger}.go").touch()
            ended = await soon(store, job, is_final)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 2)

    try:
        in_loop(work())
    finally:
        place.end()
    told = ledger.read_text().splitlines()
    assert sorted(told) in ([f"{one} {rank}" for one in (1, 2) for rank in (0, 1)], ["2 0", "2 1"])


@pytest.mark.proof
def test_the_next_agent_decides_the_same_and_a_drain_of_a_person_stays(place: OwnedRig, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def killed_agent() -> Job:
        async with place.agent() as (store, engine):
            job, _ = await running(store, await submitted(store, engine, saving(ledger)))
            with Person(place.dev):
                await soon(store, job, lambda seen: seen.state is JobState.RECOVERING)
            await store.drain("n1", "new fan")
            return await store.jobs.get(job.id)

    async def next_agent(job: Job) -> None:
        async with place.agent() as (store, engine):
            engine.wake()
            report = await noticed(place)
            assert report.idle_s is not None, "the node remembers who was there"
            assert "types on pts/" in (report.sign or "")
            await until_gone(place)
            engine.wake()
            [node] = (await place.scheduler_input.take(engine.live)).nodes
            assert node.unusable == "is drained: new fan"
            assert (await store.jobs.get(job.id)).state is JobState.RECOVERING
            await store.resume("n1")
            engine.wake()
            await soon(store, job, lambda seen: seen.state is JobState.RUNNING)

    job: list[Job] = []

    async def first() -> None:
        job.append(await killed_agent())

    in_loop(first())
    in_loop(next_agent(job[0]))


@pytest.mark.proof
def test_with_drain_running_jobs_continue_and_no_new_one_starts(tmp_path: Path) -> None:
    place = OwnedRig(tmp_path, 1)
    place.rule = "{when: active, then: drain, quiet: 1500ms}"
    place._write()
    gate = tmp_path / "gate"

    async def work() -> None:
        async with place.agent() as (store, engine):
            spec = JobSpec("long", ("sh", "-c", gated(gate)))
            job, _ = await running(store, await submitted(store, engine, spec))
            async with somebody_who_types(place):
                await until_noticed(place)
                later = await submitted(store, engine, spec, "later")
                gate.touch()
                ended = await soon(store, job, is_final)
                assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)
                assert (await store.jobs.get(later.id)).state is JobState.QUEUED
                assert "n1 is used by its owner" in await reason_to_wait(place, engine, later)
            assert (await soon(store, later, is_final)).state is JobState.SUCCEEDED

    try:
        in_loop(work())
    finally:
        place.end()


@pytest.mark.proof
def test_a_rule_that_is_taken_back_lets_jobs_start_at_once(place: OwnedRig, tmp_path: Path) -> None:
    async def work() -> None:
        place.rule = "{when: active, quiet: 1h}"
        place._write()
        async with place.agent() as (store, engine):
            with Person(place.dev):
                await until_noticed(place)
                job = await submitted(store, engine, JobSpec("short", ("true",)))
                assert "its owner" in await reason_to_wait(place, engine, job)
                link = _link(place)
                place.rule = "{when: never}"
                place._write()
                assert place.cluster is not None
                await place.cluster.look_again()
                engine.wake()
                assert (await soon(store, job, is_final)).state is JobState.SUCCEEDED
                assert _link(place) is link, "a rule is no reason for a new connection"

    in_loop(work())


@pytest.mark.proof
def test_a_node_that_was_away_says_first_whether_somebody_uses_it(place: OwnedRig, tmp_path: Path) -> None:
    place.rule = "{when: active, quiet: 1h}"
    place._write()
    ledger = tmp_path / "ledger"

    async def work() -> None:
        async with place.agent() as (store, engine):
            await until_gone(place)
            place.cut("n1")
            await noticed(place, lambda report: not report.is_known)
            job = await submitted(store, engine, JobSpec("job", ("touch", str(ledger))))
            with Person(place.dev):
                place.heal("n1")
                await until_noticed(place)
                assert "n1 is used by its owner" in await reason_to_wait(place, engine, job)
                assert (await store.jobs.get(job.id)).state is JobState.QUEUED

    in_loop(work())
    assert not ledger.exists()


@pytest.mark.proof
def test_with_shrink_a_job_without_gpus_leaves_cores_to_the_owner(place: OwnedRig) -> None:
    place.rule = "{when: active, then: shrink, quiet: 1500ms}"
    place._write()

    async def work() -> None:
        async with place.agent() as (store, engine):
            job, _ = await running(store, await submitted(store, engine, JobSpec("long", ("sleep", "7790"))))
            [pid] = [pid for pid in place.processes() if name_of(pid) == "sleep"]
            every = os.sched_getaffinity(pid)
            async with somebody_who_types(place):
                few = max(1, len(every) // 10)
                await seen_soon(lambda: len(os.sched_getaffinity(pid)) == few, "the job to keep a few cores")
            await seen_soon(lambda: os.sched_getaffinity(pid) == every, "the job to have its cores again")
            assert (await store.jobs.get(job.id)).attempt == 1
            texts: list[str] = []
            async with asyncio.timeout(SOON_S):
                while len(texts) < 2:  # they are recorded after it is done
                    texts = [event.text for event in await store.jobs.events(job=job.id) if event.kind == "owner"]
            assert texts == [
                "the owner of n1 is there: it takes 10% of the cores there",
                "it may take all of the cores on n1 again",
            ]

    in_loop(work())


TRAINING = """
import time, torch, ugro.train as ut
run = ut.init(seed=1)
model = run.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.keep(model=model, optimizer=optimizer)
data = torch.utils.data.TensorDataset(torch.randn(4000, 4), torch.randn(4000, 1))
loader = run.loader(data, global_batch=40)
for epoch in run.epochs(1000):
    for x, y in loader:
        with run.step() as step:
            loss = step.loss(torch.nn.functional.mse_loss(model(x), y))
            step.backward(loss)
            optimizer.step(); optimizer.zero_grad()
        time.sleep(0.05)
"""


@pytest.mark.proof
def test_with_shrink_a_training_takes_little_of_the_machine_until_its_owner_is_gone(tmp_path: Path) -> None:
    place = OwnedRig(tmp_path, 2)
    place.rule = "{when: active, then: shrink, quiet: 3s}"
    place.more = f", python: {sys.executable}"
    place._write()
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    resources = Resources(min_nodes=2, max_nodes=2)
    spec = JobSpec("train", (str(script),), Launcher.DDP, resources=resources, balance="off")

    async def work() -> None:
        async with place.agent() as (store, engine):
            job, _ = await running(store, await submitted(store, engine, spec))
            await asyncio.to_thread(wait_until, lambda: shares(place) == [[20, 20]], 90, "the first plan")
            async with somebody_who_types(place):
                await seen_soon(lambda: [2, 38] in shares(place), "a plan that leaves n1 little")
            await seen_soon(lambda: shares(place)[-1] == [20, 20], "equal shares again")
            assert (await store.jobs.get(job.id)).attempt == 1

    try:
        in_loop(work())
    finally:
        place.end()


def shares(place: EngineRig) -> list[list[int]]:
    """Of all plans until now."""
    found = []
    for path in place.folder.glob("n*/.ugro/agents/*/runs/*/output/metrics.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found += [one["shares"]] if (one := json.loads(line))["kind"] == "plan" else []
    return found


@contextlib.asynccontextmanager
async def somebody_who_types(place: OwnedRig) -> AsyncIterator[Person]:
    async def go_on(person: Person) -> None:
        while True:
            person.go_on()
            await asyncio.sleep(0.1)

    with Person(place.dev) as person:
        typing = asyncio.create_task(go_on(person))
        try:
            yield person
        finally:
            typing.cancel()
            await asyncio.wait([typing])


def user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _was_noticed_since(began_s: float, report: OwnerReport) -> bool:
    return report.idle_s is not None and boot_clock_s() - report.idle_s >= began_s


def _link(place: EngineRig) -> object:
    assert place.cluster is not None
    return place.cluster.inventory.get("n1").link


async def noticed(place: EngineRig, is_so: Callable[[OwnerReport], bool] = attrgetter("is_known")) -> OwnerReport:
    async with asyncio.timeout(SOON_S):
        while True:
            report = place.scheduler_input.owners.report("n1")
            if report is not None and is_so(report):
                return report
            await asyncio.sleep(0.02)


async def until_noticed(place: EngineRig) -> None:
    await noticed(place, lambda report: report.is_there)


async def until_gone(place: EngineRig) -> None:
    await noticed(place, lambda report: report.is_known and not report.is_there)

"""What other tests ask the store for only through an agent, asked of the store itself: on both engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rig.stores import in_store, sql
from tests.unit.policy.ray.clusters import cluster
from tests.unit.policy.serving.places import service
from ugro.features.alerts.model import Alert, Severity
from ugro.features.environments.model import Blob
from ugro.features.environments.store import EnvFiles, Resolution
from ugro.features.power.model import PowerRecord, PowerState
from ugro.features.power.node.wake import Interface
from ugro.features.power.store import Known
from ugro.features.ray.model import ClusterState
from ugro.features.retention.store import Due
from ugro.features.safe_mode.rules import Cancel, Settle, Take
from ugro.features.services.model import Service, ServiceState
from ugro.features.services.store import MOST_ENDED
from ugro.features.sweeps.model import Budget
from ugro.features.sweeps.store import NewSweep
from ugro.kernel.access.model import AuditEntry
from ugro.kernel.agent.rules import Memory
from ugro.kernel.jobs.model import After, Ending, Environment, Job, JobSpec, JobState, Placement, Share
from ugro.kernel.jobs.moves import SmallLog, StaleMove
from ugro.kernel.jobs.rows import Listed
from ugro.kernel.store.database import Store
from ugro.kernel.store.standing import Decision
from ugro.kernel.support import moments as clock
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError

SPEC = JobSpec("Train-ü", ("true",))
GPU = Placement((Share("gpu1", gpus=(0,)),))


async def ended(store: Store, key: str, placement: Placement = GPU) -> Job:
    job = (await store.jobs.submit(SPEC, "Ann", key)).job
    started = await store.jobs.start(job, placement, "it fits")
    running = await store.jobs.move(started, JobState.RUNNING, "runs")
    return await store.jobs.finish(running, SmallLog(job.id, 1, ((0, b"\0out\xff"),)))


def test_the_store_is_where_the_test_says(tmp_path: Path, engine: str) -> None:
    async def work(store: Store) -> None:
        assert store.name.startswith("postgresql://") is (engine == "postgres")

    in_store(tmp_path, work)


def test_pages_of_jobs_counts_and_ends(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        done = await ended(store, "1")
        waits = (await store.jobs.submit(replace(SPEC, name="other"), "bob", "2")).job
        page = store.listing.page
        assert [job.id for job in await page(Listed())] == [waits.id, done.id]
        assert [job.id for job in await page(Listed(text="TRAIN"))] == [done.id]
        assert [job.id for job in await page(Listed(text="bo"))] == [waits.id]
        assert [job.id for job in await page(Listed(states=(JobState.QUEUED,), before=99, after=0))] == [waits.id]
        assert await store.listing.counts() == {JobState.SUCCEEDED: 1, JobState.QUEUED: 1}
        assert (await store.listing.newest_happened(1))[0].name == "other"
        [end] = await store.ends.after(0)
        assert (end.job, end.state, end.has_notify, end.lasted_s is not None) == (done.id, "succeeded", False, True)
        log, _ = await store.jobs.small_log(done.id) or (None, "")
        assert log == SmallLog(done.id, 1, ((0, b"\0out\xff"),))
        assert await store.jobs.states_of([]) == {}
        assert (await store.jobs.find("last")).id == waits.id
        assert (await store.jobs.find("Train-ü", without=[99])).id == done.id

    in_store(tmp_path, work)


def test_alerts_audit_code_environments_and_drains(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        alert = Alert("hot", "gpu1", Severity.WARNING, "85 °C", 1.5, 2.5, 3.5, Severity.CRITICAL)
        await store.alerts.record([alert], [])
        assert await store.alerts.on() == {alert.key: alert}
        assert await store.alerts.notified_until() == 0
        entries = [AuditEntry(f"2026-01-0{day}", user, "cli", "run", "1", "done") for day, user in ((1, "a"), (2, "b"))]
        await store.audit.add(entries)
        assert await store.audit.newest(5, user="b") == entries[1:], "a column, not the login of the database"
        assert await store.audit.remove("2026-01-02", 10) == 1
        await store.code.sent("gpu1", "/one", "aaa")
        await store.code.sent("gpu1", "/two", "bbb")
        assert [await store.code.last("gpu1", folder) for folder in ("/one", "/two", "/three")] == ["aaa", "bbb", "bbb"]
        job = await ended(store, "1")
        found = Environment("3.11", "/usr/bin/python3", "x86_64")
        await store.environments.record(job.id, 1, {"gpu1": found, "gpu2": found})
        assert set(await store.environments.of(job.id, 1)) == {"gpu1", "gpu2"}
        await store.drain("gpu1", "fan")
        assert await store.drained() == {"gpu1": "fan"}

    in_store(tmp_path, work)


def test_the_decision_that_ends_safe_mode(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        jobs = store.jobs
        one, two = [(await jobs.submit(SPEC, "ann", key)).job for key in ("1", "2")]
        await jobs.start(one, GPU, "fits")
        taken = replace(one, id=70, attempt=2, placement=GPU, submit_key="2", state=JobState.RUNNING)
        changes = (Settle(one.id, 1, JobState.FAILED, "over"), Take(taken, None, ("gpu1",)), Cancel(two.id))
        changed = await jobs.standing.decide(Decision(changes, 9, 500, False, "adopted"))
        assert {job.id for job in changed} >= {1, 2, 70}
        assert (await jobs.get(70)).state is JobState.RUNNING
        assert (await jobs.get(two.id)).ending is Ending.CANCELLED
        numbers = await jobs.standing.numbers()
        assert (numbers.generation, numbers.highest, numbers.gaps) == (9, 500, ((3, 500),))
        assert (await jobs.submit(SPEC, "ann", "3")).job.id == 501

    in_store(tmp_path, work)


def test_many_changes_at_once_fail_each_alone(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        jobs = [(await store.jobs.submit(SPEC, "ann", str(number))).job for number in range(4)]
        outcomes = await store.jobs.start_many([(job, GPU, "fits") for job in jobs])
        assert [isinstance(outcome, Job) for outcome in outcomes] == [True, False, False, False]
        alone = await asyncio.gather(
            *(store.jobs.move(job, JobState.CANCELLED, "no") for job in jobs), return_exceptions=True
        )
        assert [isinstance(outcome, Job) for outcome in alone] == [False, True, True, True]
        assert len(sql(tmp_path / "state.db", "SELECT * FROM held_devices")) == 1

    in_store(tmp_path, work)


def test_ray_clusters_have_one_name_at_a_time(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        wanted = cluster(2)
        first = await store.ray_clusters.add(wanted)
        with pytest.raises(NotAllowed):
            await store.ray_clusters.add(wanted)
        await store.ray_clusters.put(replace(first, state=ClusterState.ENDED))
        second = await store.ray_clusters.add(wanted)
        assert [one.id for one in await store.ray_clusters.newest(5)] == [second.id, first.id] == [2, 1]

    in_store(tmp_path, work)


def test_private_sweeps_are_found_by_their_user_alone(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        # A lone surrogate is JSON for Python, and not for PostgreSQL.
        spec = JobSpec("x", ("x",), env=(("A", '"private":true \ud800'),))
        new = NewSweep("k1", "hunt", "bob", "{}", dumps(spec), Budget())
        bobs = await store.sweeps.create(new)
        hidden = dumps(replace(spec, private=True))
        anns = await store.sweeps.create(replace(new, key="k2", user="ann", spec=hidden))
        named = await store.sweeps.create(replace(new, key="k3", name="merger", user="ann", spec=hidden))
        old = await store.sweeps.create(replace(new, key="k4", name="old", spec='{"name":"x"}'))
        seen = {None: (anns, old), "ann": (anns, old), "bob": (bobs, old), "eve": (bobs, old)}
        for viewer, expected in seen.items():
            assert tuple([await store.sweeps.find(word, viewer) for word in ("hunt", "last")]) == expected, viewer
        assert await store.sweeps.find(str(named.id), "ann") == named
        for word in ("merger", "merge", str(named.id)):
            with pytest.raises(NotFound) as missing:
                await store.sweeps.find(word, "bob")
            assert missing.value.hint == "see: ugro sweep ls"

    in_store(tmp_path, work)


def test_a_gpu_has_one_holder_through_whichever_login_and_logins_are_remembered(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        ann, bob = [(await store.jobs.submit(SPEC, user, user)).job for user in ("ann", "bob")]
        await store.jobs.start(ann, Placement((Share("ann@gpu1", gpus=(0,)),)), "it fits")
        for name in ("gpu1", "bob@gpu1"):
            with pytest.raises(UgroError, match="held_devices"):
                await store.jobs.start(bob, Placement((Share(name, gpus=(0,)),)), "it does not")
        await store.jobs.start(bob, Placement((Share("bob@gpu1", gpus=(1,)),)), "it fits")
        assert await store.logins.all() == {"ann@gpu1": False, "bob@gpu1": False}
        await store.logins.clear("ann@gpu1")
        assert await store.logins.all() == {"ann@gpu1": False, "bob@gpu1": False}, "a job holds something there"
        await store.jobs.move(await store.jobs.get(ann.id), JobState.STOPPING, "enough")
        await store.jobs.move(await store.jobs.get(ann.id), JobState.CANCELLED, "enough", exit_code=130)
        await store.logins.clear("ann@gpu1")
        assert await store.logins.all() == {"ann@gpu1": True, "bob@gpu1": False}
        again = (await store.jobs.submit(SPEC, "ann", "again")).job
        await store.jobs.start(again, Placement((Share("ann@gpu1", gpus=(0,)),)), "it fits")
        assert await store.logins.all() == {"ann@gpu1": False, "bob@gpu1": False}

    in_store(tmp_path, work)


def test_a_drained_node_takes_no_job_through_a_login(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        job = (await store.jobs.submit(SPEC, "ann", "1")).job
        await store.drain("gpu1", "new fans")
        with pytest.raises(StaleMove, match="gpu1 was drained"):
            await store.jobs.start(job, Placement((Share("ann@gpu1"),)), "it fits")

    in_store(tmp_path, work)


def test_services_have_one_name_at_a_time_and_are_changed_whole(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        first = await store.services.add(replace(service(), request_key="one"))
        assert await store.services.add(replace(service(), request_key="one")) == first, "the same request again"
        with pytest.raises(NotAllowed, match="there is a service"):
            await store.services.add(replace(service(), request_key="two"))
        assert await store.services.find(first.name) == await store.services.find(str(first.id)) == first
        with pytest.raises(NotFound, match="there is no service 'xyz'"):
            await store.services.find("xyz")
        with pytest.raises(NotAllowed):
            await store.services.change(first.id, refuse)
        assert await store.services.get(first.id) == first
        ended = await store.services.change(first.id, lambda one: replace(one, state=ServiceState.ENDED))
        assert (await store.services.open(), await store.services.is_taken(first.name)) == ([], False)
        second = await store.services.add(replace(service(), request_key="two"))
        assert await store.services.newest(9) == [second, ended]
        assert await store.services.find(first.name) == second, "the one that has not ended"
        assert await store.services.requested("two") == second
        assert await store.services.specs() == [one.job for one in second.revisions]

    in_store(tmp_path, work)


def refuse(service: Service) -> Service:
    raise NotAllowed("not now")


def test_of_services_that_have_ended_the_newest_are_kept(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        for number in range(MOST_ENDED + 2):
            made = await store.services.add(replace(service(), request_key=str(number)))
            await store.services.change(made.id, lambda one: replace(one, state=ServiceState.ENDED))
        await store.services.add(replace(service(), request_key="last"))
        kept = [one.request_key for one in await store.services.newest(1000)]
        assert kept == ["last", *(str(number) for number in range(MOST_ENDED + 1, 1, -1))]

    in_store(tmp_path, work)


def test_a_node_that_sleeps_is_known_with_what_it_was(tmp_path: Path) -> None:
    asleep = PowerRecord(PowerState.ASLEEP, clock.now(), "idle", jobs=(1, 2))
    known = Known(interface=Interface("eth0", "aa:bb:cc:dd:ee:ff", "10.0.0.1", "10.0.0.255"))

    async def work(store: Store) -> None:
        awake = replace(asleep, state=PowerState.AWAKE)
        await store.power.learn("gpu1", awake, known)
        await store.power.learn("gpu1", asleep, Known())
        assert await store.power.all() == {"gpu1": (awake, known)}, "what is not known now stays"
        await store.power.put("gpu1", asleep, "suspended: idle ü")
        await store.power.put("gpu2", awake, "awake")
        assert await store.power.all() == {"gpu1": (asleep, known), "gpu2": (awake, Known())}
        told = [(event.node, event.text) for event in await store.jobs.newest_events(9) if event.kind == "power"]
        assert sorted(told) == [("gpu1", "suspended: idle ü"), ("gpu2", "awake")]
        await store.power.forget("gpu1")
        sql(tmp_path / "state.db", "UPDATE node_power SET record = '{}'")
        assert await store.power.all() == {}, "of another version"

    in_store(tmp_path, work)


def test_the_clock_is_remembered_and_an_idle_agent_has_changed_nothing(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        assert await store.clock.read() is None
        before, memory = store.changes, Memory(clock.now())
        for one in (Memory(replace(memory.seen, wall_s=1.5)), memory):
            await store.clock.write(one)
        assert (await store.clock.read(), store.changes) == (memory, before)

    in_store(tmp_path, work)


def test_an_environment_with_an_odd_name_keeps_no_resolution_from_being_removed(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        envs = store.python_envs
        assert await envs.resolution("a") is None
        for name in ("used", "unused", "on a node"):
            await envs.keep_resolution(f"for {name}", Resolution(name, "tiny==1"))
            await envs.keep_files(name, EnvFiles("00", Blob("uv", "00", 1)))
        job = await ended(store, "1")
        # As a node may report them: a lone surrogate, and the character 0, which PostgreSQL takes for no JSON.
        found = {str(number): Environment("3.11", path, "x") for number, path in enumerate(["\ud800", "\0", "/py"])}
        named = Environment("3.11", "/py", "x", name="used")
        await store.environments.record(job.id, 1, {**found, "gpu1": named})
        sql(tmp_path / "state.db", "INSERT INTO environments (hash, content) VALUES ('0', 'not JSON'), ('1', '[]')")
        assert not await envs.has_unused("2020-01-01")
        assert await envs.has_unused("2999-01-01")
        assert await envs.remove_unused("2999-01-01", ["on a node"], 10) == 1
        assert await envs.resolution("for unused") is None
        assert await envs.files("unused") is None
        assert await envs.resolution("for used") == Resolution("used", "tiny==1")
        assert await envs.files("on a node") == EnvFiles("00", Blob("uv", "00", 1))

    in_store(tmp_path, work)


def test_what_is_to_be_removed_is_announced_and_goes_with_all_its_rows(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        old, noted, source = [await ended(store, str(number)) for number in range(3)]
        await store.notes.change(noted.id, lambda note: replace(note, text="the baseline"))
        after = replace(SPEC, after=After(ok=(source.id,)))
        await store.jobs.submit(after, "ann", "later")
        everything = "2999-01-01T00:00:00+00:00"
        found = await store.retention.ended(everything, 0, 10)
        assert [(one.id, one.state, one.has_note) for one in found] == [
            (old.id, "succeeded", False), (noted.id, "succeeded", True), (source.id, "succeeded", False),
        ]  # fmt: skip
        assert await store.retention.ended("2020-01-01", 0, 10) == []
        assert await store.retention.first_kept(2) == noted.id
        assert await store.retention.followed() == {source.id}
        due = [Due(one.id, "job") for one in (old, noted, source)]
        await store.retention.announce(due, 100.0, everything, "soon")
        assert await store.retention.ended(everything, 0, 10) == [], "they are announced"
        await store.retention.postpone(noted.id, 200.0)
        assert await store.retention.due(150.0, 10) == [due[0], due[2]]
        gone = await store.retention.remove([one.job for one in due], everything, lambda ids: f"removed {len(ids)}")
        assert gone == [old.id]
        await store.retention.withdraw([one.job for one in due])
        assert await store.retention.due(999.0, 10) == []
        assert sql(tmp_path / "state.db", f"SELECT COUNT(*) FROM attempts WHERE job = {old.id}")[0][0] == 0
        assert "removed 1" in [event.text for event in await store.jobs.newest_events(1)]
        assert await store.retention.remove_events("2999-02-01", 100) == 2
        assert await store.retention.trim_events(2, 100) > 0

    in_store(tmp_path, work)

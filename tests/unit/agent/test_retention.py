"""Retention on a real database and real folders: what is announced, when it goes, and what stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.rig.stores import sql, store_at
from ugro.features.environments.model import Blob
from ugro.features.environments.store import EnvFiles, Resolution
from ugro.features.retention.config import RetentionSection as Settings
from ugro.features.retention.service import Limits, Retention
from ugro.kernel.access.model import AuditEntry
from ugro.kernel.files.results.job_folder import delete_results
from ugro.kernel.jobs.model import After, Environment, Job, JobSpec, JobState
from ugro.kernel.store.database import Store
from ugro.kernel.support import moments as clock
from ugro.kernel.support.errors import NotFound
from ugro.kernel.support.moments import Instant
from ugro.kernel.telemetry.metricstore import MetricStore

DAY_S = 86400.0


@dataclass
class Remover:
    """Removes results at home; a node that is away makes it fail."""

    folder: Path
    store: Store
    problems: tuple[str, ...] = ()
    removed: list[int] = field(default_factory=list)

    async def remove(self, job: Job, reason: str) -> tuple[str, ...]:
        await self.store.jobs.note_results_removed(job, reason)
        delete_results(self.folder / str(job.id))
        self.removed.append(job.id)
        return self.problems

    async def remove_left(self, job: Job) -> tuple[str, ...]:
        self.removed.append(job.id)
        if not self.problems:
            for record in (self.folder / str(job.id)).glob("attempt_*/.mirror/*.json"):
                record.unlink()
        return self.problems


@dataclass
class World:
    folder: Path
    store: Store
    remover: Remover
    retention: Retention
    settings: Settings = field(default_factory=lambda: Settings(jobs=90 * DAY_S, keep=0, notice=DAY_S))
    now: Instant = field(default_factory=clock.now)
    may_remove: bool = True
    gone: list[list[int]] = field(default_factory=list)  # the jobs that were removed together
    kept_environments: tuple[str, ...] = ()

    async def kept(self) -> tuple[str, ...]:
        return self.kept_environments

    async def ended(self, count: int, state: JobState = JobState.CANCELLED) -> list[int]:
        return [(await self.job(state)).id for _ in range(count)]

    async def job(self, state: JobState | None, **spec: object) -> Job:
        made = replace(JobSpec("job", ("true",)), **spec)  # type: ignore[arg-type]
        newest = await self.store.jobs.newest(1)
        job = (await self.store.jobs.submit(made, "ann", f"key {newest[0].id if newest else 0}")).job
        return job if state is None else await self.store.jobs.move(job, state, "test")

    async def after(self, days: float) -> None:
        await self.retention.look(self.at(days))

    def at(self, days: float, wall_by_s: float = 0.0) -> Instant:
        passed_s = days * DAY_S
        return replace(self.now, wall_s=self.now.wall_s + passed_s + wall_by_s, boot_s=self.now.boot_s + passed_s)

    async def there(self) -> list[int]:
        return sorted(job.id for job in await self.store.jobs.newest(1000))

    async def announced(self) -> list[str]:
        newest = await self.store.jobs.newest_events(200)
        return [event.text for event in reversed(newest) if event.kind == "retention"]

    def results_of(self, job: int) -> Path:
        path = self.folder / str(job) / "attempt_1" / "output" / "model.pt"
        path.parent.mkdir(parents=True)
        path.write_text("weights")
        return path


def run(tmp_path: Path, work: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        store, metrics = store_at(tmp_path / "state.db"), MetricStore(tmp_path / "metrics.db")
        await store.open()
        await metrics.open()
        folder = tmp_path / "jobs"
        remover = Remover(folder, store)
        limits = Limits(
            may_remove=lambda: world.may_remove,
            is_paused=lambda: False,
            kept_environments=lambda: world.kept(),
            on_removed=lambda jobs: world.gone.append(list(jobs)),
        )
        retention = Retention(folder, store, metrics, remover, lambda: world.settings, limits)
        retention.pause_s = 0.0
        world = World(folder, store, remover, retention)
        try:
            await work(world)
        finally:
            await metrics.close()
            await store.close()

    asyncio.run(main())


def test_what_goes_is_announced_first_with_its_names_and_its_time(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        jobs = await world.ended(3)
        await world.after(89)
        assert await world.announced() == []
        await world.after(91)
        [text] = await world.announced()
        assert text.startswith("3 jobs (1-3) are removed after 20")
        assert text.endswith("UTC: ended more than 90d ago (retention.jobs); to keep one: ugro note JOB TEXT")
        assert await world.there() == jobs, "announced, and still there"
        await world.after(91.9)
        assert await world.there() == jobs
        await world.after(92.1)
        assert await world.there() == []
        assert (await world.announced())[-1] == "removed as announced: 3 jobs (1-3)"

    run(tmp_path, work)


def test_a_removed_job_leaves_nothing_behind_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        [job] = await world.ended(1)
        folder = world.folder / str(job)
        (folder / "attempt_1" / "logs").mkdir(parents=True)
        await world.after(91)
        await world.after(93)
        assert [one for jobs in world.gone for one in jobs] == [job]
        assert not folder.exists()
        with pytest.raises(NotFound):
            await world.store.jobs.get(job)
        assert [event for event in await world.store.jobs.events() if event.job == job] == []
        assert (await world.job(None)).id == job + 1

    run(tmp_path, work)


def test_jobs_that_have_not_ended_stay_and_so_does_what_they_run_after(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        first, second = await world.ended(2, JobState.SUCCEEDED)
        waits = await world.job(None, after=After(ok=(first,)))
        await world.after(91)
        await world.after(200)
        assert await world.there() == [first, waits.id]
        await world.store.jobs.move(waits, JobState.CANCELLED, "test")
        await world.after(300)
        await world.after(302)
        assert await world.there() == []
        assert second not in await world.there()

    run(tmp_path, work)


def test_what_a_job_left_on_its_nodes_is_announced_and_goes_and_its_results_stay(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        [job] = await world.ended(1)
        result = world.results_of(job)
        record = result.parent.parent / ".mirror" / "n1.json"
        record.parent.mkdir()
        record.write_text('{"files": 1, "bytes": 7, "left_count": 2}')
        await world.after(31)
        [text] = await world.announced()
        assert text.startswith("the files left on nodes by 1 job (1) are removed after 20")
        assert "(retention.kept)" in text
        world.remover.problems = ("results on n1 could not be removed: away",)
        await world.after(32.1)
        assert record.exists(), "the node is away: tried again in an hour"
        world.remover.problems = ()
        await world.after(32.2)
        assert not record.exists()
        await world.after(200)
        assert (world.remover.removed, result.read_text()) == ([job, job], "weights")

    run(tmp_path, work)


def test_a_note_that_is_written_after_the_announcement_keeps_the_job(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        jobs = await world.ended(3)
        await world.after(91)
        await world.store.notes.change(jobs[0], lambda note: replace(note, text="the baseline"))
        await world.store.notes.change(jobs[1], lambda note: replace(note, tags=("paper",)))
        await world.after(93)
        assert await world.there() == jobs[:2]
        await world.store.notes.change(jobs[0], lambda note: replace(note, text=""))
        await world.after(94)
        assert await world.there() == jobs[:2], "announced again before it goes"
        await world.after(96)
        assert await world.there() == [jobs[1]]

    run(tmp_path, work)


def test_the_newest_stay_and_jobs_that_have_not_ended_do_not_count_among_them(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        world.settings = replace(world.settings, keep=2)
        jobs = await world.ended(4)
        waits = await world.job(None)
        await world.after(91)
        await world.after(93)
        assert await world.there() == [*jobs[2:], waits.id]

    run(tmp_path, work)


def test_results_and_the_jobs_that_made_them_stay_by_default(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        world.settings = replace(Settings(), keep=0)
        made, plain = await world.ended(2, JobState.SUCCEEDED)
        path = world.results_of(made)
        await world.after(1000)
        await world.after(2000)
        assert await world.there() == [made]
        assert path.read_text() == "weights"
        assert plain not in await world.there()

    run(tmp_path, work)


def test_results_go_by_their_own_rule_then_the_job_by_its(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        world.settings = replace(world.settings, results=30 * DAY_S)
        [made] = await world.ended(1, JobState.SUCCEEDED)
        path = world.results_of(made)
        await world.after(31)
        assert (await world.announced())[-1].startswith("the results of 1 job (1) are removed after ")
        assert path.exists()
        await world.after(33)
        assert not path.exists()
        assert (await world.store.jobs.get(made)).results_removed_at is not None
        await world.after(91)
        await world.after(93)
        assert await world.there() == []

    run(tmp_path, work)


def test_results_on_a_node_that_is_away_are_tried_again(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        world.settings = replace(world.settings, results=30 * DAY_S)
        world.remover.problems = ("results on gpu1 could not be removed: unreachable",)
        [made] = await world.ended(1, JobState.SUCCEEDED)
        world.results_of(made)
        await world.after(31)
        await world.after(33)
        assert world.remover.removed == [made]
        world.remover.problems = ()
        world.results_of(made)
        await world.after(33.1)
        assert world.remover.removed == [made, made]
        await world.after(34)
        assert world.remover.removed == [made, made]

    run(tmp_path, work)


def test_with_jobs_null_nothing_goes(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        world.settings = replace(world.settings, jobs=None)
        jobs = await world.ended(2)
        await world.after(10_000)
        await world.after(20_000)
        assert await world.there() == jobs
        assert await world.announced() == []

    run(tmp_path, work)


def test_a_rule_that_is_taken_back_after_the_announcement_keeps_all(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        jobs = await world.ended(2)
        await world.after(91)
        world.settings = replace(world.settings, jobs=None)
        await world.after(93)
        assert await world.there() == jobs

    run(tmp_path, work)


def test_a_job_that_was_submitted_to_run_after_a_due_one_keeps_it(tmp_path: Path) -> None:
    """Asked of the database at the removal itself: nothing can come between."""

    async def work(world: World) -> None:
        first, second = await world.ended(2, JobState.SUCCEEDED)
        await world.job(None, after=After(any=(first,)))
        at = "2026-01-01T00:00:00.000+00:00"
        assert await world.store.retention.remove([first, second], at, lambda jobs: f"removed {jobs}") == [second]
        assert (await world.announced())[-1] == f"removed [{second}]", "only what is gone is named"
        with pytest.raises(NotFound, match=f"there is no job {second} to run after"):
            await world.job(None, after=After(ok=(second,)))

    run(tmp_path, work)


def test_a_crash_between_record_and_folder_leaves_no_folder(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        [job] = await world.ended(1)
        (world.folder / str(job) / "attempt_1" / "logs").mkdir(parents=True)
        await world.after(91)
        await world.store.retention.remove([job], "2026-01-01T00:00:00.000+00:00", str)
        assert (world.folder / str(job)).exists()
        await world.after(93)
        assert not (world.folder / str(job)).exists()

    run(tmp_path, work)


def test_old_events_without_a_job_go_too(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        await world.store.jobs.note("alert-started", "gpu1 is hot", node="gpu1")
        await world.after(89)
        assert [event.kind for event in await world.store.jobs.events()] == ["alert-started"]
        await world.after(91)
        assert await world.store.jobs.events() == []

    run(tmp_path, work)


def test_entries_of_the_audit_log_go_after_their_own_time(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        await world.store.audit.add([AuditEntry(world.now.at, "ann", "pid 1", "cancel", "7", "done")] * 700)
        await world.after(364)
        assert len(await world.store.audit.newest(1000)) == 700
        world.settings = replace(world.settings, audit=None)
        await world.after(4000)
        assert len(await world.store.audit.newest(1000)) == 700, "null keeps them"
        world.settings = replace(world.settings, audit=365 * DAY_S)
        await world.after(366)
        assert await world.store.audit.newest(1000) == []

    run(tmp_path, work)


def test_a_job_that_never_ends_does_not_fill_the_disk_with_events(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        job = await world.job(None)
        other = await world.job(None)
        for number in range(300):
            await world.store.jobs.note("node", f"news {number}", job=job)
        while await world.store.retention.trim_events(250, 20):
            pass
        texts = [event.text for event in await world.store.jobs.events(limit=1000) if event.job == job.id]
        assert len(texts) == 250
        assert (texts[-1], "news 50" in texts, "news 110" in texts) == ("news 299", True, False)
        assert [event.job for event in await world.store.jobs.events(limit=1000)].count(other.id) == 1

    run(tmp_path, work)


@pytest.mark.proof
def test_thousands_are_removed_in_small_steps(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        waiting = [(JobSpec("job", ("true",)), "ann", str(number)) for number in range(1200)]
        for submission in await submitted(world.store, waiting):
            await world.store.jobs.move(submission, JobState.CANCELLED, "test")
        await world.after(91)
        assert len(await world.announced()) == 3
        await world.after(93)
        steps = [len(jobs) for jobs in world.gone]
        assert (sum(steps), max(steps)) == (1200, 20)

    run(tmp_path, work)


async def submitted(store: Store, wanted: Iterable[tuple[JobSpec, str, str]]) -> list[Job]:
    return [(await store.jobs.submit(spec, user, key)).job for spec, user, key in wanted]


def test_while_the_clock_cannot_be_believed_nothing_is_announced_or_removed(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        [job] = await world.ended(1)
        world.may_remove = False
        await world.after(3650)
        await world.after(3660)
        assert await world.there() == [job]
        assert await world.announced() == []
        world.may_remove = True
        await world.after(3660)
        assert len(await world.announced()) == 1

    run(tmp_path, work)


def test_a_job_that_ended_while_the_clock_was_years_behind_is_not_old_when_it_is_set(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        await world.ended(1)
        await world.retention.look(world.at(1, wall_by_s=10 * 365 * DAY_S))
        assert await world.announced() == []
        await world.retention.look(world.at(91, wall_by_s=10 * 365 * DAY_S))
        assert len(await world.announced()) == 1

    run(tmp_path, work)


def test_a_resolution_goes_when_no_job_no_node_and_no_request_needs_it(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        envs = world.store.python_envs
        for name in ("nobody's", "a job's", "a node's"):
            await envs.keep_resolution(f"request for {name}", Resolution(name, "tiny==1.2"))
            for key in (name, f"request for {name}/{name}"):
                await envs.keep_files(key, EnvFiles("00", Blob("uv", "00", 1)))
        job = await world.job(JobState.CANCELLED)
        await world.store.environments.record(job.id, 1, {"gpu1": Environment("3.11.2", "/py", "x", name="a job's")})
        await world.store.notes.change(job.id, lambda note: replace(note, text="the baseline"))
        world.kept_environments = ("a node's",)
        await world.after(89)
        assert await _resolved(world) == ["a job's", "a node's", "nobody's"]
        await world.after(91)
        assert await _resolved(world) == ["a job's", "a node's"]
        for prefix in ("", "request for nobody's/"):
            assert await envs.files(f"{prefix}nobody's") is None
        for prefix in ("", "request for a job's/"):
            assert await envs.files(f"{prefix}a job's") is not None

    run(tmp_path, work)


def test_a_resolution_that_was_asked_for_again_stays(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        envs = world.store.python_envs
        await envs.keep_resolution("request for it", Resolution("it", "tiny==1.2"))
        sql(tmp_path / "state.db", "UPDATE resolutions SET at = '2020-01-01T00:00:00+00:00'")
        assert await envs.has_unused(world.now.at)
        assert await envs.resolution("request for it") is not None
        await world.after(89)
        assert await _resolved(world) == ["it"]

    run(tmp_path, work)


def test_while_a_job_waits_what_was_resolved_for_it_stays(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        await world.store.python_envs.keep_resolution("request for it", Resolution("it", "tiny==1.2"))
        job = await world.job(None)
        await world.after(91)
        assert await _resolved(world) == ["it"]
        await world.store.jobs.move(job, JobState.CANCELLED, "test")
        await world.after(91)
        assert await _resolved(world) == []

    run(tmp_path, work)


async def _resolved(world: World) -> list[str]:
    rows = sql(world.folder.parent / "state.db", "SELECT name FROM resolutions ORDER BY request")
    return [name for (name,) in rows]

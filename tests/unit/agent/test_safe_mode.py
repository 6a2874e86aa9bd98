"""Safe mode without nodes: no false alarm, whenever the agent is killed."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.rig.stores import in_store
from ugro.features.safe_mode.model import Mark
from ugro.features.safe_mode.operations import PreviewReconciliation, ReconcileAgent
from ugro.features.safe_mode.reconcile import Reconciler
from ugro.features.safe_mode.records import Records
from ugro.features.safe_mode.service import SafeModeControl, begin
from ugro.kernel.access.model import Caller, Role
from ugro.kernel.jobs.engine.plan import ticket_of
from ugro.kernel.jobs.engine.reconciler import FirstAnswers
from ugro.kernel.jobs.engine.rules.attempt import NodeRun, RunState
from ugro.kernel.jobs.engine.run_tracker import RunTracker, Sighting
from ugro.kernel.jobs.engine.runs import Held, Tickets
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Placement, Share
from ugro.kernel.links.node import Identity
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import NotAllowed, Unreachable
from ugro.kernel.support.state_dir import StateDir

ADMIN = Caller("ann", Role.ADMIN, "a test")
KEY = b"k" * 32
SPEC = JobSpec("train", ("true",))
NEWER = Job(
    9, SPEC, "ann", JobState.STARTING, "free now", "2026-01-01T00:00:00", attempt=1, placement=Placement((Share("n1"),))
)


class Node:
    """It has a run that the state does not know, and cannot be reached when that is to end."""

    async def tickets(self, runs: object, jobs: object = (), *, admits: bool = False) -> Tickets:
        ticket = ticket_of(KEY, "agent", NEWER)
        assert ticket is not None
        return Tickets((Held("9", 1, "running", ticket),), {})

    async def stop(self, *words: object) -> None:
        raise Unreachable("cut off", subject="n1")


class Watch:
    def __init__(self) -> None:
        self.identity = Identity("agent", 1, KEY)
        self.silent = ["n1", "n2"]
        self.seen: list[str] = []

    def sightings(self) -> list[Sighting]:
        return [Sighting(name, has_answered=False) for name in self.seen]

    def has_no_account(self, login: str) -> bool:
        return login == "eve@n1"

    def runs(self, node: str) -> Node:
        return Node()

    def ask_again(self) -> None:
        return

    def unheard(self) -> list[str]:
        return self.silent


def with_control(home: Path, work: Callable[[Store, SafeModeControl], Awaitable[None]]) -> None:
    async def opened(store: Store) -> None:
        control = SafeModeControl(store.jobs, cast(RunTracker, Watch()))
        await work(store, control)

    in_store(home, opened)


def test_a_login_that_nobody_can_have_used_is_not_waited_for(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        watch = Watch()
        watch.seen = ["n1", "ann@n1", "eve@n1"]
        assert SafeModeControl(store.jobs, cast(RunTracker, watch)).not_asked() == ("ann@n1", "n1")

    in_store(tmp_path, work)


def test_records_are_there_before_ids_are_reserved(tmp_path: Path) -> None:
    """Killed in between, the next agent would take them for lost, and stop until every node has answered."""
    reserved: list[Any] = []

    class Noting(Records):
        def write(self, mark: Mark) -> bool:
            with closing(sqlite3.connect(tmp_path / "state.db")) as db:
                reserved.append(db.execute("SELECT value FROM meta WHERE key = 'ids_reserved'").fetchone())
            return super().write(mark)

    async def work(store: Store, control: SafeModeControl) -> None:
        records = Noting(StateDir(tmp_path))
        compared = records.compare("agent", await store.jobs.standing.numbers(), [])
        await begin(control, records, compared)
        assert reserved == [None, ("1000",)]

    with_control(tmp_path, work)


def test_after_a_decision_the_journal_agrees_with_the_state_also_about_jobs_that_it_left_alone(tmp_path: Path) -> None:
    async def work(store: Store, control: SafeModeControl) -> None:
        records = Records(StateDir(tmp_path))
        await begin(control, records, records.compare("agent", await store.jobs.standing.numbers(), []))
        job = (await store.jobs.submit(SPEC, "ann", "key")).job
        records.journal.note(replace(job, state=JobState.CANCELLED))
        numbers = await store.jobs.standing.numbers()
        assert Records(StateDir(tmp_path)).compare("agent", numbers, [job]).reasons
        await control.enter(["an older state"])
        reconciler = Reconciler(store.jobs, cast(RunTracker, Watch()), control)
        await reconciler.decide(ReconcileAgent("forget"), ADMIN)
        numbers = await store.jobs.standing.numbers()
        assert Records(StateDir(tmp_path)).compare("agent", numbers, [job]).reasons == ()

    with_control(tmp_path, work)


def test_no_job_is_taken_before_its_id_is_marked_as_reserved(tmp_path: Path) -> None:
    """Otherwise a state that is put back at that moment would give the same id again."""
    marks: list[tuple[bool, int]] = []

    async def work(store: Store, control: SafeModeControl) -> None:
        class Noting(Records):
            def write(self, mark: Mark) -> bool:
                marks.append((control.is_on, mark.ids))
                return super().write(mark)

        records = Noting(StateDir(tmp_path))
        await begin(control, records, records.compare("agent", await store.jobs.standing.numbers(), []))
        await control.enter(["an older state"], Mark("agent", 5, 7000))
        await Reconciler(store.jobs, cast(RunTracker, Watch()), control).decide(ReconcileAgent("adopt"), ADMIN)
        assert marks[-1] == (True, 8000)
        assert (await store.jobs.submit(SPEC, "ann", "key")).job.id == 7001

    with_control(tmp_path, work)


def test_ids_begin_above_all_that_the_journal_has_noted(tmp_path: Path) -> None:
    async def work(store: Store, control: SafeModeControl) -> None:
        records = Records(StateDir(tmp_path))
        await begin(control, records, records.compare("agent", await store.jobs.standing.numbers(), []))
        records.journal.note(replace(NEWER, id=2345, state=JobState.QUEUED))
        await control.enter(["an older state"])
        await Reconciler(store.jobs, cast(RunTracker, Watch()), control).decide(ReconcileAgent("adopt"), ADMIN)
        assert (await store.jobs.submit(SPEC, "ann", "key")).job.id == 2346

    with_control(tmp_path, work)


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.RECOVERING])
def test_an_older_attempt_that_turns_up_after_a_decision_is_not_run_again(tmp_path: Path, state: JobState) -> None:
    """The first decision left its job out, as nothing of it was found."""

    async def work(store: Store, control: SafeModeControl) -> None:
        records = Records(StateDir(tmp_path))
        await begin(control, records, records.compare("agent", await store.jobs.standing.numbers(), []))
        records.journal.note(replace(NEWER, attempt=2, state=state))
        reconciler = Reconciler(store.jobs, cast(RunTracker, Watch()), control)
        await control.enter(["an older state"])
        assert [change.what for change in (await reconciler.decide(ReconcileAgent("adopt"), ADMIN)).adopt] == ["lost"]
        await control.prove("n1", [(9, 1)])
        assert control.is_on
        assert [change.what for change in (await reconciler.decide(ReconcileAgent("adopt"), ADMIN)).adopt] == ["recall"]
        found = await store.jobs.get(9)
        assert (found.state, found.attempt) == (state, 2)
        assert [one.number for one in await store.jobs.attempts(9)] == [1]
        await control.prove("n1", [(9, 1)])
        assert not control.is_on  # the run is one that is over, and is cleared away

    with_control(tmp_path, work)


def test_nodes_obey_no_older_generation_before_what_they_run_is_decided_about(tmp_path: Path) -> None:
    """A start that an agent before us sent may arrive late."""
    asked: list[int] = []

    class Obeying(Node):
        async def tickets(self, runs: object, jobs: object = (), *, admits: bool = False) -> Tickets:
            if admits:
                asked.append(watch.identity.generation)
                if len(asked) == 1:
                    raise Unreachable("cut off", subject="n1")
            return Tickets((), {}) if len(asked) < 2 else await super().tickets(runs, jobs)

    class Answering(Watch):
        def sightings(self) -> list[Sighting]:
            return [Sighting("n1", has_answered=True)]

        def runs(self, node: str) -> Node:
            return Obeying()

    watch = Answering()

    async def work(store: Store) -> None:
        control = SafeModeControl(store.jobs, cast(RunTracker, watch))
        await control.enter(["an older state"])
        await control.examine()
        reconciler = Reconciler(store.jobs, cast(RunTracker, watch), control)
        with pytest.raises(NotAllowed, match="not every node has said what it runs: n1"):
            await reconciler.decide(ReconcileAgent("adopt"), ADMIN)
        await control.examine()
        done = await reconciler.decide(ReconcileAgent("adopt"), ADMIN)
        assert asked == [2, 3]
        assert [change.what for change in done.adopt] == ["take"]
        assert done.generation == 3 == (await store.jobs.standing.numbers()).generation

    in_store(tmp_path, work)


class Quiet:
    """A node without runs. ``fails_at``: which of the questions about what it ran before it cannot answer."""

    def __init__(self, started: dict[int, int], fails_at: tuple[int, ...] = ()) -> None:
        self.started, self._fails_at, self._asked = started, fails_at, 0

    async def tickets(self, runs: object, jobs: object = (), *, admits: bool = False) -> Tickets:
        if jobs:
            self._asked += 1
            if self._asked in self._fails_at:
                raise Unreachable("cut off", subject="n1")
        return Tickets((), self.started)


class Cluster(Watch):
    """Every node of it answers."""

    def __init__(self, **nodes: Quiet) -> None:
        super().__init__()
        self.nodes = nodes

    def sightings(self) -> list[Sighting]:
        return [Sighting(name, has_answered=True) for name in self.nodes]

    def runs(self, node: str) -> Node:
        return cast(Node, self.nodes[node])

    def state(self, node: str, job: int, attempt: int) -> NodeRun:
        return NodeRun(node, RunState.ABSENT, is_reachable=True)

    def status(self, node: str, job: int, attempt: int) -> None:
        return None


async def moved(store: Store, watch: Cluster) -> SafeModeControl:
    """A state that was used elsewhere, with n1 and n2 and a job that waits."""
    before = SafeModeControl(store.jobs, cast(RunTracker, Cluster(n1=Quiet({}), n2=Quiet({}))))
    await before.load()
    await before.compare_marks()
    await store.jobs.submit(SPEC, "ann", "key")
    control = SafeModeControl(store.jobs, cast(RunTracker, watch))
    await control.load()
    await control.enter_unchecked(None, is_moved=True)
    return control


def test_safe_mode_does_not_end_before_the_nodes_of_the_state_were_asked(tmp_path: Path) -> None:
    """The cluster file is not there yet: this machine alone cannot say what the others ran."""

    async def work(store: Store) -> None:
        watch = Cluster(here=Quiet({}))
        control = await moved(store, watch)
        await control.examine()
        mode = control.status()
        assert mode is not None
        assert (mode.not_asked, mode.absent) == (("n1", "n2"), ("n1", "n2"))
        assert mode.unasked == "n1 (not in this cluster), n2 (not in this cluster)"
        watch.nodes = {"n1": Quiet({}), "n2": Quiet({1: 1})}
        await control.examine()
        assert (mode := control.status()) is not None
        assert mode.reasons == ("job 1 has run in attempt 1 since the state was saved, and ended",)

    in_store(tmp_path, work)


def test_safe_mode_ends_when_the_nodes_of_the_state_are_there_and_know_no_more(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        control = await moved(store, Cluster(n1=Quiet({}), n2=Quiet({})))
        await control.examine()
        assert control.status() is None

    in_store(tmp_path, work)


def test_a_node_that_is_gone_is_skipped_by_the_user_and_not_asked_for_again(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        watch = Cluster(n1=Quiet({}))
        control = await moved(store, watch)
        await control.examine()
        reconciler = Reconciler(store.jobs, cast(RunTracker, watch), control)
        with pytest.raises(NotAllowed, match="not every node has said what it runs: n2") as refused:
            await reconciler.decide(ReconcileAgent("adopt"), ADMIN)
        assert refused.value.hint is not None
        assert "not in this cluster: n2" in refused.value.hint
        assert (await reconciler.decide(ReconcileAgent("adopt", skip_unreachable=True), ADMIN)).absent == ("n2",)
        assert control.has_news()
        await control.compare_marks()
        assert await store.jobs.standing.nodes() == {"n1"}
        [job] = await store.jobs.newest(1)
        await store.jobs.move(job, JobState.CANCELLED, "by its user")
        assert await store.jobs.standing.nodes() == set()  # nothing of it could run again

    in_store(tmp_path, work)


def test_a_job_on_a_node_that_has_left_the_cluster_is_asked_about_there(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        job = (await store.jobs.submit(SPEC, "ann", "key")).job
        await store.jobs.start(job, Placement((Share("ann@n3"),)), "free now")
        assert await store.jobs.standing.nodes() == {"n3"}
        await store.jobs.standing.keep_nodes({"n1"})
        assert await store.jobs.standing.nodes() == {"n1", "n3"}

    in_store(tmp_path, work)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_safe_mode_does_not_end_while_a_node_cannot_say_what_it_ran(tmp_path: Path, fails_at: int) -> None:
    async def work(store: Store) -> None:
        control = await moved(store, Cluster(n1=Quiet({}, (fails_at,)), n2=Quiet({})))
        await control.examine()
        assert (mode := control.status()) is not None
        assert (mode.not_asked, mode.absent) == (("n1",), ())
        await control.examine()
        assert control.status() is None

    in_store(tmp_path, work)


def test_nothing_is_decided_while_a_node_cannot_say_what_it_ran(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        watch = Cluster(n1=Quiet({}, (1, 2)), n2=Quiet({}))
        control = await moved(store, watch)
        await control.enter(["an older state"])
        await control.examine()
        reconciler = Reconciler(store.jobs, cast(RunTracker, watch), control)
        assert (await reconciler.plan(PreviewReconciliation(), ADMIN)).not_asked == ("n1",)
        await control.examine()
        with pytest.raises(NotAllowed, match="not every node has said what it runs: n1"):
            await reconciler.decide(ReconcileAgent("adopt"), ADMIN)
        await control.examine()
        assert (await reconciler.decide(ReconcileAgent("forget"), ADMIN)).not_asked == ()

    in_store(tmp_path, work)


def test_a_generation_that_nodes_have_met_is_recorded_before(tmp_path: Path) -> None:
    """Otherwise they would refuse the next agent."""

    async def work(store: Store) -> None:
        watch = cast(RunTracker, Watch())
        control = SafeModeControl(store.jobs, watch)
        await control.prove("n1", [(9, 1)])
        reconciler = Reconciler(store.jobs, watch, control)
        for _ in range(3):
            with pytest.raises(Unreachable):
                await reconciler.decide(ReconcileAgent("forget"), ADMIN)
        assert await store.next_generation() > watch.identity.generation == 4

    in_store(tmp_path, work)


def test_only_jobs_that_waited_already_wait_for_the_nodes_and_not_for_long() -> None:
    watch = Watch()
    first = FirstAnswers(cast(RunTracker, watch))
    assert first.waits(9)
    assert not first.look(lambda: [NEWER])
    assert (first.waits(9), first.waits(10)) == (True, False)
    watch.silent = ["n2"]
    assert not first.look(list)
    assert first.reason(9) == "was queued before the agent started: waits until it is known what runs on n2"
    assert first.reason(10) is None
    watch.silent = []
    assert first.look(list)
    watch.silent = ["n2"]
    assert not first.look(list)
    assert (first.waits(9), first.reason(9)) == (False, None)
    impatient = FirstAnswers(cast(RunTracker, watch), longest_s=0.0)
    assert impatient.look(lambda: [NEWER])
    assert not impatient.waits(9)

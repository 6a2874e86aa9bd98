"""Whatever the order of submits, ends, lost answers, crashes and restarts: what must always hold, holds after each.

Hypothesis drives the real engine over the real store on model nodes; what holds is read by plain SQL from the file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.proof.model import Clock, ModelAgent
from tests.proof.modelnode import Key, ModelNode, Of
from ugro.kernel.jobs.model import (
    FINAL_STATES,
    HOLDING_STATES,
    MOVES,
    Cause,
    Elastic,
    Ending,
    Job,
    JobSpec,
    JobState,
    Launcher,
    Resources,
    Retry,
)
from ugro.kernel.support.errors import UgroError

T = TypeVar("T")
NODES = ("n1", "n2", "n3")
# What is done before the next thing happens: from next to nothing to all there is to do.
turns = st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40])
picks = st.integers(0, 30)
_ROUNDS = 360
_ROUNDS_IN_A_PLACE = 15
_STATES = {str(state) for state in JobState}


class Jobs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.crashes = Crashes()
        logging.getLogger("ugro").addHandler(self.crashes)
        shm = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
        self.nodes = {name: ModelNode(name) for name in NODES}
        self.away = {name: ModelNode(name, "elsewhere") for name in NODES}  # where names do not lead now
        self.has_led = False
        self.left_behind: set[Key] = set()  # they had a node whose name was led elsewhere
        self.clock = Clock()
        self.runner = asyncio.Runner(loop_factory=lambda: self.clock)
        self.lives = 0
        self.agent = self._make_agent()
        self.keys: dict[str, int] = {}
        self.cancelled: dict[int, tuple[int, bool]] = {}  # by job: its attempt, and whether it must end as cancelled
        self.final: dict[int, str] = {}
        self.groups: dict[Key, frozenset[int]] = {}  # of elastic attempts: the ranks that trained together last
        self._run(self.agent.start())
        self._hear_all(3)

    # --- what users do ------------------------------------------------------------------------------------------

    @rule(nodes=st.integers(1, 2), gpus=st.integers(0, 2), retries=st.integers(0, 2), is_urgent=st.booleans(), n=turns)
    def submit(self, nodes: int, gpus: int, retries: int, is_urgent: bool, n: int) -> None:
        launcher = Launcher.DDP if nodes > 1 else Launcher.COMMAND
        spec = JobSpec(
            "job", ("train",), launcher,
            resources=Resources(nodes, nodes, gpus), priority=90 if is_urgent else 10, is_preemptible=not is_urgent,
            retry=Retry(retries, (Cause.RANK_FAILED, Cause.KILLED) if retries else ()),
        )  # fmt: skip
        self._submit(spec, n)

    @rule(nodes=st.integers(2, 3), least=st.integers(1, 2), retries=st.integers(0, 1), n=turns)
    def submit_elastic(self, nodes: int, least: int, retries: int, n: int) -> None:
        """A training that goes on without ranks that are lost."""
        spec = JobSpec(
            "job", ("train",), Launcher.DDP, resources=Resources(nodes, nodes, 1), elastic=Elastic(least, rejoins=2),
            retry=Retry(retries, (Cause.RANK_FAILED, Cause.KILLED) if retries else ()),
        )  # fmt: skip
        self._submit(spec, n)

    def _submit(self, spec: JobSpec, n: int) -> None:
        key = f"key-{len(self.keys)}"
        self.keys[key] = self._ask(self.agent.jobs.submit(spec, "ann", key), n).job.id

    @precondition(lambda self: self.keys)
    @rule(pick=picks, before=st.integers(0, 8), n=turns)
    def cancel(self, pick: int, before: int, n: int) -> None:
        """While the agent is in the middle of what it was just told."""
        self._hear_all(before)
        job = _one_of(self._unfinished() or list(self.keys.values()), pick)
        seen: Job = self._ask(self.agent.jobs.ask_to_end(job, Ending.CANCELLED), n)
        if job not in self.cancelled and not seen.is_final:
            self.cancelled[job] = (seen.attempt, seen.ending is not Ending.DONE)

    @precondition(lambda self: self.keys)
    @rule(pick=picks, state=st.sampled_from(list(JobState)), n=turns)
    def come_late(self, pick: int, state: JobState, n: int) -> None:
        """A submit made again, and a move decided on by somebody who saw the job otherwise: nothing happens."""
        key = _one_of(list(self.keys), pick)
        again = self._ask(self.agent.jobs.submit(JobSpec("other", ("other",)), "ann", key), 0)
        assert (again.is_new, again.job.id) == (False, self.keys[key])
        job: Job = again.job
        if job.state is not state:
            old = replace(job, state=state, attempt=max(0, job.attempt - 1))
            is_refused = self._ask(_is_refused(self.agent.jobs.move(old, JobState.RUNNING, "an old decision")), n)
            assert is_refused, f"job {job.id} is {job.state} and was moved as if it were {state}"

    # --- what happens to nodes ----------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NODES), n=turns)
    def hear(self, name: str, n: int) -> None:
        """The agent learns how things are there: that it cannot be reached, too."""
        self.agent.watch.hear(name)
        self._turn(n)

    @rule(name=st.sampled_from(NODES), pick=picks, what=st.sampled_from(["ends", "ends", "fails", "is lost", "all"]))
    def end_something(self, name: str, pick: int, what: str) -> None:
        node = self.nodes[name]
        runs = node.unfinished()
        if what == "all":
            node.power_off()
        elif runs and what == "is lost":
            node.lose_supervisor(_one_of(runs, pick))
        elif runs:
            node.finish(_one_of(runs, pick), int(what == "fails"))

    @rule(pick=picks, loses=st.booleans(), n=turns)
    def train(self, pick: int, loses: bool, n: int) -> None:
        """The ranks of an elastic run that can form a group; perhaps one of them is lost before."""
        if not (keys := self._elastic_keys()):
            return
        key = _one_of(keys, pick)
        running = self._training(key)
        if loses and running:
            node, rank = _one_of(running, pick)
            node.lose_rank(key, rank)
        self._form_group(key)
        self._turn(n)

    @rule(name=st.sampled_from(NODES), is_reachable=st.booleans(), loses_answers=st.booleans(), n=turns)
    def change_cable(self, name: str, is_reachable: bool, loses_answers: bool, n: int) -> None:
        self.nodes[name].is_reachable = is_reachable
        self.nodes[name].loses_answers = loses_answers
        self._turn(n)

    @rule(name=st.sampled_from(NODES), n=turns)
    def lead_elsewhere(self, name: str, n: int) -> None:
        """An edit of the cluster file: the same name, and another machine or folder; the next one leads it back."""
        self.left_behind.update(self._held_on(name))
        self.nodes[name], self.away[name] = self.away[name], self.nodes[name]
        self.has_led = True
        self.agent.watch.forget(name)
        self._turn(n)

    # --- what happens to the agent ------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 30.0, 600.0]), n=turns)
    def let_time_pass(self, seconds: float, n: int) -> None:
        self.clock.now_s += seconds
        self.agent.engine.wake()
        self._turn(n)

    @rule(before=st.integers(0, 20), n=turns)
    def crash(self, before: int, n: int) -> None:
        self._hear_all(before)
        successor = self._next_path()
        self._run(self.agent.kill(successor))
        self.agent = self._make_agent(successor)
        self._run(self.agent.start())
        self._hear_all(n)

    # --- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def only_legal_moves_with_attempts_in_order(self) -> None:
        last: dict[int, tuple[str | None, int]] = {}
        for job, attempt, kind in self._sql("SELECT job, attempt, kind FROM events WHERE job NOTNULL ORDER BY seq"):
            if kind not in _STATES:
                continue
            state, number = last.get(job, (None, 0))
            if state is None:
                assert (kind, attempt) == ("queued", 0)
            else:
                assert JobState(kind) in MOVES[JobState(state)], f"job {job} went from {state} to {kind}"
                assert attempt == number + (kind == "starting"), f"job {job}: attempt {number}, then {attempt} {kind}"
            last[job] = (kind, attempt)
        rows = self._sql("SELECT id, state, attempt FROM jobs")
        assert {job: (state, attempt) for job, state, attempt in rows} == last

    @invariant()
    def what_was_acknowledged_is_there_once(self) -> None:
        assert [tuple(row) for row in self._sql("SELECT submit_key, id FROM jobs ORDER BY id")] == [*self.keys.items()]

    @invariant()
    def no_device_has_two_holders(self) -> None:
        taken: dict[tuple[str, int], int] = {}
        for job, _, shares in self._held():
            for share in shares:
                for gpu in share.get("gpus", ()):
                    other = taken.setdefault((share["node"], gpu), job)
                    assert other == job, f"{share['node']} GPU {gpu} was given to jobs {other} and {job}"

    @invariant()
    def what_is_final_stays(self) -> None:
        for job, state in self._sql("SELECT id, state FROM jobs"):
            assert self.final.get(job, state) == state
            if JobState(state) in FINAL_STATES:
                self.final[job] = state

    @invariant()
    def a_job_lives_in_one_attempt_and_only_while_it_holds_its_devices(self) -> None:
        rows = {job: (state, attempt) for job, state, attempt in self._sql("SELECT id, state, attempt FROM jobs")}
        for node in self._places():
            assert all(count == 1 for count in node.starts.values()), f"{node.name} started twice: {node.starts}"
            for job, attempt in node.living():
                state, current = rows[job]
                assert current == attempt, f"job {job} is at attempt {current}, and {attempt} lives on {node.name}"
                if state == "cancelled" and (job, attempt) in self.left_behind:
                    continue  # nobody could be asked; it is swept when its node's name leads there again
                assert JobState(state) in HOLDING_STATES, f"job {job} is {state}, and lives on {node.name}"

    @invariant()
    def an_elastic_attempt_succeeds_only_when_all_of_its_last_group_have(self) -> None:
        for (job, attempt), members in self.groups.items():
            row = self._row(job)
            if row["state"] == "succeeded" and row["attempt"] == attempt:
                done = {rank for node in self._places() for key, rank in node.done if key == (job, attempt)}
                assert members <= done, f"job {job}: of its last group {sorted(members)} only {sorted(done)} are done"

    @invariant()
    def no_attempt_follows_a_cancel(self) -> None:
        for job, (attempt, must_hold) in self.cancelled.items():
            row = self._row(job)
            story = f"job {job} was cancelled in attempt {attempt}, and is {row['state']} in {row['attempt']}"
            assert not must_hold or row["attempt"] == attempt, story
            assert not must_hold or row["state"] not in ("succeeded", "failed"), story

    @invariant()
    def nothing_in_the_agent_has_crashed(self) -> None:
        assert not self.crashes.seen, self.crashes.seen[0]

    def teardown(self) -> None:
        """When all is well again, everything comes to an end: nothing is lost, and nothing is left on a node."""
        try:
            for node in self._places():
                node.is_reachable, node.loses_answers = True, False
            for number in range(_ROUNDS):
                if self._is_over():
                    break
                if self.has_led and number % _ROUNDS_IN_A_PLACE == 0:
                    self._lead_all(number // _ROUNDS_IN_A_PLACE)
                self._help_along()
            left = [tuple(row) for row in self._sql("SELECT id, state, attempt, ending, reason FROM jobs")]
            assert self._is_over(), (left, [(node.name, node.root, node.runs) for node in self._places()])
            for job, (_, must_hold) in self.cancelled.items():
                assert not must_hold or self._row(job)["state"] == "cancelled", f"job {job}: the cancel was forgotten"
        finally:
            logging.getLogger("ugro").removeHandler(self.crashes)
            self._run(self.agent.kill(self._next_path()))
            self.runner.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- helpers ------------------------------------------------------------------------------------------------

    def _places(self) -> list[ModelNode]:
        return [*self.nodes.values(), *self.away.values()]

    def _held(self) -> list[tuple[int, int, list[dict[str, Any]]]]:
        """Job, attempt and shares of all that hold devices."""
        states = ",".join(f"'{state}'" for state in HOLDING_STATES)
        rows = self._sql(f"SELECT id, attempt, placement FROM jobs WHERE state IN ({states})")
        return [(job, attempt, json.loads(text)["shares"]) for job, attempt, text in rows]

    def _held_on(self, name: str) -> list[Key]:
        return [(job, attempt) for job, attempt, shares in self._held() if any(one["node"] == name for one in shares)]

    def _unfinished(self) -> list[int]:
        return [job for job in self.keys.values() if job not in self.final]

    def _hear_all(self, turns: int) -> None:
        for name in NODES:
            self.agent.watch.hear(name)
        self._turn(turns)

    def _elastic_keys(self) -> list[Key]:
        return sorted({key for node in self._places() for key in node.unfinished() if node.runs[key].ranks})

    def _training(self, key: Key) -> list[tuple[ModelNode, int]]:
        """The processes of ranks that live and have not ended, wherever they are."""
        places = [node for node in self._places() if key in node.runs and node.runs[key].lives]
        return [(node, rank) for node in places for rank in node.runs[key].among(Of.RUNS)]

    def _form_group(self, key: Key) -> None:
        """As ranks do among themselves; what they write is read where there is a supervisor."""
        together = self._training(key)
        ranks = {rank for _, rank in together}
        # One that was started again has no state: somebody who has one must be there.
        if not ranks & self.groups.get(key, frozenset(ranks)):
            return
        number = 1 + max(node.runs[key].status.group for node in self._places() if key in node.runs)
        self.groups[key] = frozenset(ranks)
        for node in {id(node): node for node, _ in together}.values():
            if node.runs[key].status.status == "running":
                node.hear_of_group(key, number, sorted(ranks))

    def _help_along(self) -> None:
        for key in self._elastic_keys():
            self._form_group(key)
        for name, node in self.nodes.items():
            for key in node.unfinished():
                node.finish(key, 0)
            self.agent.watch.hear(name)
        self.clock.now_s += 600
        self.agent.engine.wake()
        self._turn(40)

    def _lead_all(self, number: int) -> None:
        """Each number has a combination of its own: the parts of a job may be on both sides."""
        for bit, name in enumerate(NODES):
            if (self.nodes[name].root == "elsewhere") != bool(number >> bit & 1):
                self.lead_elsewhere(name, 0)

    def _is_over(self) -> bool:
        states = {JobState(state) for (state,) in self._sql("SELECT state FROM jobs")}
        return states <= FINAL_STATES and not any(node.runs for node in self._places())

    def _make_agent(self, path: Path | None = None) -> ModelAgent:
        made: list[ModelAgent] = []

        async def make() -> None:  # in the loop: the engine's own events belong to it
            made.append(ModelAgent(path or self._next_path(), self.nodes, self.clock))

        self._run(make())
        return made[0]

    def _next_path(self) -> Path:
        self.lives += 1
        return self.folder / f"{self.lives}.db"

    def _turn(self, turns: int) -> None:
        self._run(_let_others(turns))

    def _ask(self, question: Coroutine[Any, Any, Any], turns: int) -> Any:
        async def ask() -> Any:
            answer = await question
            self.agent.engine.wake()
            await _let_others(turns)
            return answer

        return self._run(ask())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def _row(self, job: int) -> sqlite3.Row:
        return self._sql("SELECT * FROM jobs WHERE id = ?", job)[0]

    def _told(self, job: int) -> str:
        """What the event log said last about the ranks of an elastic job."""
        found = self._sql("SELECT text FROM events WHERE job = ? AND kind = 'elastic' ORDER BY seq", job)
        return str(found[-1]["text"]) if found else ""

    def _sql(self, query: str, *values: object) -> list[sqlite3.Row]:
        db = sqlite3.connect(f"file:{self.agent.path}?mode=ro", uri=True)
        db.row_factory = sqlite3.Row
        try:
            return db.execute(query, values).fetchall()
        finally:
            db.close()


def _one_of(things: Sequence[T], pick: int) -> T:
    return things[pick % len(things)]


class Crashes(logging.Handler):
    """What the engine caught so that other jobs go on, and should never have had to."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        self.seen.append(f"{record.getMessage()}\n{trace}")


async def _let_others(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def _is_refused(work: Coroutine[Any, Any, Any]) -> bool:
    try:
        await work
    except UgroError:
        return True
    return False


@seed(int(os.environ.get("PROOF_SEED", "3")))
class TestJobs(Jobs.TestCase):  # type: ignore[misc,valid-type]
    # Not shrunk: that would take minutes. PROOF_SEED and PROOF_EXAMPLES look elsewhere, and for longer.
    settings = settings(
        max_examples=int(os.environ.get("PROOF_EXAMPLES", settings().max_examples)),
        stateful_step_count=50,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_an_elastic_attempt_goes_on_without_a_rank_and_takes_it_in_again() -> None:
    """By the rules above, in one order: the machine would not tell if none of it ever happened."""
    machine = Jobs()
    try:
        machine.submit_elastic(nodes=3, least=1, retries=0, n=40)
        job = machine.keys["key-0"]
        machine._hear_all(40)
        machine.let_time_pass(5.0, 40)
        machine.train(pick=0, loses=False, n=40)
        machine._hear_all(40)
        machine.train(pick=1, loses=True, n=40)
        machine._hear_all(40)
        assert machine._row(job)["state"] == "running"
        assert "was lost" in machine._told(job)
        lost = next(node for node in machine.nodes.values() if node.runs[job, 1].among(Of.LOST))
        machine.let_time_pass(5.0, 40)
        assert not lost.runs[job, 1].among(Of.LOST), "it was started again"
        machine.train(pick=0, loses=False, n=40)
        machine._hear_all(40)
        assert machine._told(job) == "every rank trains again"
        machine._help_along()
        machine._help_along()
        row = machine._row(job)
        assert (row["state"], row["attempt"]) == ("succeeded", 1)
    finally:
        machine.teardown()


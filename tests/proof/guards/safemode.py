"""The guards against an older state that was put back."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

OLDER = ("tests/integration/agent/test_older_state.py", "-k", "catches_up")
FORGOTTEN = ("tests/integration/agent/test_older_state.py", "-k", "forgotten")
GENERATIONS = ("tests/integration/agent/test_older_state.py", "-k", "generations")
UNCHECKED = ("tests/integration/agent/test_older_state.py", "-k", "by_itself")
FORGED = ("tests/integration/engine/test_forged_evidence.py",)
WHOLE_COPY = ("tests/integration/agent/test_older_state.py", "-k", "whole_directory")
FOLLOWED = ("tests/integration/agent/test_older_state.py", "-k", "followed")
RECORDS = ("tests/unit/agent/test_records.py",)
CONTROL = ("tests/unit/agent/test_safe_mode.py",)
_MOVING = ("tests/integration/deployment/test_moving.py", "-k")
RULES = ("tests/unit/policy/lifecycle/test_newer_state.py",)

_RECONCILER = "ugro.kernel.jobs.engine.reconciler"
_FIRST_ANSWERS = "ugro.kernel.jobs.engine.reconciler"
_SEAL = "ugro.kernel.support.secrets"
_NEWER = "ugro.features.safe_mode.rules"
_STANDING = "ugro.kernel.store.standing"

MUTANTS = (
    Mutant(
        "what the journal says of a job in a gap is not looked up",
        (Edit("ugro.features.safe_mode.records", "Records.newer_entries", "found", "()"),),
        CONTROL,
    ),
    Mutant(
        "a decision does not fence off older generations",
        (Edit("ugro.features.safe_mode.reconcile", "Reconciler._take_over", "await self._control.examine_all()", ""),),
        CONTROL,
    ),
    Mutant(
        "an older attempt that is left is taken for the newest",
        (Edit(_NEWER, "_adopted", "newest >= max(entry.attempt if entry else 0, view.started, 1)", "newest"),),
        RULES,
    ),
    Mutant(
        "a log that was begun is not written to its end",
        (Edit("ugro.kernel.files.results.collector", "Collector.complete_log", "await self.write_log(small)", "pass"),),
        FOLLOWED,
    ),
    Mutant(
        "ids are given before they are marked as reserved",
        (Edit("ugro.features.safe_mode.service", "SafeModeControl.note_left", "await self._mark_here()", "pass"),),
        CONTROL,
    ),
    Mutant(
        "ids that the journal has noted are given again",
        (
            Edit("ugro.features.safe_mode.records", "Records.highest", "_highest(self._home.jobs)", "0"),
            Edit("ugro.features.safe_mode.records", "Records.highest", "self.journal.highest", "0"),
        ),
        CONTROL,
    ),
    Mutant(
        "a ticket is believed without its seal",
        (
            Edit(
                "ugro.kernel.jobs.engine.plan",
                "read_ticket",
                "unsealed(key, message)",
                "str(message).partition(' ')[2] if isinstance(message, str) else None",
            ),
        ),
        FORGED,
    ),
    Mutant(
        "a mark is believed without its seal",
        (
            Edit(
                "ugro.features.safe_mode.records",
                "read_mark",
                "unsealed(key, message)",
                "str(message).partition(' ')[2] if isinstance(message, str) else None",
            ),
        ),
        FORGED,
    ),
    Mutant(
        "a seal is not compared",
        (Edit(_SEAL, "unsealed", "hmac.compare_digest(mac, _mac(key, text))", "bool(text)"),),
        RECORDS,
    ),
    Mutant(
        "a run that a newer state started counts as left over",
        (Edit(_NEWER, "is_beyond", "not ids.were_given(job)", "False"),),
        RULES,
    ),
    Mutant(
        "an attempt that a newer state started counts as over",
        (Edit(_NEWER, "is_beyond", "attempt > known_attempt", "False"),),
        RULES,
    ),
    Mutant(
        "in safe mode the engine goes on",
        (Edit(_RECONCILER, "Engine._look", "self.safe_mode.is_on", "False"),),
        OLDER,
    ),
    Mutant(
        "the journal beside the state is not compared",
        (
            Edit(
                "ugro.features.safe_mode.records",
                "Records.compare",
                "[*self._beyond(numbers, live), *older_than_mark(own, mark, HERE)]",
                "[*older_than_mark(own, mark, HERE)]",
            ),
        ),
        RECORDS,
    ),
    Mutant(
        "ids begin where the older state left off",
        (Edit(_STANDING, "_reserve", "max(ids, known.highest)", "known.highest"),),
        FORGOTTEN,
    ),
    Mutant(
        "a state that was moved goes on at once",
        (
            Edit(
                "ugro.features.safe_mode.records",
                "Records.compare",
                "Comparison(tuple(reasons), mark, is_checked=not is_moved, is_moved=is_moved)",
                "Comparison(tuple(reasons), mark, is_checked=True, is_moved=is_moved)",
            ),
        ),
        (*_MOVING, "copied"),
    ),
    Mutant(
        "what has run since the backup starts again",
        (
            Edit(
                "ugro.features.safe_mode.service",
                "SafeModeControl._may_know_more",
                "ended = ended_since(self._watch, live, await self.newest_attempts({job.id for job in live}))",
                "ended: dict[int, int] = {}",
            ),
        ),
        (*_MOVING, "has_run_since"),
    ),
    Mutant(
        "a state that was moved does not ask nodes that are not in the cluster file",
        (
            Edit(
                "ugro.features.safe_mode.service",
                "SafeModeControl.not_asked",
                "[*self.absent(), *(name for name in unknown if not self._watch.has_no_account(name))]",
                "[*(name for name in unknown if not self._watch.has_no_account(name))]",
            ),
        ),
        CONTROL,
    ),
    Mutant(
        "a node that cannot say what it ran counts as asked",
        (
            Edit(
                "ugro.features.safe_mode.service",
                "SafeModeControl.newest_attempts",
                "self._examined.pop(node, None)",
                "pass",
            ),
        ),
        CONTROL,
    ),
    Mutant(
        "an agent that was left behind reaches the generation of its successor",
        (Edit("ugro.features.safe_mode.service", "", "_GENERATIONS_AHEAD = 1000", "_GENERATIONS_AHEAD = 0"),),
        (*_MOVING, "still_runs"),
    ),
    Mutant(
        "an agent that has a successor is not told",
        (Edit("ugro.node.runs.watch", "_Watching._end_if_replaced", "newest > self._generation", "False"),),
        ("tests/integration/runs/test_run_watch.py", "-k", "successor"),
    ),
    Mutant(
        "lost records are taken for a new state",
        (
            Edit(
                "ugro.features.safe_mode.records",
                "Records.compare",
                "Comparison(is_checked=False, mark=mark, is_moved=is_moved)",
                "Comparison()",
            ),
        ),
        UNCHECKED,
    ),
    Mutant(
        "the generation stays below what nodes have met",
        (
            Edit(_STANDING, "_raise_generation", "max(numbers(db).generation, generation)", "numbers(db).generation"),
            Edit(
                "ugro.features.safe_mode.reconcile",
                "Reconciler._decide",
                "self._watch.identity.generation = done.generation",
                "",
            ),
        ),
        GENERATIONS,
    ),
    Mutant(
        "a job that waited before the agent started does not wait for what nodes say",
        (Edit(_FIRST_ANSWERS, "FirstAnswers.waits", "self._held is None or job in self._held", "False"),),
        WHOLE_COPY,
    ),
    Mutant(
        "a state of before the records is taken for a new one",
        (
            Edit(
                "ugro.features.safe_mode.records",
                "Records.compare",
                "not numbers.reserved and mark is None",
                "not numbers.reserved",
            ),
        ),
        RECORDS,
    ),
    Mutant(
        "a job that ended meanwhile is started again",
        (Edit("ugro.features.safe_mode.store", "_apply", "_settle(db, change)", "[]"),),
        OLDER,
    ),
    Mutant(
        "in safe mode jobs are taken",
        (
            Edit(
                "ugro.kernel.jobs.service", "JobService._asked", "self._engine.safe_mode.check('and takes no jobs')", ""
            ),
            Edit(
                "ugro.kernel.jobs.service",
                "JobService._put",
                "self._engine.safe_mode.check('and takes no jobs')",
                "pass",
            ),
        ),
        OLDER,
    ),
)

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

_SAFE_MODE = "src/ugro/agent/safe_mode/"
_RECONCILER = "src/ugro/agent/engine/reconciler.py"
_FIRST_ANSWERS = "src/ugro/agent/engine/first_answers.py"
_SEAL = "src/ugro/core/support/seal.py"
_NEWER = "src/ugro/policy/lifecycle/newer_state.py"
_STANDING = "src/ugro/store/standing.py"

MUTANTS = (
    Mutant(
        "what the journal says of a job in a gap is not looked up",
        (Edit(_SAFE_MODE + "records.py", "for number in found:", "for number in ():"),),
        CONTROL,
    ),
    Mutant(
        "a decision does not fence off older generations",
        (Edit(_SAFE_MODE + "reconcile.py", "        await self._control.examine_all()\n", ""),),
        CONTROL,
    ),
    Mutant(
        "an older attempt that is left is taken for the newest",
        (Edit(_NEWER, "if newest >= max(entry.attempt if entry else 0, view.started, 1):", "if newest:"),),
        RULES,
    ),
    Mutant(
        "a log that was begun is not written to its end",
        (Edit("src/ugro/agent/artifacts/collector.py", "await self.write_log(small)", "pass"),),
        FOLLOWED,
    ),
    Mutant(
        "ids are given before they are marked as reserved",
        (Edit(_SAFE_MODE + "control.py", "await self._mark_here()  # before an id", "pass  # before an id"),),
        CONTROL,
    ),
    Mutant(
        "ids that the journal has noted are given again",
        (Edit(_SAFE_MODE + "records.py", "_highest(self._home.jobs), self.journal.highest", "0, 0"),),
        CONTROL,
    ),
    Mutant(
        "a ticket is believed without its seal",
        (
            Edit(
                "src/ugro/core/ticket.py",
                "text = unsealed(key, message)",
                'text = str(message).partition(" ")[2] if isinstance(message, str) else None',
            ),
        ),
        FORGED,
    ),
    Mutant(
        "a mark is believed without its seal",
        (
            Edit(
                "src/ugro/agent/safe_mode/mark.py",
                "text = unsealed(key, message)",
                'text = str(message).partition(" ")[2] if isinstance(message, str) else None',
            ),
        ),
        FORGED,
    ),
    Mutant(
        "a seal is not compared",
        (Edit(_SEAL, "hmac.compare_digest(mac, _mac(key, text))", "bool(text)"),),
        RECORDS,
    ),
    Mutant(
        "a run that a newer state started counts as left over",
        (Edit(_NEWER, "return not ids.were_given(job)", "return False"),),
        RULES,
    ),
    Mutant(
        "an attempt that a newer state started counts as over",
        (Edit(_NEWER, "return attempt > known_attempt", "return False"),),
        RULES,
    ),
    Mutant(
        "in safe mode the engine goes on",
        (Edit(_RECONCILER, "if self.safe_mode.is_on:\n            return", "if False:\n            return"),),
        OLDER,
    ),
    Mutant(
        "the journal beside the state is not compared",
        (
            Edit(
                "src/ugro/agent/safe_mode/records.py",
                "reasons = [*self._beyond(numbers, live), *older_than_mark(own, mark, HERE)]",
                "reasons = [*older_than_mark(own, mark, HERE)]",
            ),
        ),
        RECORDS,
    ),
    Mutant(
        "ids begin where the older state left off",
        (Edit(_STANDING, "highest = max(ids, known.highest)", "highest = known.highest"),),
        FORGOTTEN,
    ),
    Mutant(
        "a state that was moved goes on at once",
        (Edit(_SAFE_MODE + "records.py", "is_checked=not is_moved", "is_checked=True"),),
        (*_MOVING, "copied"),
    ),
    Mutant(
        "what has run since the backup starts again",
        (
            Edit(
                "src/ugro/agent/safe_mode/control.py",
                "ended = ended_since(self._watch, live, await self.newest_attempts({job.id for job in live}))",
                "ended: dict[int, int] = {}",
            ),
        ),
        (*_MOVING, "has_run_since"),
    ),
    Mutant(
        "a state that was moved does not ask nodes that are not in the cluster file",
        (Edit(_SAFE_MODE + "control.py", "[*self.absent(), *(name for", "[*(name for"),),
        CONTROL,
    ),
    Mutant(
        "a node that cannot say what it ran counts as asked",
        (Edit(_SAFE_MODE + "control.py", "self._examined.pop(node, None)", "pass"),),
        CONTROL,
    ),
    Mutant(
        "an agent that was left behind reaches the generation of its successor",
        (Edit(_SAFE_MODE + "control.py", "_GENERATIONS_AHEAD = 1000", "_GENERATIONS_AHEAD = 0"),),
        (*_MOVING, "still_runs"),
    ),
    Mutant(
        "an agent that has a successor is not told",
        (Edit("src/ugro/remote/runs/watch.py", "if newest > self._generation:", "if False:"),),
        ("tests/integration/runs/test_run_watch.py", "-k", "successor"),
    ),
    Mutant(
        "lost records are taken for a new state",
        (
            Edit(
                "src/ugro/agent/safe_mode/records.py",
                "return Comparison(is_checked=False, mark=mark, is_moved=is_moved)",
                "return Comparison()",
            ),
        ),
        UNCHECKED,
    ),
    Mutant(
        "the generation stays below what nodes have met",
        (
            Edit(_STANDING, "str(max(numbers(db).generation, generation))", "str(numbers(db).generation)"),
            Edit(
                "src/ugro/agent/safe_mode/reconcile.py",
                "        self._watch.identity.generation = done.generation\n        await self._control",
                "        await self._control",
            ),
        ),
        GENERATIONS,
    ),
    Mutant(
        "a job that waited before the agent started does not wait for what nodes say",
        (Edit(_FIRST_ANSWERS, "return self._held is None or job in self._held", "return False"),),
        WHOLE_COPY,
    ),
    Mutant(
        "a state of before the records is taken for a new one",
        (
            Edit(
                "src/ugro/agent/safe_mode/records.py",
                "if not numbers.reserved and mark is None:",
                "if not numbers.reserved:",
            ),
        ),
        RECORDS,
    ),
    Mutant(
        "a job that ended meanwhile is started again",
        (Edit("src/ugro/store/adoption.py", "            return _settle(db, change)\n", "            return []\n"),),
        OLDER,
    ),
    Mutant(
        "in safe mode jobs are taken",
        (
            Edit(
                "src/ugro/agent/jobs/service.py",
                'point("submit.begun")\n        self._engine.safe_mode.check("and takes no jobs")',
                'point("submit.begun")',
            ),
            Edit(
                "src/ugro/agent/jobs/service.py",
                'self._engine.safe_mode.check("and takes no jobs")  # it may have begun meanwhile',
                "pass",
            ),
        ),
        OLDER,
    ),
)

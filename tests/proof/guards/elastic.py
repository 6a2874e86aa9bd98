"""The guards of trainings that go on without ranks that are lost: one group, one process for each rank."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_FORMING = "ugro.train.rules.failures"
_STANDING = "ugro.kernel.jobs.engine.rules.attempt"
_MEETING = "ugro.train.elastic_meeting"
_RUN = "ugro.node.runs.ranks"

_MEMBERSHIP = "ugro.train.elastic"
_STEPPING = "ugro.train.stepping"
_ENDED = "ugro.train.reporting"
_RUN_STATE = "ugro.node.runs.run_state"

_STEPS = ("tests/integration/train/test_elastic.py", "-k", "counts_only")
_ENDS = ("tests/integration/runs/test_ended_ranks.py",)
_RULES = ("tests/unit/policy/elastic",)
_STORE = ("tests/unit/train/test_meeting.py",)
_RUNS = ("tests/integration/runs/test_elastic_run.py",)

MUTANTS = (
    Mutant(
        "a rank that computes is left behind",
        (
            Edit(
                _FORMING,
                "decide",
                "any((_may_come(rank, forming) for rank in forming.previous - forming.ready))",
                "False",
            ),
        ),
        _RULES,
    ),
    Mutant(
        "ranks without a state go on alone",
        (Edit(_FORMING, "decide", "not trained", "False"),),
        _RULES,
    ),
    Mutant(
        "a rank that was left behind goes on",
        (Edit(_MEETING, "Meeting._checked", "self._place(formed) is None", "False"),),
        _STORE,
    ),
    Mutant(
        "each rank publishes a group of its own",
        (
            Edit(
                _MEETING,
                "Meeting._decide",
                "self._store.compare_set(f'{number}/members', '', json.dumps({'members': members, 'asked': asked}))",
                "self._store.set(f'{number}/members/{self.rank}', json.dumps({'members': members, 'asked': asked}))",
            ),
        ),
        _STORE,
    ),
    Mutant(
        "a rank joins while the others are at an exchange",
        (Edit(_MEETING, "Meeting._decide", "not all((one.takes for one in ready.values()))", "False"),),
        _STORE,
    ),
    Mutant(
        "an order that comes twice starts a rank twice",
        (
            Edit(
                _RUN,
                "may_start_again",
                "if rank.starts != starts or rank.is_running or (not rank.has_failed):\n    return False",
                "",
            ),
        ),
        _RUNS,
    ),
    Mutant(
        "a rank is started again beside what its last process left",
        (
            Edit(_RUN, "may_start_again", "not left", "True"),
            Edit(_RUN, "may_start_again", "terminate.kill_child(pid)", "pass"),
        ),
        _RUNS,
    ),
    Mutant(
        "a rank is started again before the others have gone on without it",
        (
            Edit(
                _STANDING,
                "rejoin",
                "one.can_start and is_due and (one.starts <= view.rejoins) and (one.rank not in view.members)",
                "one.can_start and is_due and (one.starts <= view.rejoins)",
            ),
        ),
        _RULES,
    ),
    Mutant(
        "an attempt succeeds although a rank of its last group failed",
        (Edit(_STANDING, "is_done", "view.members <= done", "bool(view.members & done)"),),
        _RULES,
    ),
    Mutant(
        "an attempt goes on with fewer ranks than it needs",
        (Edit(_STANDING, "problem", "len(left) < view.min_ranks", "False"),),
        _RULES,
    ),
    Mutant(
        "a step counts before the devices have its gradients",
        (Edit(_MEMBERSHIP, "Elastic.agreed", "all((is_there for is_there, *_ in said))", "True"),),
        _STEPS,
    ),
    Mutant(
        "an optimizer runs before ranks know of each other's gradients",
        (
            Edit(
                _STEPPING,
                "Stepping.bucket",
                "_at_end_of_backward(partial(self._agree, self._moments))",
                "self._gathering = self.group.gather(self._word(self._moments).numbers())",
            ),
        ),
        _STEPS,
    ),
    Mutant(
        "a rank has succeeded whose script raised",
        (
            Edit(
                _ENDED,
                "_note",
                "os.getpid() != pid or not has_ended() or _waits_for_children()",
                "os.getpid() != pid or _waits_for_children()",
            ),
        ),
        _ENDS,
    ),
    Mutant(
        "a script has ended that raised after a call of sys.exit",
        (Edit(_ENDED, "_Exit.is_well", "not hasattr(sys, 'last_type')", "True"),),
        _ENDS,
    ),
    Mutant(
        "a rank that was killed has succeeded whatever it noted",
        (
            Edit(
                _RUN_STATE,
                "RunLife._has_ended_by_itself",
                "started is not None and started == b'%d' % rank.start_ticks",
                "not started or started == b'%d' % rank.start_ticks",
            ),
        ),
        _ENDS,
    ),
)

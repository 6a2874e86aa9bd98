"""The guards of trainings that go on without ranks that are lost: one group, one process for each rank."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_FORMING = "src/ugro/policy/elastic/forming.py"
_STANDING = "src/ugro/policy/elastic/standing.py"
_MEETING = "src/ugro/train/elastic/meeting.py"
_RUN = "src/ugro/remote/runs/elastic.py"

_RULES = ("tests/unit/policy/elastic",)
_STORE = ("tests/unit/train/test_meeting.py",)
_RUNS = ("tests/integration/runs/test_elastic_run.py",)

MUTANTS = (
    Mutant(
        "a rank that computes is left behind",
        (
            Edit(
                _FORMING,
                "    if any(_may_come(rank, forming) for rank in forming.previous - forming.ready):\n",
                "    if False:\n",
            ),
        ),
        _RULES,
    ),
    Mutant(
        "ranks without a state go on alone",
        (Edit(_FORMING, "    if not trained:\n", "    if False:\n"),),
        _RULES,
    ),
    Mutant(
        "a rank that was left behind goes on",
        (Edit(_MEETING, "        if self._place(formed) is None:\n", "        if False:\n"),),
        _STORE,
    ),
    Mutant(
        "each rank publishes a group of its own",
        (
            Edit(
                _MEETING,
                'self._store.compare_set(f"{number}/members", "", ',
                'self._store.set(f"{number}/members/{self.rank}", ',
            ),
        ),
        _STORE,
    ),
    Mutant(
        "a rank joins while the others are at an exchange",
        (Edit(_MEETING, "        if not all(one.takes for one in ready.values()):", "        if False:"),),
        _STORE,
    ),
    Mutant(
        "an order that comes twice starts a rank twice",
        (
            Edit(
                _RUN,
                "    if rank.starts != starts or rank.is_running or not rank.has_failed:\n        return False\n",
                "",
            ),
        ),
        _RUNS,
    ),
    Mutant(
        "a rank is started again beside what its last process left",
        (
            Edit(_RUN, "    return not left\n", "    return True\n"),
            Edit(_RUN, "        terminate.kill_child(pid)\n", "        pass\n"),
        ),
        _RUNS,
    ),
    Mutant(
        "a rank is started again before the others have gone on without it",
        (Edit(_STANDING, " and one.rank not in view.members:", ":"),),
        _RULES,
    ),
    Mutant(
        "an attempt succeeds although a rank of its last group failed",
        (Edit(_STANDING, "view.members <= done", "bool(view.members & done)"),),
        _RULES,
    ),
    Mutant(
        "an attempt goes on with fewer ranks than it needs",
        (Edit(_STANDING, "    if len(left) < view.min_ranks:\n", "    if False:\n"),),
        _RULES,
    ),
)

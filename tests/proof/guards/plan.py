"""The guards of plans before a launch: where a job may run, and what a trial may leave."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

PLACED = ("tests/unit/policy/scheduling/test_placement.py", "-k", "names_its_nodes or named_nodes")
PREDICTED = ("tests/unit/policy/planning/test_prediction.py",)
TRIED = ("tests/integration/train/test_trial.py", "-k", "alone")

MUTANTS = (
    Mutant(
        "a job that names its nodes may run on others",
        (
            Edit(
                "src/ugro/policy/scheduling/demand.py",
                "issuperset(self.resources.labels) and (not only or shape.name in only)",
                "issuperset(self.resources.labels)",
            ),
        ),
        PLACED,
    ),
    Mutant(
        "named nodes are not told from others with the same hardware",
        (
            Edit(
                "src/ugro/policy/scheduling/scheduler.py",
                "        if named := self._waiting.named_nodes():\n",
                "        if named := frozenset[str]():\n",
            ),
        ),
        PLACED,
    ),
    Mutant(
        "a trial writes checkpoints",
        (
            Edit(
                "src/ugro/train/run.py",
                "path = self._save() if self._trial is None else None",
                "path = self._save()",
            ),
        ),
        TRIED,
    ),
    Mutant(
        "a trial goes on with the script when it is over",
        (Edit("src/ugro/train/trial.py", "    os._exit(0)\n", "    raise SystemExit(0)\n"),),
        TRIED,
    ),
    Mutant(
        "the slowest link of a set does not count",
        (
            Edit(
                "src/ugro/policy/planning/exchange.py",
                "slowest_s = max(seconds for seconds, _ in hops)",
                "slowest_s = min(seconds for seconds, _ in hops)",
            ),
        ),
        PREDICTED,
    ),
)

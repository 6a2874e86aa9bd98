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
                "ugro.kernel.jobs.scheduling.demand",
                "Need._is_right",
                "shape.labels.issuperset(self.resources.labels) and (not only or shape.name in only)",
                "shape.labels.issuperset(self.resources.labels)",
            ),
        ),
        PLACED,
    ),
    Mutant(
        "named nodes are not told from others with the same hardware",
        (
            Edit(
                "ugro.kernel.jobs.scheduling.scheduler", "_Pass.__init__", "self._waiting.named_nodes", "frozenset[str]"
            ),
        ),
        PLACED,
    ),
    Mutant(
        "a trial writes checkpoints",
        (Edit("ugro.train.run", "Run.checkpoint", "self._save() if self._trial is None else None", "self._save()"),),
        TRIED,
    ),
    Mutant(
        "a trial goes on with the script when it is over",
        (Edit("ugro.train.trial", "leave", "os._exit(0)", "raise SystemExit(0)"),),
        TRIED,
    ),
    Mutant(
        "the slowest link of a set does not count",
        (
            Edit(
                "ugro.features.planning.rules",
                "Exchange.seconds",
                "max((seconds for seconds, _ in hops))",
                "min((seconds for seconds, _ in hops))",
            ),
        ),
        PREDICTED,
    ),
)

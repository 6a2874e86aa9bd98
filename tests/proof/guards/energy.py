"""The guards that keep the meter of a run's energy apart from the run."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

METER = "tests/integration/runs/test_meter.py"

MUTANTS = (
    Mutant(
        "a driver that hangs keeps a run from ending",
        (Edit("ugro.features.training.on_node", "Meter.finish", "within_s", "None"),),
        (METER, "-k", "hangs"),
    ),
)

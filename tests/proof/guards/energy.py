"""The guards that keep the meter of a run's energy apart from the run."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

METER = "tests/integration/runs/test_meter.py"

MUTANTS = (
    Mutant(
        "a driver that hangs keeps a run from ending",
        (Edit("src/ugro/remote/runs/meter.py", "is_readable(self._done, within_s)", "is_readable(self._done, None)"),),
        (METER, "-k", "hangs"),
    ),
)

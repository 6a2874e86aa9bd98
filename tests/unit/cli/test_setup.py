"""How far a setup is: a line for each node that is not ready, as far as there is room."""

from __future__ import annotations

from ugro.features.environments.cli import progress_lines
from ugro.features.environments.model import SetupStep


def test_each_busy_node_has_a_line_and_ready_ones_are_counted() -> None:
    steps = {
        "n1": SetupStep("n1", "ready", is_last=True),
        "gpu22": SetupStep("gpu22", "installing", 12, 40, 3 << 20),
        "n3": SetupStep("n3", "sending", 0, 40),
    }
    assert progress_lines(steps, 10) == [
        "1 of 3 nodes are ready",
        "  gpu22  installing, 12 of 40 packages, 3.0 MiB",
        "  n3     sending, 40 packages",
    ]


def test_of_many_nodes_those_that_do_not_fit_are_counted() -> None:
    steps = {f"n{n}": SetupStep(f"n{n}", "connecting") for n in range(9)}
    lines = progress_lines(steps, 5)
    assert len(lines) == 5
    assert lines[-1] == "  … and 6 more nodes"

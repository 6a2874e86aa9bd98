"""When the reaper of a run with a lease acts, and that an agent waits for longer than that."""

from __future__ import annotations

import pytest

from ugro.kernel.jobs.engine.leases import dead_after_s
from ugro.node.runs.reaper import (
    KILL,
    KILL_AFTER_S,
    PATIENCE_S,
    TELL,
    WAIT,
    KeptLease,
    Lease,
    grace_left_s,
    killed_after_s,
)

_START = 1000.0
_LEASE_S = 10.0
_GRACE_S = 5.0
_DRIFT = 1.01
_LOADED_S = 5.0  # for a machine that is slow to run the reaper, and to end what it killed


def kept() -> KeptLease:
    return KeptLease(Lease("7.1", _LEASE_S, _GRACE_S, _START))


@pytest.mark.parametrize(
    ("silent_s", "step"),
    [
        (_LEASE_S, WAIT),
        (_LEASE_S + PATIENCE_S - 0.1, WAIT),
        (_LEASE_S + PATIENCE_S + 0.1, TELL),
        (_LEASE_S + _GRACE_S + KILL_AFTER_S - 0.1, TELL),
        (_LEASE_S + _GRACE_S + KILL_AFTER_S + 0.1, KILL),
        (86_400, KILL),  # the machine slept
    ],
)
def test_a_supervisor_gets_its_time_and_is_told_before_its_ranks_are_killed(silent_s: float, step: str) -> None:
    assert kept().look(_START + silent_s, heard_s=_START) == step
    assert kept().look(_START + silent_s, heard_s=0.0) == step


def test_renewals_keep_a_lease_until_it_is_over_once() -> None:
    lease = kept()
    for passed_s in range(0, 100, 9):
        assert lease.look(_START + passed_s, heard_s=_START + passed_s - 8) == WAIT
    over_s = _START + 91 + _LEASE_S + PATIENCE_S
    assert lease.look(over_s + 0.1, heard_s=_START + 91) == TELL
    assert lease.look(over_s + 0.2, heard_s=over_s + 0.2) == TELL, "the agent counts it as dead, perhaps"
    assert lease.look(over_s + 0.2 + _GRACE_S + KILL_AFTER_S, heard_s=over_s + 0.2) == KILL


def test_a_supervisor_that_comes_late_gives_its_ranks_no_more_time() -> None:
    assert grace_left_s(_LEASE_S, _GRACE_S, silent_s=_LEASE_S) == _GRACE_S
    assert grace_left_s(_LEASE_S, _GRACE_S, silent_s=_LEASE_S + 2) == _GRACE_S - 2
    assert grace_left_s(_LEASE_S, _GRACE_S, silent_s=3600) == 0


@pytest.mark.parametrize("lease_s", [0.5, 10, 300, 86_400])
@pytest.mark.parametrize("grace_s", [0, 1, 30, 3600])
def test_an_agent_waits_until_a_node_with_a_slow_clock_must_have_killed_the_run(lease_s: float, grace_s: float) -> None:
    assert killed_after_s(lease_s, grace_s) * _DRIFT + _LOADED_S < dead_after_s(lease_s, grace_s)

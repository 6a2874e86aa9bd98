"""Why an environment was not made, as a failure of a job."""

from __future__ import annotations

import pytest

from ugro.features.environments.rules.imports import failure_of, lack_of_packages
from ugro.kernel.jobs.engine.rules.retry import LASTING
from ugro.kernel.jobs.model import Cause
from ugro.kernel.support.errors import EnvFailed


@pytest.mark.parametrize("kind", ["not-found", "hash", "no-access", "python-missing", "unsafe-folder", "crashed"])
def test_what_would_happen_again_is_not_retried(kind: str) -> None:
    failure = failure_of(EnvFailed("nosuch was not found", subject="n1", cause=kind, tail=("one", "two")))
    assert failure.cause is Cause.SETUP_FAILED
    assert failure.cause in LASTING
    assert failure.reason == "the Python environment was not made on n1: nosuch was not found"
    assert failure.last_lines == ("one", "two")
    assert failure.hint


def test_a_full_disk_and_a_lost_network_are_what_they_are_for_other_starts() -> None:
    full = failure_of(EnvFailed("the disk is full", subject="n1", cause="no-space"))
    assert (full.cause, full.node) == (Cause.DISK_FULL, "n1")
    for cause in ("no-network", "server-failed"):
        passing = failure_of(EnvFailed("no index", cause=cause))
        assert passing.cause is Cause.START_FAILED
        assert passing.cause not in LASTING
        assert passing.hint


def test_an_environment_that_was_only_checked_is_not_said_to_be_made() -> None:
    failure = failure_of(EnvFailed("/e does not exist on this node", subject="n1", cause="not-found"), is_existing=True)
    assert failure.reason == "the Python environment cannot be used on n1: /e does not exist on this node"
    assert "this path" in (failure.hint or "")
    assert failure.cause is Cause.SETUP_FAILED


def test_an_installer_that_was_killed_is_tried_again_and_no_lines_are_promised_where_there_are_none() -> None:
    killed = failure_of(EnvFailed("the installer was killed", subject="n1", cause="killed"))
    assert (killed.cause, killed.node) == (Cause.START_FAILED, "n1")
    assert killed.cause not in LASTING
    assert "memory" in (killed.hint or "")
    silent, said = (failure_of(EnvFailed("it ended", cause="crashed", tail=tail)).hint for tail in ((), ("why",)))
    assert "last lines" not in (silent or "")
    assert "last lines" in (said or "")


def test_an_environment_that_lacks_an_import_is_named() -> None:
    failure = lack_of_packages({"n1": ["yaml"], "n2": []}, is_ours=True)
    assert failure is not None
    assert failure.reason == "not started: the Python environment on n1 lacks yaml, which the script imports"
    assert failure.hint == "add the package of yaml to environment.packages"
    assert lack_of_packages({"n1": []}, is_ours=True) is None

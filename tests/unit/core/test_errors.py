"""Errors travel from the agent to the client and stay what they were."""

from __future__ import annotations

import json

import pytest

from ugro.kernel.support.errors import (
    ConfigError,
    NotAllowed,
    NotFound,
    RemoteFailure,
    TimedOut,
    UgroError,
    Unreachable,
    Unsatisfiable,
    UsageError,
    error_from_wire,
)
from ugro.kernel.support.state_dir import StateDir

EXIT_CODES = {
    UgroError: 1,
    RemoteFailure: 1,
    UsageError: 2,
    ConfigError: 2,
    Unsatisfiable: 3,
    NotFound: 4,
    Unreachable: 5,
    NotAllowed: 6,
    TimedOut: 124,
}


@pytest.mark.parametrize("kind", EXIT_CODES)
def test_an_error_is_the_same_after_the_journey(kind: type[UgroError]) -> None:
    sent = kind("it broke", hint="mend it", subject="gpu1")
    got = error_from_wire(json.loads(json.dumps(sent.to_wire())))
    assert type(got) is kind
    assert (got.message, got.hint, got.subject) == ("it broke", "mend it", "gpu1")
    assert str(got) == "gpu1: it broke"
    assert got.exit_code == EXIT_CODES[kind]


def test_the_cause_of_an_unreachable_node_travels_too() -> None:
    got = error_from_wire(Unreachable("refused", cause="refused").to_wire())
    assert isinstance(got, Unreachable)
    assert got.cause == "refused"


def test_every_kind_has_its_own_word() -> None:
    assert len({kind.kind for kind in EXIT_CODES}) == len(EXIT_CODES)


def test_an_error_of_a_newer_agent_is_still_an_error() -> None:
    got = error_from_wire({"kind": "melted", "message": "too hot", "subject": None, "colour": "red"})
    assert type(got) is UgroError
    assert (str(got), got.hint, got.exit_code) == ("too hot", None, 1)


def test_an_error_that_says_nothing_is_still_an_error() -> None:
    assert str(error_from_wire({})) == "unknown error"


def test_the_state_directory_follows_the_environment() -> None:
    assert str(StateDir.find({"UGRO_HOME": "/srv/a/../b", "HOME": "/home/ann"}).path) == "/srv/b"
    assert str(StateDir.find({"HOME": "/home/ann"}).path) == "/home/ann/.ugro"
    assert StateDir.find({"UGRO_HOME": "~nobody-knows-this-user/x"}).path.is_absolute()


def test_a_state_directory_that_cannot_be_used_names_itself_and_the_way_out() -> None:
    error = StateDir.find({"UGRO_HOME": "/srv/b"}).unusable(OSError(28, "No space left on device"))
    assert str(error) == "/srv/b cannot be used: no space left on device"
    assert "UGRO_HOME=DIR" in str(error.hint)

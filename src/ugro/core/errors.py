"""Expected errors: what happened, to which node or job, and a hint on what to do.

Each kind has one exit code. The API sends an error as ``to_wire``, and the client raises the same class again.
"""

from __future__ import annotations

from typing import Any, ClassVar


class UgroError(Exception):
    kind: ClassVar[str] = "failed"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, subject: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.subject = subject

    def __str__(self) -> str:
        return f"{self.subject}: {self.message}" if self.subject else self.message

    def to_wire(self) -> dict[str, Any]:
        return {"kind": self.kind, "message": self.message, "hint": self.hint, "subject": self.subject}


class UsageError(UgroError):
    kind = "usage"
    exit_code = 2


class ConfigError(UsageError):
    """A cluster file or an override that cannot be used; ``message`` names the file, the line and the key."""

    kind = "config"


class Unsatisfiable(UgroError):
    kind = "unsatisfiable"
    exit_code = 3


class NotFound(UgroError):
    kind = "not_found"
    exit_code = 4


class NotAllowed(UgroError):
    kind = "not_allowed"
    exit_code = 6


class TimedOut(UgroError):
    kind = "timed_out"
    exit_code = 124


class Interrupted(UgroError):
    """By Ctrl-C; the message says what became of what was under way."""

    kind = "interrupted"
    exit_code = 130


class Unreachable(UgroError):
    """A node, or the agent, cannot be reached. That does not mean that it has failed."""

    kind = "unreachable"
    exit_code = 5

    def __init__(
        self, message: str, *, hint: str | None = None, subject: str | None = None, cause: str = "unknown"
    ) -> None:
        super().__init__(message, hint=hint, subject=subject)
        self.cause = cause

    def to_wire(self) -> dict[str, Any]:
        return {**super().to_wire(), "cause": self.cause}


class RemoteFailure(UgroError):
    """The node program was reached and could not carry out the call."""

    kind = "remote"

    def __init__(
        self, message: str, *, hint: str | None = None, subject: str | None = None, cause: str = "unknown"
    ) -> None:
        super().__init__(message, hint=hint, subject=subject)
        self.cause = cause  # the node program's stable word for the kind of refusal

    def to_wire(self) -> dict[str, Any]:
        return {**super().to_wire(), "cause": self.cause}


_KINDS: dict[str, type[UgroError]] = {
    kind.kind: kind
    for kind in (
        UgroError,
        UsageError,
        ConfigError,
        Unsatisfiable,
        NotFound,
        NotAllowed,
        TimedOut,
        Interrupted,
        Unreachable,
        RemoteFailure,
    )
}


def error_from_wire(wire: dict[str, Any]) -> UgroError:
    kind = _KINDS.get(str(wire.get("kind")), UgroError)
    fields: dict[str, Any] = {"hint": wire.get("hint"), "subject": wire.get("subject")}
    if kind in (Unreachable, RemoteFailure):
        fields["cause"] = str(wire.get("cause", "unknown"))
    return kind(str(wire.get("message", "unknown error")), **fields)

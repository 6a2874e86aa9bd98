"""Expected errors: what happened, to which node or job, and a hint on what to do.

Each kind has one exit code. The API sends an error as ``to_wire``, and the client raises the same class again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

_MOST_NEWS = 3  # in one message about a cluster file


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

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        subject: str | None = None,
        others: Sequence[Sequence[str | None]] = (),
    ) -> None:
        """``others``: the message and the hint of each mistake beside the first."""
        super().__init__(message, hint=hint, subject=subject)
        self.others = tuple((str(text), hint) for text, hint in others)

    def to_wire(self) -> dict[str, Any]:
        return {**super().to_wire(), **({"others": self.others} if self.others else {})}


class Unallowed(ConfigError):
    """A cluster file that was found in a folder does what its user has not allowed (yet)."""

    kind = "unallowed"

    def __init__(self, file: str, digest: str, lines: tuple[str, ...], before: tuple[str, ...] | None = None) -> None:
        """``lines``: all that it does; ``before``: the same of what was allowed last."""
        self.file, self.digest, self.lines, self.before = file, digest, lines, before
        what = "not used until you allow it" if before is None else "the edit is not used until you allow it"
        shown = self.news[:_MOST_NEWS]
        more = f"; and {len(self.news) - len(shown)} more" if len(shown) < len(self.news) else ""
        import shlex  # rarely needed

        hint = f"see all that it does, and allow it: ugro allow {shlex.quote(file)}"
        super().__init__(f"{file}: {what}: {'; '.join(shown)}{more}", hint=hint)

    @property
    def news(self) -> list[str]:
        """What was not allowed before: with a + if it is new, with a - if it is gone; at the first time, all of it."""
        if self.before is None:
            return list(self.lines)
        then, now = set(self.before), set(self.lines)
        new = [f"+ {line}" for line in self.lines if line not in then]
        return [*new, *(f"- {line}" for line in self.before if line not in now)] or ["masked values changed"]

    def to_wire(self) -> dict[str, Any]:
        own = {"file": self.file, "digest": self.digest, "lines": self.lines, "before": self.before}
        return {**super().to_wire(), **own}


class Wanted(UgroError):
    """The agent needs a file or folder of a client on another machine, which sends it and asks again."""

    kind = "wanted"

    def __init__(self, what: str, path: str, params: Mapping[str, Any] | None = None) -> None:
        """``what``: text, hash, place, script, code or folder."""
        self.what, self.path, self.params = what, path, dict(params or {})
        super().__init__(f"the agent needs {path} of your machine", hint="this client cannot send it: use `ugro`")

    def to_wire(self) -> dict[str, Any]:
        return {**super().to_wire(), "what": self.what, "path": self.path, "params": self.params}


class Unsatisfiable(UgroError):
    kind = "unsatisfiable"
    exit_code = 3


class NotFound(UgroError):
    kind = "not_found"
    exit_code = 4


class NotAllowed(UgroError):
    kind = "not_allowed"
    exit_code = 6


class Damaged(UgroError):
    """The state on disk cannot be trusted; nothing is written to it until a backup is restored."""

    kind = "damaged"


class StoreAway(UgroError):
    """The database server of the state does not answer. The agent stands still until it does."""

    kind = "store_away"
    exit_code = 5


class InSafeMode(NotAllowed):
    """The agent is in safe mode: a request that changes jobs is refused."""

    kind = "safe_mode"


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


class EnvFailed(RemoteFailure):
    """A Python environment could not be made, or an existing one cannot be used. Nothing half-made is left.

    ``cause`` is one of: not-found (a package or version), no-space, no-network, no-access (the index wants a login),
    hash, python-missing, no-contents (installer or wheels have not arrived), unsafe-folder, killed (the installer, by
    somebody else), server-failed (an answer of the index, or a download that broke off: may pass), crashed.
    """

    kind = "environment"

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        subject: str | None = None,
        cause: str = "unknown",
        tail: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, hint=hint, subject=subject, cause=cause)
        self.tail = tail  # the installer's last lines; without passwords

    def to_wire(self) -> dict[str, Any]:
        return {**super().to_wire(), "tail": self.tail}


_KINDS: dict[str, type[UgroError]] = {
    kind.kind: kind
    for kind in (
        UgroError,
        UsageError,
        ConfigError,
        Unsatisfiable,
        NotFound,
        NotAllowed,
        Damaged,
        StoreAway,
        InSafeMode,
        TimedOut,
        Interrupted,
        Unreachable,
        RemoteFailure,
        EnvFailed,
    )
}


def error_from_wire(wire: dict[str, Any]) -> UgroError:
    if wire.get("kind") == Unallowed.kind:
        before = wire.get("before")
        lines = tuple(map(str, wire["lines"]))
        return Unallowed(str(wire["file"]), str(wire["digest"]), lines, tuple(map(str, before)) if before else None)
    if wire.get("kind") == Wanted.kind:
        return Wanted(str(wire["what"]), str(wire["path"]), wire.get("params"))
    kind = _KINDS.get(str(wire.get("kind")), UgroError)
    fields: dict[str, Any] = {"hint": wire.get("hint"), "subject": wire.get("subject")}
    if kind in (Unreachable, RemoteFailure, EnvFailed):
        fields["cause"] = str(wire.get("cause", "unknown"))
    if kind is EnvFailed:
        fields["tail"] = tuple(map(str, wire.get("tail") or ()))
    if kind is ConfigError:
        fields["others"] = wire.get("others") or ()
    return kind(str(wire.get("message", "unknown error")), **fields)

"""What ``client.exec`` yields: output as it arrives, then how the command ended on each node."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.core.errors import UgroError, error_from_wire
from ugro.remote import wire


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Bytes that a command wrote on a node."""

    node: str
    is_stderr: bool
    content: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended on a node: an exit code, a signal, or an error if it could not run."""

    node: str
    code: int | None = None
    signal: int | None = None
    error: UgroError | None = None
    unkillable: tuple[int, ...] = ()  # its processes that SIGKILL did not end

    @property
    def exit_code(self) -> int:
        if self.error is not None:
            return self.error.exit_code
        return 128 + self.signal if self.signal else (self.code or 0)


def how_it_went(node: str, kind: int, payload: bytes) -> OutputPiece | Ended:
    if kind in (wire.OUT, wire.ERR):
        return OutputPiece(node, kind == wire.ERR, payload)
    value = wire.parse(payload)
    if kind == wire.ERROR:
        return Ended(node, error=error_from_wire(value))
    left = tuple(int(pid) for pid in value.get("unkillable", ()))
    return Ended(node, code=value.get("code"), signal=value.get("signal"), unkillable=left)

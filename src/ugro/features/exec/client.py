"""``client.exec``: yields output as it arrives, then how the command ended on each node."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ugro.features.exec.operations import RunCommand
from ugro.kernel.support.errors import UgroError, UsageError, error_from_wire
from ugro.node import wire


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


def execute(
    stream: Callable[..., Any],
    nodes: Sequence[str],
    argv: Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    key: str | None,
) -> Generator[OutputPiece | Ended, None, None]:
    if isinstance(nodes, str) or isinstance(argv, str):
        raise UsageError("nodes and argv are lists", hint='client.exec(["@all"], ["hostname"])')
    asked = RunCommand(key or os.urandom(8).hex(), tuple(nodes), tuple(argv), cwd, dict(env or {}))
    decoder = wire.Decoder()
    names: list[str] = []
    # No time limit: a command may print nothing for hours.
    for piece in stream(*asked.to_wire(), timeout_s=None):
        for kind, index, payload in decoder.feed(piece):
            if kind == wire.CALL:
                names = list(wire.parse(payload)["nodes"])
            else:
                yield _how_it_went(names[index], kind, payload)


def _how_it_went(node: str, kind: int, payload: bytes) -> OutputPiece | Ended:
    if kind in (wire.OUT, wire.ERR):
        return OutputPiece(node, kind == wire.ERR, payload)
    value = wire.parse(payload)
    if kind == wire.ERROR:
        return Ended(node, error=error_from_wire(value))
    left = tuple(int(pid) for pid in value.get("unkillable", ()))
    return Ended(node, code=value.get("code"), signal=value.get("signal"), unkillable=left)

"""``ugro exec``: the same command on many nodes, each line with its node's name."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

import click

from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.client import Client, Ended
from ugro.client import Output as Piece
from ugro.core.errors import NotFound, Unreachable, UsageError

_LONGEST_LINE = 64 * 1024
_EXAMPLE = "for example: ugro exec @all -- nvidia-smi"


class ExecCommand(click.Command):
    """Cut at the ``--`` before click sees it: options stand anywhere before it, and all behind it is the command's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["argv"] = args[at + 1 :] if at < len(args) else None
        return super().parse_args(ctx, args[:at])


@click.command("exec", cls=ExecCommand)
@click.option("--cwd", help="Where to run it on the node; default: the home folder.")
@click.option("--env", "-e", multiple=True, metavar="KEY=VALUE", help="Add to its environment; may be repeated.")
@click.option("--no-prefix", is_flag=True, help="Leave out the nodes' names: the bytes as they are.")
@json_option
@click.argument("nodes", nargs=-1, metavar="@all|NODE... -- COMMAND...")
@pass_session
@click.pass_context
def exec_(
    ctx: click.Context, session: Session, nodes: tuple[str, ...], cwd: str | None, env: tuple[str, ...], no_prefix: bool
) -> int:
    """Run COMMAND on nodes at once and show its output as it comes.

    Nodes are names, @all or @label. The command gets no stdin and ends, with all it started, when it is done or on
    Ctrl-C. Exit code: the command's own for one node; for several 0 if all were 0, otherwise 1, or 5 if a node
    could not be reached.
    """
    argv = _command(nodes, ctx.meta["argv"])
    environment = _environment(env)
    client = session.client()
    printer = _Json(session.output) if session.output.is_json else _Lines(session.output, has_prefix=not no_prefix)
    ended: list[Ended] = []
    key = os.urandom(8).hex()
    with _cancel_on_interrupt(client, key, session.output) as interrupted:
        for event in client.exec(nodes, argv, cwd=cwd, env=environment, key=key):
            if isinstance(event, Piece):
                printer.piece(event)
            else:
                ended.append(event)
                printer.ended(event)
    _summarise(session.output, ended)
    return 130 if interrupted else _exit_code(ended)


def _command(nodes: tuple[str, ...], argv: list[str] | None) -> list[str]:
    if argv is None:
        raise UsageError("say where the command begins with --", hint=_EXAMPLE)
    if not nodes:
        raise UsageError("say on which nodes, before the --", hint=_EXAMPLE)
    if not argv:
        raise UsageError("there is no command after the --", hint=_EXAMPLE)
    return argv


def _environment(pairs: tuple[str, ...]) -> dict[str, str]:
    bad = [pair for pair in pairs if not pair.partition("=")[0] or "=" not in pair]
    if bad:
        raise UsageError(f"--env {bad[0]}: expected KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


@contextlib.contextmanager
def _cancel_on_interrupt(client: Client, key: str, output: Output) -> Iterator[list[int]]:
    """The first Ctrl-C ends the command on the nodes and waits for their word; the second leaves at once."""
    interrupted: list[int] = []

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(signum)
        output.note("ending it on the nodes (Ctrl-C again leaves at once)")
        try:
            client.cancel(key)
        except (NotFound, Unreachable):
            # It has not begun or has just ended, or nobody can tell: hanging up ends whatever there is.
            raise KeyboardInterrupt from None

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class _Lines:
    """Whole lines, so that nodes never mix within one; bytes pass through as they are."""

    def __init__(self, output: Output, *, has_prefix: bool) -> None:
        self._output = output
        self._has_prefix = has_prefix
        self._rest: dict[tuple[str, bool], bytes] = {}

    def piece(self, piece: Piece) -> None:
        if not self._has_prefix:
            self._output.raw(piece.content, to_stderr=piece.is_stderr)
            return
        key = (piece.node, piece.is_stderr)
        *lines, rest = (self._rest.get(key, b"") + piece.content).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._rest[key] = rest
        self._write(key, lines)

    def ended(self, ended: Ended) -> None:
        for is_stderr in (False, True):
            if rest := self._rest.pop((ended.node, is_stderr), b""):
                self._write((ended.node, is_stderr), [rest])

    def _write(self, key: tuple[str, bool], lines: list[bytes]) -> None:
        node, is_stderr = key
        if lines:
            prefix = self._output.styled(f"{node} | ", "id").encode()
            self._output.raw(b"".join(prefix + line + b"\n" for line in lines), to_stderr=is_stderr)


class _Json:
    """NDJSON: what was written and how each node ended."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def piece(self, piece: Piece) -> None:
        stream = "stderr" if piece.is_stderr else "stdout"
        # Bytes that are no UTF-8 survive as lone surrogates, which JSON can carry.
        self._output.document({"node": piece.node, stream: piece.content.decode("utf-8", "surrogateescape")})

    def ended(self, ended: Ended) -> None:
        error = ended.error.to_wire() if ended.error else None
        self._output.document(
            {
                "node": ended.node,
                "code": ended.code,
                "signal": ended.signal,
                "exit_code": ended.exit_code,
                "error": error,
                "unkillable": ended.unkillable,
            }
        )


def _summarise(output: Output, ended: list[Ended]) -> None:
    for end in ended:
        if end.unkillable:
            pids = ", ".join(map(str, end.unkillable))
            hint = "they wait for a disk or a driver; see: ps -l there"
            output.warn(f"{end.node}: even SIGKILL did not end {pids}", hint)
    failed = sorted((end for end in ended if end.exit_code), key=lambda end: end.node)
    for end in failed:
        if end.error is not None:
            output.warn(str(end.error), end.error.hint)
    if len(ended) > 1 or failed:
        done = len(ended) - len(failed)
        words = [f"{done} ok"] if done else []
        words += [f"{end.node} {_outcome(end)}" for end in failed]
        output.note(" · ".join(words))


def _outcome(end: Ended) -> str:
    if end.error is not None:
        return end.error.message
    return f"ended by {signal.Signals(end.signal).name}" if end.signal else f"exit {end.code}"


def _exit_code(ended: list[Ended]) -> int:
    if len(ended) == 1:
        return ended[0].exit_code
    if any(isinstance(end.error, Unreachable) for end in ended):
        return 5
    return int(any(end.exit_code for end in ended))



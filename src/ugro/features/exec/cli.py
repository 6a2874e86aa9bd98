"""``ugro exec``: one command on many nodes; each line of output begins with the node's name."""

from __future__ import annotations

import binascii
import codecs
import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

import click

from ugro.cli import candidates
from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client, Ended, OutputPiece
from ugro.client.reach import ANSWER_S
from ugro.features.exec.operations import EndCommand
from ugro.kernel.support.errors import NotFound, UgroError, Unreachable, UsageError
from ugro.kernel.support.quantities import signal_name

_LONGEST_LINE = 64 * 1024  # that is buffered until its end arrives
_MOST_HELD = 1024 * 1024
_EXAMPLE = "for example: ugro exec @all -- nvidia-smi"


class ExecCommand(click.Command):
    """Options may stand anywhere before the ``--``; everything behind it is the command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["argv"] = args[at + 1 :] if at < len(args) else None
        return super().parse_args(ctx, args[:at])


@click.command("exec", cls=ExecCommand)
@click.option("--cwd", help="Directory on the node to run in; default: the home directory.")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="Set an environment variable. May be repeated.")
@click.option("--no-prefix", is_flag=True, help="Print the output as it is, without the nodes' names.")
@json_option
@click.argument("nodes", nargs=-1, metavar="@all|NODE... -- COMMAND...", shell_complete=candidates.nodes)
@pass_session
@click.pass_context
def exec_(
    ctx: click.Context, session: Session, nodes: tuple[str, ...], cwd: str | None, env: tuple[str, ...], no_prefix: bool
) -> int:
    """Run a command on several nodes at once.

    Nodes are names, @all or @label. Output is shown as it arrives. The command gets no stdin. When it ends, or on
    Ctrl-C, all processes that it started are stopped too.

    Exit code: the command's own for one node; for several nodes 0 if all were 0, else 1, or 5 if a node cannot be
    reached.

    \b
    Examples:
      ugro exec @all -- nvidia-smi
      ugro exec gpu1 gpu2 --cwd /data -- du -sh .
    """
    argv = _command(nodes, ctx.meta["argv"])
    environment = _environment(env)
    client = session.client(uses_nodes=True)
    output = session.output
    printer = _Json(output) if output.is_json else _Lines(output, nodes, has_prefix=not no_prefix)
    ended: list[Ended] = []
    key = os.urandom(8).hex()
    with _cancel_on_interrupt(client, key, output) as interrupted:
        try:
            for event in client.exec(nodes, argv, cwd=cwd, env=environment, key=key):
                if isinstance(event, OutputPiece):
                    printer.piece(event)
                else:
                    ended.append(event)
                    printer.ended(event)
        except UgroError:
            printer.close()
            raise
    _summarise(output, ended)
    return 130 if interrupted else _exit_code(ended)


def _command(nodes: tuple[str, ...], argv: list[str] | None) -> list[str]:
    if argv is None:
        raise UsageError("put -- before the command", hint=_EXAMPLE)
    if not nodes:
        raise UsageError("name the nodes before the --", hint=_EXAMPLE)
    if not argv:
        raise UsageError("there is no command after the --", hint=_EXAMPLE)
    return argv


def _environment(pairs: tuple[str, ...]) -> dict[str, str]:
    bad = [pair for pair in pairs if not pair.partition("=")[0] or "=" not in pair]
    if bad:
        raise UsageError(f"--env {bad[0]}: expected NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


@contextlib.contextmanager
def _cancel_on_interrupt(client: Client, key: str, output: Output) -> Iterator[list[int]]:
    """The first Ctrl-C stops the command on the nodes and waits for them; the second exits at once."""
    interrupted: list[int] = []

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(signum)
        output.note("stopping it on the nodes (Ctrl-C again exits at once)")
        try:
            # Of its own: the client may be waiting for an answer.
            with contextlib.closing(client.connection()) as connection:
                connection.ask(*EndCommand(key).to_wire(), timeout_s=ANSWER_S)
        except (NotFound, Unreachable):
            # It has not begun, has just ended, or cannot be asked: closing the connection stops what there is.
            raise KeyboardInterrupt from None

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


_Source = tuple[str, bool]  # a node, and whether it is its stderr


class _Lines:
    """Prints whole lines, so that no line mixes nodes; bytes are not changed.

    A line too long to buffer is printed as it arrives, and other nodes' lines wait for its end. When too much waits,
    the long line is broken.
    """

    def __init__(self, output: Output, nodes: tuple[str, ...], *, has_prefix: bool) -> None:
        self._output = output
        self._has_prefix = has_prefix
        # The nodes of a label are known only when their output arrives.
        self._width = max((len(node) for node in nodes if not node.startswith("@")), default=0)
        self._rest: dict[_Source, bytearray] = {}
        self._open: _Source | None = None
        self._held: list[tuple[_Source, bytes]] = []
        self._held_bytes = 0

    def piece(self, piece: OutputPiece) -> None:
        source = (piece.node, piece.is_stderr)
        if not self._has_prefix:
            self._output.raw(piece.content, to_stderr=piece.is_stderr)
            return
        lines, end, rest = piece.content.rpartition(b"\n")
        if end:
            self._show(source, bytes(self._rest.pop(source, b"")) + lines + end)
        self._rest.setdefault(source, bytearray()).extend(rest)
        if self._open is None or self._open == source:
            self._show_long(source)
        else:
            self._make_room()

    def ended(self, ended: Ended) -> None:
        for source in ((ended.node, False), (ended.node, True)):
            rest = bytes(self._rest.pop(source, b""))
            if rest or self._open == source:
                self._show(source, rest + b"\n")

    def close(self) -> None:
        """Called when no more output comes, also if nodes did not end."""
        self._break()

    def _show(self, source: _Source, lines: bytes) -> None:
        if self._open == source:
            first, end, lines = lines.partition(b"\n")
            self._output.raw(first + end, to_stderr=source[1])
            self._release()
        if self._open is None:
            self._write(source, lines)
        elif lines:
            self._held.append((source, lines))
            self._held_bytes += len(lines)
            self._make_room()

    def _show_long(self, source: _Source) -> None:
        """Prints the rest of an open line, or of one too long to buffer."""
        rest = self._rest[source]
        if self._open is None and len(rest) > _LONGEST_LINE:
            self._open = source
            self._output.raw(self._prefix(source[0]) + rest, to_stderr=source[1])
            rest.clear()
        elif self._open == source and rest:
            self._output.raw(bytes(rest), to_stderr=source[1])
            rest.clear()

    def _make_room(self) -> None:
        long = sum(len(rest) for rest in self._rest.values() if len(rest) > _LONGEST_LINE)
        if self._held_bytes + long > _MOST_HELD:
            self._break()

    def _break(self) -> None:
        if self._open is not None:
            self._output.raw(b"\n", to_stderr=self._open[1])
            self._release()

    def _release(self) -> None:
        """The open line has ended: prints the lines that waited, then perhaps another long one."""
        self._open = None
        held, self._held, self._held_bytes = self._held, [], 0
        for source, lines in held:
            self._write(source, lines)
        for source in self._rest:
            self._show_long(source)

    def _write(self, source: _Source, lines: bytes) -> None:
        if lines:
            prefix = self._prefix(source[0])
            self._output.raw(prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n", to_stderr=source[1])

    def _prefix(self, node: str) -> bytes:
        self._width = max(self._width, len(node))
        return self._output.styled(f"{node.ljust(self._width)} | ", "id").encode()


class _Json:
    """NDJSON: the output, and how each node ended. Bytes that are not UTF-8 become base64."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._rest: dict[_Source, bytes] = {}  # the start of a character that ends in the next piece

    def piece(self, piece: OutputPiece) -> None:
        source = (piece.node, piece.is_stderr)
        content = self._rest.pop(source, b"") + piece.content
        try:
            text, used = codecs.utf_8_decode(content, "strict", False)
        except UnicodeDecodeError:
            self._show_bytes(source, content)
            return
        self._rest[source] = content[used:]
        if text:
            self._output.document({"node": piece.node, _stream(source): text})

    def _show_bytes(self, source: _Source, content: bytes) -> None:
        text = binascii.b2a_base64(content, newline=False).decode()
        self._output.document({"node": source[0], f"{_stream(source)}_base64": text})

    def close(self) -> None:
        """Nothing is buffered."""

    def ended(self, ended: Ended) -> None:
        for source in ((ended.node, False), (ended.node, True)):
            if rest := self._rest.pop(source, b""):
                self._show_bytes(source, rest)
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


def _stream(source: _Source) -> str:
    return "stderr" if source[1] else "stdout"


def _summarise(output: Output, ended: list[Ended]) -> None:
    for end in ended:
        if end.unkillable:
            pids = ", ".join(map(str, end.unkillable))
            hint = "they wait for a disk or a driver; run ps -l on the node"
            output.warn(f"{end.node}: SIGKILL did not end {pids}", hint)
    failed = sorted((end for end in ended if end.exit_code), key=lambda end: end.node)
    errors = [end.error for end in failed if end.error is not None]
    for error in errors:
        output.warn(str(error), error.hint)
    if len(ended) > 1 or len(failed) > len(errors):
        output.note(" · ".join(_counts(len(ended) - len(failed), errors) + _outcomes(failed)))


def _counts(done: int, errors: list[UgroError]) -> list[str]:
    """Nodes with an error are named above."""
    unreachable = sum(isinstance(error, Unreachable) for error in errors)
    counts = ((done, "ok"), (unreachable, "unreachable"), (len(errors) - unreachable, "not run"))
    return [f"{count} {word}" for count, word in counts if count]


def _outcomes(failed: list[Ended]) -> list[str]:
    return [
        f"{end.node} ended by {signal_name(end.signal)}" if end.signal else f"{end.node} exit {end.code}"
        for end in failed
        if end.error is None
    ]


def _exit_code(ended: list[Ended]) -> int:
    if len(ended) == 1:
        return ended[0].exit_code
    if any(isinstance(end.error, Unreachable) for end in ended):
        return 5
    return int(any(end.exit_code for end in ended))

"""``ugro logs`` and ``ugro events``."""

from __future__ import annotations

import binascii
import time
from datetime import datetime
from typing import Any, Literal, Protocol

import click

from ugro.cli import candidates
from ugro.cli.jobs.describe import local_time, ranks
from ugro.cli.output import Output, Style
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.job_logs import LogChoice, LogPiece
from ugro.kernel.agent.model import Event
from ugro.kernel.jobs.model import Job
from ugro.kernel.support.errors import UsageError
from ugro.kernel.support.quantities import format_size, parse_duration

# --- moment -----------------------------------------------------------------------------------------------------------
# A time in the past, given as a duration (10m ago) or as a date and time.


class Moment(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in some releases
    """Seconds since the epoch. A time without a zone is local time."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return max(0.0, time.time() - parse_duration(value))
        except ValueError:
            pass
        try:
            return max(0.0, datetime.fromisoformat(value).timestamp())
        except (ValueError, OverflowError, OSError):
            self.fail(f"expected how long ago, such as 10m, or a time such as 2030-01-31T08:00, got {value!r}", param)


MOMENT = Moment()
SINCE = "Show only what is newer than this: 10m (ago), or a time such as 2030-01-31T08:00."


# --- events -----------------------------------------------------------------------------------------------------------
# ``ugro events``.


@click.command()
@click.argument("job", required=False, shell_complete=candidates.jobs)
@click.option("--since", type=MOMENT, metavar="TIME", help=SINCE)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new events until Ctrl-C.")
@json_option
@pass_session
def events(session: Session, job: str | None, since: float | None, follow: bool) -> None:
    """Print the history of events.

    Of JOB, or of all jobs and nodes; the oldest first.
    """
    output = session.output
    for event in session.client().jobs.events(job=job, since_unix_s=since, follow=follow):
        if output.is_json:
            output.document({"event": event})
        else:
            _show(output, event)


def _show(output: Output, event: Event) -> None:
    about = f"job {event.job}" if event.job is not None else event.node or ""
    if event.job is not None and event.attempt:
        about += f".{event.attempt}"
    if output.is_terminal:
        output.text(f"{local_time(event.at)}  {about:<10}  {event.kind:<11}  {event.text}")
    else:
        output.record((event.at, about, event.kind, event.text))


# --- log printer ------------------------------------------------------------------------------------------------------
# Prints logs: the bytes of one rank as they are, or whole lines of several ranks, each with a prefix.


_LONGEST_LINE = 64 * 1024  # that is buffered until its end arrives
_COLOURS: tuple[Style, ...] = ("id", "good", "warn", "bold")
_Source = tuple[int, int]  # attempt and rank


class Printer(Protocol):
    def piece(self, piece: LogPiece) -> None: ...

    def close(self) -> None: ...


def dropped(piece: LogPiece) -> str:
    size = format_size(piece.dropped_bytes)
    return f"rank {piece.rank}: {size} of this log were dropped on {piece.node}: it grew too large"


class Bytes:
    def __init__(self, output: Output) -> None:
        self._output = output
        self._attempt: int | None = None

    def piece(self, piece: LogPiece) -> None:
        if self._attempt not in (None, piece.attempt):
            self._output.note(f"attempt {piece.attempt}:")
        self._attempt = piece.attempt
        if piece.dropped_bytes:
            self._output.warn(dropped(piece))
        if piece.content:
            self._output.raw(piece.content)

    def close(self) -> None:
        """Nothing is buffered."""


class _Whole:
    """Joins pieces to lines; a line too long to buffer is broken."""

    def __init__(self) -> None:
        self._rest: dict[_Source, bytearray] = {}
        self._nodes: dict[_Source, str] = {}

    def piece(self, piece: LogPiece) -> None:
        source = (piece.attempt, piece.rank)
        self._nodes[source] = piece.node
        if piece.dropped_bytes:
            self._flush(source)
            self._show_dropped(piece)
        rest = self._rest.setdefault(source, bytearray())
        rest += piece.content
        lines, end, tail = bytes(rest).rpartition(b"\n")
        if len(tail) > _LONGEST_LINE:
            lines, end, tail = lines + end + tail, b"\n", b""
        if end:
            self._show(source, lines.split(b"\n"))
            self._rest[source] = bytearray(tail)

    def close(self) -> None:
        for source in sorted(self._rest):
            self._flush(source)

    def _flush(self, source: _Source) -> None:
        if rest := bytes(self._rest.pop(source, b"")):
            self._show(source, [rest])

    def _show(self, source: _Source, lines: list[bytes]) -> None:
        raise NotImplementedError

    def _show_dropped(self, piece: LogPiece) -> None:
        raise NotImplementedError


class Prefixed(_Whole):
    """Puts ``rank 1 gpu2 | `` before each line, aligned, each rank in its own colour."""

    def __init__(self, output: Output, *, has_attempts: bool = False) -> None:
        super().__init__()
        self._output = output
        self._has_attempts = has_attempts
        self._width = 0

    def _show(self, source: _Source, lines: list[bytes]) -> None:
        prefix = self._prefix(source)
        if self._output.is_terminal:  # of a progress bar only its last state: it would overwrite the prefix
            lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        self._output.raw(b"".join(prefix + line + b"\n" for line in lines))

    def _show_dropped(self, piece: LogPiece) -> None:
        self._output.warn(dropped(piece))

    def _prefix(self, source: _Source) -> bytes:
        attempt, rank = source
        words = f"rank {rank} {self._nodes[source]}"
        text = f"attempt {attempt} {words}" if self._has_attempts else words
        self._width = max(self._width, len(text))
        return self._output.styled(f"{text.ljust(self._width)} | ", _COLOURS[rank % len(_COLOURS)]).encode()


class Documents(_Whole):
    """NDJSON: one document per line. A line that is not UTF-8 becomes base64."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def _show(self, source: _Source, lines: list[bytes]) -> None:
        for line in lines:
            self._output.document({**self._place(source), **_text(line)})

    def _show_dropped(self, piece: LogPiece) -> None:
        place = self._place((piece.attempt, piece.rank))
        self._output.document({**place, "dropped_bytes": piece.dropped_bytes})

    def _place(self, source: _Source) -> dict[str, Any]:
        return {"attempt": source[0], "rank": source[1], "node": self._nodes[source]}


def _text(line: bytes) -> dict[str, str]:
    try:
        return {"line": line.decode()}
    except UnicodeDecodeError:
        return {"line_base64": binascii.b2a_base64(line, newline=False).decode()}


# --- logs -------------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("job", default="last", shell_complete=candidates.jobs)
@click.option(
    "--rank", "-r", type=click.IntRange(0), metavar="N", multiple=True, help="Show only this rank. May be repeated."
)
@click.option(
    "--node",
    "-n",
    multiple=True,
    shell_complete=candidates.node_names,
    help="Show only the ranks on this node. May be repeated.",
)
@click.option("--attempt", default="newest", metavar="N|all", help="Show this attempt, or all; default: the newest.")
@click.option("--since", type=MOMENT, metavar="TIME", help=SINCE)
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Start with the last N lines of each rank.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing until the job ends.")
@click.option("--raw", is_flag=True, help="Print all bytes to a terminal, also those that steer it.")
@json_option
@pass_session
def logs(
    session: Session,
    /,
    job: str,
    rank: tuple[int, ...],
    node: tuple[str, ...],
    attempt: str,
    follow: bool,
    **more: float | int | bool | None,
) -> int:
    """Print the logs of a job.

    JOB is an id, a name, or last (the default). The output of one rank is printed as it was written, on a terminal
    without control characters other than colours (--raw prints them, too); with several ranks, each line begins with
    its rank and node. --since compares the time at which a line reached this machine; for a node that could not be
    reached, that is later than it was written.

    \b
    Examples:
      ugro logs train -f
      ugro logs 12 --rank 3 --tail 50
    """
    session.output.trusts_programs = bool(more["raw"])
    since, tail = more["since"], more["tail"]
    choice = LogChoice(rank, node, _attempt(attempt), since, None if tail is None else int(tail), follow)
    client = session.client()
    found = client.jobs.get(job)
    if not found.attempt and not follow:
        session.output.note(f"job {found.id} has not started yet; see: ugro why {found.id}")
    printer = _printer(session.output, found, choice)
    try:
        for piece in client.jobs.logs(found.id, choice):
            printer.piece(piece)
    finally:
        printer.close()
    return 0


def _attempt(text: str) -> int | Literal["newest", "all"]:
    if text == "all":
        return "all"
    if text == "newest":
        return "newest"
    if not text.isdigit() or not int(text):
        raise UsageError(f"--attempt: expected a number, all or newest, got {text}")
    return int(text)


def _printer(output: Output, job: Job, choice: LogChoice) -> Printer:
    if output.is_json:
        return Documents(output)
    is_one = len(choice.ranks) == 1 or (not choice.ranks and ranks(job) == 1)
    return Bytes(output) if is_one else Prefixed(output, has_attempts=choice.attempt == "all")

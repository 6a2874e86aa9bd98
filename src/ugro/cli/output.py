"""The only module that prints. Results go to stdout, messages to stderr; colour and progress only to a terminal.

A table on a terminal is aligned; elsewhere it is tab-separated, with complete values and one header line.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click

from ugro.core.errors import UgroError, UsageError

# Characters in a node's text that must not reach a terminal: control characters except tab and newline, and those
# that change the direction of text.
_CONTROLS = (*range(9), *range(11, 32), *range(127, 160))
_TURNS = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_HARMLESS = dict.fromkeys((*_CONTROLS, *_TURNS), "�")
_STYLES = {"good": "32", "warn": "33", "bad": "31", "dim": "2", "bold": "1", "id": "36"}
_GAP = 2
_NARROWEST = 8  # a column of text is not cut below this
Style = Literal["good", "warn", "bad", "dim", "bold", "id", ""]


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    style: Style = ""
    is_number: bool = False


def clean(text: str) -> str:
    """Untrusted text, safe for a terminal."""
    return text.translate(_HARMLESS)


class Output:
    def __init__(self, *, is_json: bool = False, is_quiet: bool = False) -> None:
        self.is_json = is_json
        self.is_quiet = is_quiet
        self._has_progress = False

    @property
    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    @property
    def width(self) -> int:
        return _terminal_size()[0]

    # --- results -----------------------------------------------------------------------------------------------

    def document(self, value: Any) -> None:
        from ugro.core.support.codec import dumps  # not needed for help and tables

        self._print(dumps(value) + "\n")

    def text(self, line: str) -> None:
        self._print(clean(line) + "\n")

    def raw(self, content: bytes, *, to_stderr: bool = False) -> None:
        self.end_progress()
        stream = sys.stderr if to_stderr else sys.stdout
        with _writing():
            stream.flush()  # text that was written before
            stream.buffer.write(content)
            stream.buffer.flush()

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]], *, spare: Sequence[str] = ()) -> None:
        """On a narrow terminal the ``spare`` columns are left out, in this order."""
        lines = self.table_lines(header, rows, spare=spare) if self.is_terminal else _tsv(header, rows)
        self._print("".join(f"{line}\n" for line in lines))

    def table_lines(
        self, header: Sequence[str], rows: Sequence[Sequence[Cell]], *, spare: Sequence[str] = ()
    ) -> list[str]:
        """For a terminal: aligned, within its width, without empty columns and lines."""
        title = [Cell(name, "dim", any(row[i].is_number for row in rows)) for i, name in enumerate(header)]
        table = [title, *([_on_one_line(cell) for cell in row] for row in rows)]
        shown = [i for i, name in enumerate(header) if not name or not rows or any(row[i].text for row in rows)]
        widths = {i: max(_width(row[i].text) for row in table) for i in shown or range(len(header))}
        fixed = {i for i in widths if title[i].is_number}
        widths = _fitted(widths, fixed, [header.index(name) for name in spare], _terminal_size()[0])
        lines = [[(row[i], width) for i, width in widths.items()] for row in table]
        return [self._row(line) for line in lines if any(cell.text for cell, _ in line)]

    def drawn(self, lines: Sequence[str]) -> None:
        """Prints lines of ``table_lines``."""
        self._print("".join(f"{line}\n" for line in lines))

    @contextlib.contextmanager
    def whole_screen(self) -> Iterator[None]:
        """Uses the terminal's alternate screen, and restores the other one."""
        self._print("\x1b[?1049h\x1b[?25l")
        try:
            yield
        finally:
            self._print("\x1b[?25h\x1b[?1049l")

    def cut(self, text: str) -> str:
        """To the terminal's width."""
        return _cut(clean(text), self.width)

    def redraw(self, lines: Sequence[str], footer: str) -> None:
        """Draws over the last drawing, from the top; counts the lines that do not fit."""
        room = max(1, _terminal_size()[1] - 2)
        if len(lines) > room:
            lines = [*lines[: room - 1], f"… {len(lines) - room + 1} more lines"]
        # Cursor home, clear each line to its end, then clear below: no flicker.
        self._print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in [*lines, clean(footer)]) + "\x1b[J")

    def _print(self, text: str) -> None:
        self.end_progress()
        with _writing():
            sys.stdout.write(text)
            sys.stdout.flush()

    def _row(self, cells: Sequence[tuple[Cell, int]]) -> str:
        parts = []
        for cell, width in cells:
            text = _cut(cell.text, width)
            blank = " " * (width - _width(text))
            styled = self.styled(text, cell.style) if text else ""
            parts.append(blank + styled if cell.is_number else styled + blank)
        return (" " * _GAP).join(parts).rstrip()

    # --- messages ----------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        if not self.is_quiet and not self.is_json:
            self._say(text)

    def confirm(self, facts: Sequence[str], question: str, *, default: bool = False) -> bool:
        """Shows the facts and asks, also with --quiet."""
        for fact in facts:
            self._say(fact)
        try:
            return click.confirm(question, default, err=True)
        except (click.Abort, KeyboardInterrupt):  # Ctrl-C: the next message begins a new line
            sys.stderr.write("\n")
            raise

    @property
    def shows_progress(self) -> bool:
        return not self.is_quiet and sys.stderr.isatty()

    def progress(self, text: str) -> None:
        """Shows what the command waits for, in place, on a terminal."""
        if not self.shows_progress:
            return
        text = _cut(clean(text).replace("\n", " "), _terminal_size()[0] - 1)
        sys.stderr.write("\r\x1b[K" + self.styled(text, "dim", sys.stderr))
        sys.stderr.flush()
        self._has_progress = True

    def end_progress(self) -> None:
        if self._has_progress:
            self._has_progress = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def warn(self, text: str, hint: str | None = None) -> None:
        self._labelled("warning", "warn", text, hint)

    def error(self, error: UgroError) -> None:
        if self.is_json:
            with contextlib.suppress(UgroError):  # stdout itself may be the problem
                self.document({"error": error.to_wire()})
        self.complain(error)

    def complain(self, error: UgroError) -> None:
        """On stderr only: for errors after the JSON document was printed."""
        self._labelled("error", "bad", str(error), error.hint)

    def usage_error(self, error: click.ClickException) -> None:
        message, _, hint = (_expected(error) or error.format_message()).partition("\nhint:  ")
        context = getattr(error, "ctx", None)
        if not hint and context is not None:
            hint = f"see: {context.command_path} --help"
        self.error(UsageError(message, hint=hint or None))

    def crash(self, error: Exception) -> int:
        """A bug in UGRO: writes the traceback to a file, and prints one line."""
        import traceback

        from ugro.core.support.state_dir import StateDir

        if os.environ.get("UGRO_DEBUG"):
            raise error
        file = StateDir.find(os.environ).path / "last-error.log"
        hint = "run it again with UGRO_DEBUG=1 to see the traceback"
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_text("".join(traceback.format_exception(error)))
            hint = f"please report it with {file}"
        except OSError:
            pass
        self.error(UgroError(f"internal error: {type(error).__name__}: {error}", hint=hint))
        return 70

    def _say(self, text: str) -> None:
        self.end_progress()
        sys.stderr.write(clean(text) + "\n")

    def _labelled(self, label: str, style: Style, text: str, hint: str | None) -> None:
        self.end_progress()
        sys.stderr.write(f"{self.styled(label + ':', style, sys.stderr)} {clean(text)}\n")
        if hint:
            sys.stderr.write(f"{self.styled('hint:', 'dim', sys.stderr)}  {clean(hint)}\n")

    def styled(self, text: str, style: Style, stream: Any = None) -> str:
        if not style or not _has_colour(stream or sys.stdout):
            return text
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # the reader has closed the pipe: no failure
        raise
    except OSError as error:
        raise UgroError(f"the output cannot be written: {(error.strerror or str(error)).lower()}") from error


def _expected(error: click.ClickException) -> str | None:
    """The allowed range of a number, in our words."""
    parameter = error.param if isinstance(error, click.BadParameter) else None
    kind = parameter.type if parameter else None
    if parameter is None or not isinstance(kind, click.IntRange | click.FloatRange):
        return None
    limits = f"{kind.min} to {kind.max}" if kind.max is not None else f"{kind.min} or more"
    return f"{max(parameter.opts, key=len)}: expected {limits}"


def _has_colour(stream: Any) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or bool(stream.isatty())


def _terminal_size() -> tuple[int, int]:
    """Columns and lines of stdout or stderr, whichever is a terminal."""
    for stream in (sys.stdout, sys.stderr):
        try:
            size = os.get_terminal_size(stream.fileno())
        except (OSError, ValueError):
            continue
        if size.columns and size.lines:
            return size.columns, size.lines
    return 100, 24


def _fitted(widths: dict[int, int], fixed: set[int], spare: Sequence[int], room: int) -> dict[int, int]:
    """Cuts the widest texts, then drops spare columns, then cuts again; the last column gets the remaining room."""

    def excess() -> int:
        return sum(widths.values()) + _GAP * (len(widths) - 1) - room

    def cut(narrowest: int) -> None:
        while excess() > 0 and (texts := [i for i in widths if i not in fixed and widths[i] > narrowest]):
            widths[max(texts, key=lambda i: widths[i])] -= 1

    wanted, widths = widths, dict(widths)
    cut(2 * _NARROWEST)
    for column in spare:
        if excess() > 0:
            widths.pop(column, None)
    cut(_NARROWEST)
    last = max(widths)
    return {**widths, last: min(wanted[last], widths[last] + max(0, -excess()))}


def _on_one_line(cell: Cell) -> Cell:
    return Cell(clean(cell.text).replace("\t", " ").replace("\n", " "), cell.style, cell.is_number)


def _width(text: str) -> int:
    """In terminal columns: East Asian characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    import unicodedata

    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(bool(unicodedata.combining(letter)) for letter in text)


def _cut(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    while text and _width(text) > width - 1:
        text = text[:-1]
    return text + "…" if width > 0 else ""


def _tsv(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    shown = [i for i, name in enumerate(header) if name]
    lines = [[header[i].lower() for i in shown]]
    lines += [[_on_one_line(row[i]).text for i in shown] for row in rows]
    return ["\t".join(line) for line in lines]

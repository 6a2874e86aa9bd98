"""The only printer. Results go to stdout, talk to stderr; colour and bars only where a person looks.

A table on a terminal is drawn for people; elsewhere it is tab-separated, whole values, one header line.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click

from ugro.core.codec import dumps
from ugro.core.errors import UgroError, UsageError
from ugro.core.statedir import StateDir

# What may not reach a terminal from a node's text: escape sequences and other controls, but for tab and newline.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STYLES = {"good": "32", "warn": "33", "bad": "31", "dim": "2", "bold": "1", "id": "36"}
Style = Literal["good", "warn", "bad", "dim", "bold", "id", ""]


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    style: Style = ""
    is_number: bool = False


def clean(text: str) -> str:
    """Text from elsewhere, harmless on a terminal."""
    return _CONTROLS.sub("�", text)


class Output:
    def __init__(self, *, is_json: bool = False, is_quiet: bool = False) -> None:
        self.is_json = is_json
        self.is_quiet = is_quiet
        self._has_progress = False

    @property
    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    # --- results -----------------------------------------------------------------------------------------------

    def document(self, value: Any) -> None:
        self._end_progress()
        sys.stdout.write(dumps(value) + "\n")
        sys.stdout.flush()

    def text(self, line: str) -> None:
        self._end_progress()
        sys.stdout.write(clean(line) + "\n")

    def raw(self, content: bytes, *, to_stderr: bool = False) -> None:
        stream = sys.stderr if to_stderr else sys.stdout
        stream.buffer.write(content)
        stream.flush()

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._end_progress()
        lines = self.table_lines(header, rows) if self.is_terminal else _tsv(header, rows)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()

    def table_lines(self, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
        """As for a terminal: aligned, columns that are empty everywhere left out, the last one cut to the width."""
        shown = [i for i, name in enumerate(header) if not name or any(row[i].text for row in rows)]
        widths = {i: max(len(header[i]), *(len(row[i].text) for row in rows), 0) for i in shown}
        left = shutil.get_terminal_size((100, 24)).columns - sum(widths[i] + 2 for i in shown[:-1])
        widths[shown[-1]] = max(len(header[shown[-1]]), left)
        title = [Cell(header[i], "dim", any(row[i].is_number for row in rows)) for i in shown]
        body = [[row[i] for i in shown] for row in rows]
        return [self._row(cells, [widths[i] for i in shown]) for cells in [title, *body]]

    def _row(self, cells: Sequence[Cell], widths: Sequence[int]) -> str:
        parts = []
        for cell, width in zip(cells, widths, strict=True):
            text = clean(cell.text).replace("\n", " ")
            text = text if len(text) <= width else text[: width - 1] + "…"
            padded = text.rjust(width) if cell.is_number else text.ljust(width)
            parts.append(self.styled(padded, cell.style))
        return "  ".join(parts).rstrip()

    # --- talk --------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        if not self.is_quiet and not self.is_json:
            self._end_progress()
            sys.stderr.write(clean(text) + "\n")

    def progress(self, text: str) -> None:
        """What is waited for, in place, on a terminal."""
        if self.is_quiet or not sys.stderr.isatty():
            return
        width = shutil.get_terminal_size((100, 24)).columns - 1
        sys.stderr.write("\r\x1b[K" + self.styled(clean(text)[:width], "dim", sys.stderr))
        sys.stderr.flush()
        self._has_progress = True

    def warn(self, text: str, hint: str | None = None) -> None:
        self._end_progress()
        self._labelled("warning", "warn", text, hint)

    def error(self, error: UgroError) -> None:
        if self.is_json:
            self.document({"error": error.to_wire()})
        self._end_progress()
        self._labelled("error", "bad", str(error), error.hint)

    def usage_error(self, error: click.ClickException) -> None:
        message, _, hint = error.format_message().partition("\nhint:  ")
        context = getattr(error, "ctx", None)
        if not hint and context is not None:
            hint = f"see: {context.command_path} --help"
        self.error(UsageError(message, hint=hint or None))

    def crash(self, error: Exception) -> int:
        """A bug of ours: the traceback goes to a file, the person gets one line."""
        import traceback

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

    def _labelled(self, label: str, style: Style, text: str, hint: str | None) -> None:
        sys.stderr.write(f"{self.styled(label + ':', style, sys.stderr)} {clean(text)}\n")
        if hint:
            sys.stderr.write(f"{self.styled('hint:', 'dim', sys.stderr)}  {clean(hint)}\n")

    def _end_progress(self) -> None:
        if self._has_progress:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._has_progress = False

    def styled(self, text: str, style: Style, stream: Any = None) -> str:
        if not style or not _has_colour(stream or sys.stdout):
            return text
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def _has_colour(stream: Any) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or bool(stream.isatty())


def _tsv(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    shown = [i for i, name in enumerate(header) if name]
    lines = [[header[i].lower() for i in shown]]
    lines += [[re.sub(r"[\t\r\n]+", " ", row[i].text) for i in shown] for row in rows]
    return ["\t".join(line) for line in lines]

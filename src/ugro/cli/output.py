"""The only module that prints. Results go to stdout, messages to stderr; colour and progress only to a terminal.

A table on a terminal is aligned; elsewhere it is tab-separated, with complete values and one header line. All text is
made harmless here (``cli/untrusted.py``). A dumb terminal gets no escape codes at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click

from ugro.cli.untrusted import TerminalFilter, message, one_line
from ugro.cli.untrusted import clean as clean
from ugro.kernel.support.errors import ConfigError, UgroError, UsageError

# --- meant ------------------------------------------------------------------------------------------------------------
# What somebody means by a command or an option of another tool that ``ugro`` does not have.


_LIKE = 0.79  # a letter or two that are missing or too many
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"  # also those that texts have instead

_LAUNCH = "ugro launch train.py, or a command: ugro run -- ./prepare.sh"
_COMMANDS = {
    "help": "ugro --help, or of a command: ugro launch --help",
    "version": "ugro --version",
    "ls": "ugro status (jobs), ugro node ls (nodes)",
    **dict.fromkeys(("list", "ps", "job", "jobs", "queue", "squeue"), "ugro status"),
    **dict.fromkeys(("show", "info", "describe"), "ugro status JOB, ugro node show NODE"),
    **dict.fromkeys(("nodes", "hosts", "sinfo"), "ugro node ls"),
    **dict.fromkeys(("submit", "sbatch", "srun", "start", "train", "torchrun"), _LAUNCH),
    **dict.fromkeys(("kill", "scancel"), "ugro cancel JOB"),
    **dict.fromkeys(("rm", "remove", "delete"), "ugro cancel JOB (a job), ugro node rm NODE (a node)"),
    **dict.fromkeys(("tail", "follow", "attach"), "ugro logs JOB -f"),
    **dict.fromkeys(("ssh", "shell"), "ugro exec NODE -- COMMAND"),
    "stop": "ugro cancel JOB; the agent: ugro agent stop",
    "restart": "ugro retry JOB; the agent: ugro agent restart",
    "resume": "ugro retry JOB (a job), ugro node resume NODE (a drained node)",
    "trust": "ugro node trust HOST",
    "drain": "ugro node drain NODE",
    "undrain": "ugro node resume NODE",
    "add": "ugro node add NODE",
    "setup": "ugro init (your SSH hosts), ugro node setup (what is installed on nodes)",
}
# The first of them that a command has.
_OPTIONS = {
    "gpu": ("--gpus-per-node", "--gpus"),
    "gpus": ("--gpus-per-node",),
    "ngpus": ("--gpus-per-node",),
    "num-gpus": ("--gpus-per-node",),
    "nproc-per-node": ("--gpus-per-node",),
    "node": ("--nodes", "--only"),
    "nnodes": ("--nodes",),
    "num-nodes": ("--nodes",),
    "host": ("--only",),
    "hosts": ("--only",),
    "nodelist": ("--only",),
    "time": ("--time-limit",),
    "timeout": ("--time-limit",),
    "mem": ("--memory",),
    "retry": ("--retries",),
}
_LETTERS = {"-n": "--nodes", "-N": "--nodes", "-c": "--cpus"}  # of other launchers


def command_meant(word: str) -> str | None:
    return _COMMANDS.get(word)


def option_meant(name: str, options: Sequence[str]) -> str | None:
    """Which of a command's options somebody means; None for one that is like none of them."""
    import difflib  # only a mistake needs it

    if name in _LETTERS:
        return _LETTERS[name] if _LETTERS[name] in options else None
    word = name.lstrip(_DASHES).replace("_", "-").lower()
    known = {option.removeprefix("--"): option for option in options if option.startswith("--")}
    for other, those in _OPTIONS.items():
        found = next((one for one in those if one in options), None)
        if found is not None:
            known.setdefault(other, found)
    if word in known or not name.startswith(("--", *_DASHES[1:])):
        return known.get(word)  # after one dash, letters may be a script's
    for other, option in known.items():
        if sorted(other) == sorted(word):
            return option
    near = difflib.get_close_matches(word, known, n=1, cutoff=_LIKE)
    return known[near[0]] if near else None


def is_option(word: str) -> bool:
    return word != "" and word[0] in _DASHES and not word[1:2].isdigit()


# --- output -----------------------------------------------------------------------------------------------------------


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_COLOUR_OR_TEXT = re.compile(rf"{_COLOUR.pattern}|[^\x1b]+|\x1b")
_STYLES = {"good": "32", "warn": "33", "bad": "31", "dim": "2", "bold": "1", "id": "36"}
_GAP = 2
_INDENT = 8  # of the text below a row
_NARROWEST = 8  # a column of text is not cut below this
_PLAIN_PROGRESS_S = 10.0  # between two lines of it on a dumb terminal
Style = Literal["good", "warn", "bad", "dim", "bold", "id", ""]


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    style: Style = ""
    is_number: bool = False


class Output:
    def __init__(self, *, is_json: bool = False, is_quiet: bool = False) -> None:
        self.is_json = is_json
        self.is_quiet = is_quiet
        self.trusts_programs = False  # their output may steer the terminal
        self._progress_lines = 0  # on the screen
        self._plain_progress = ("", 0.0)  # on a dumb terminal: the last line, and when it was printed
        self._filters: dict[bool, TerminalFilter] = {}  # of programs' output, by whether it goes to stderr

    @property
    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    @property
    def can_redraw(self) -> bool:
        """False also on a dumb terminal."""
        return self.is_terminal and not _is_dumb(sys.stdout)

    @property
    def width(self) -> int:
        return _terminal_size()[0]

    # --- results -----------------------------------------------------------------------------------------------

    def document(self, value: Any) -> None:
        from ugro.kernel.support.codec import dumps  # not needed for help and tables

        self._print(dumps(value) + "\n")

    def text(self, line: str) -> None:
        self._print(one_line(line) + "\n")

    def block(self, text: str) -> None:
        """Several lines."""
        self._print(clean(text) + "\n")

    def record(self, fields: Sequence[str]) -> None:
        """A line of tab-separated fields, for programs."""
        self._print("\t".join(_on_one_line(field) for field in fields) + "\n")

    def raw(self, content: bytes, *, to_stderr: bool = False) -> None:
        """A program's output: as it is, but on a terminal without what could steer it."""
        self.end_progress()
        stream = sys.stderr if to_stderr else sys.stdout
        if stream.isatty() and not self.trusts_programs:
            known = self._filters.get(to_stderr)
            kept = known or self._filters.setdefault(to_stderr, TerminalFilter(is_dumb=_is_dumb(stream)))
            content = kept.feed(content)
        with _writing():
            stream.flush()  # text that was written before
            stream.buffer.write(content)
            stream.buffer.flush()

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]], *, spare: Sequence[str] = ()) -> None:
        """On a narrow terminal the ``spare`` columns are left out, in this order."""
        self.drawn(self.table_lines(header, rows, spare=spare) if self.is_terminal else _tsv(header, rows))

    def table_lines(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        *,
        spare: Sequence[str] = (),
        below: Sequence[Cell] = (),
    ) -> list[str]:
        """For a terminal: aligned, within its width, without empty columns and lines; ``below`` each row, a text."""
        return [line for lines in self.table_groups(header, rows, spare=spare, below=below) for line in lines]

    def table_groups(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        *,
        spare: Sequence[str] = (),
        below: Sequence[Cell] = (),
    ) -> list[list[str]]:
        """The lines of the header, and of each row with the text below it."""
        title = [Cell(name, "dim", any(row[i].is_number for row in rows)) for i, name in enumerate(header)]
        table = [title, *([_cell_on_one_line(cell) for cell in row] for row in rows)]
        shown = [i for i, name in enumerate(header) if not name or not rows or any(row[i].text for row in rows)]
        widths = {i: max(_width(row[i].text) for row in table) for i in shown or range(len(header))}
        fixed = {i for i in widths if title[i].is_number}
        widths = _fitted(widths, fixed, [header.index(name) for name in spare], _terminal_size()[0])
        groups: list[list[str]] = []
        for row, text in zip(table, [Cell(""), *below] if below else [Cell("")] * len(table), strict=True):
            cells = [(row[i], width) for i, width in widths.items()]
            own = [self._row(cells)] if any(cell.text for cell, _ in cells) else []
            wrapped = self.wrapped(text.text, " " * _INDENT)
            groups.append([*own, *(self.styled(line, text.style) for line in wrapped)])
        return groups

    def wrapped(self, text: str, indent: str, first: str | None = None) -> list[str]:
        """Within the terminal's width; elsewhere one line. ``first`` stands before the first line."""
        text = _on_one_line(text)
        if not text:
            return []
        first = indent if first is None else first
        if not self.is_terminal:
            return [first + text]
        import textwrap  # not needed for most commands

        room = max(self.width, len(indent) + _NARROWEST)
        return textwrap.wrap(text, room, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)

    def drawn(self, lines: Sequence[str]) -> None:
        """Prints lines of ``table_lines``, or made with ``styled``."""
        self._print("".join(f"{line}\n" for line in lines))

    @contextlib.contextmanager
    def whole_screen(self) -> Iterator[None]:
        """Uses the terminal's alternate screen, and restores the other one."""
        self._print("\x1b[?1049h\x1b[?25l")
        try:
            yield
        finally:
            self._print("\x1b[?25h\x1b[?1049l")

    def cut(self, text: str, indent: int = 0) -> str:
        """To the terminal's width, or that of a text below a row."""
        return _cut(one_line(text), max(_NARROWEST, self.width - indent))

    def cut_below(self, text: str) -> str:
        """To one line below a row."""
        return self.cut(text, _INDENT)

    def highlighted(self, line: str) -> str:
        """A line of ``table_lines``, over the whole width, in reverse."""
        plain = _COLOUR.sub("", line)
        return f"\x1b[7m{plain}{' ' * max(0, self.width - _width(plain))}\x1b[0m"

    @property
    def room(self) -> int:
        """Lines that ``redraw`` can show."""
        return max(1, _terminal_size()[1] - 2)

    def redraw(self, lines: Sequence[str], footer: str) -> None:
        """Draws over the last drawing, from the top; counts the lines that do not fit."""
        room = self.room
        if len(lines) > room:
            lines = [*lines[: room - 1], f"… {len(lines) - room + 1} more lines"]
        # Cursor home, clear each line to its end, then clear below: no flicker.
        self._print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in [*lines, one_line(footer)]) + "\x1b[J")

    def _print(self, text: str) -> None:
        self.close()
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

    def note(self, *lines: str) -> None:
        if not self.is_quiet and not self.is_json:
            for line in lines:
                self._say(line)

    @property
    def can_ask(self) -> bool:
        return not self.is_json and sys.stdin is not None and sys.stdin.isatty()

    def confirm(self, facts: Sequence[str], question: str, *, default: bool = False) -> bool:
        """Shows the facts and asks, also with --quiet."""
        for fact in facts:
            self._say(fact)
        try:
            return click.confirm(one_line(question), default, err=True)
        except (click.Abort, KeyboardInterrupt):  # Ctrl-C: the next message begins a new line
            sys.stderr.write("\n")
            raise

    @property
    def shows_progress(self) -> bool:
        return not self.is_quiet and sys.stderr.isatty()

    def progress(self, *texts: str, table: Sequence[str] = ()) -> None:
        """Shows what the command waits for, on a terminal: in place, or as a line now and then if it is dumb.

        ``table`` has lines of ``table_lines``, which are shown below. Of several lines a dumb terminal gets the first,
        and a small one as many as fit.
        """
        if not self.shows_progress:
            return
        columns = _terminal_size()[0]
        shown = [_cut(one_line(text), columns - 1) for text in texts]
        if _is_dumb(sys.stderr):
            self._progress_line(shown[0])
            return
        lines = [self.styled(text, "dim", sys.stderr) for text in shown]
        lines = [*lines, *(_cut_drawn(line, columns - 1) for line in table)][: self.room]
        sys.stderr.write(self._erasing() + "\n".join(lines))
        sys.stderr.flush()
        self._progress_lines = len(lines)

    def waiting(self, text: str) -> None:
        """Shows what the command waits for, also where there is no terminal: there as a line now and then."""
        if self.shows_progress:
            self.progress(text)
        elif not self.is_quiet and not self.is_json:
            self._progress_line(one_line(text))

    def _erasing(self) -> str:
        """Codes that remove the progress, and lead to where it began."""
        return "\r\x1b[K" + "\x1b[A\x1b[K" * (self._progress_lines - 1)

    def _progress_line(self, text: str) -> None:
        before, at = self._plain_progress
        now = time.monotonic()
        if text != before and (not before or now - at >= _PLAIN_PROGRESS_S):
            self._plain_progress = (text, now)
            self._say(text)

    def end_progress(self) -> None:
        if self._progress_lines:
            sys.stderr.write(self._erasing())
            sys.stderr.flush()
            self._progress_lines = 0

    def close(self) -> None:
        """Ends progress, and colours that a program's output has left behind."""
        self.end_progress()
        filters, self._filters = self._filters, {}
        for to_stderr, one in filters.items():
            stream = sys.stderr if to_stderr else sys.stdout
            if rest := one.end():
                with contextlib.suppress(OSError):  # a terminal that is gone needs no colours
                    stream.buffer.write(rest)
                    stream.buffer.flush()

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
        for text, hint in error.others if isinstance(error, ConfigError) else ():
            self._labelled("error", "bad", text, hint)

    def usage_error(self, error: click.ClickException) -> None:
        message, _, hint = (_expected(error) or error.format_message()).partition("\nhint:  ")
        context = getattr(error, "ctx", None)
        if isinstance(error, click.NoSuchOption) and context is not None:
            options = [name for one in context.command.get_params(context) for name in one.opts]
            meant = option_meant(error.option_name, options)
            message, hint = f"no such option: {error.option_name}", f"did you mean {meant}?" if meant else ""
        if not hint and context is not None:
            hint = f"see: {context.command_path} --help"
        self.error(UsageError(message, hint=hint or None))

    def crash(self, error: Exception) -> int:
        """A bug in UGRO: writes the traceback to a file, and prints one line."""
        import traceback

        from ugro.kernel.support.state_dir import StateDir

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
        self.close()
        sys.stderr.write(one_line(text) + "\n")

    def _labelled(self, label: str, style: Style, text: str, hint: str | None) -> None:
        self.close()
        sys.stderr.write(f"{self.styled(label + ':', style, sys.stderr)} {message(text)}\n")
        if hint:
            sys.stderr.write(f"{self.styled('hint:', 'dim', sys.stderr)}  {message(hint)}\n")

    def styled(self, text: str, style: Style, stream: Any = None) -> str:
        text = one_line(text)
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
    """Which numbers are allowed, in our words."""
    parameter = error.param if isinstance(error, click.BadParameter) else None
    kind = parameter.type if parameter else None
    if parameter is None or not isinstance(kind, click.IntRange | click.FloatRange):
        return None
    what = "a whole number" if isinstance(kind, click.IntRange) else "a number"
    limits = f" from {kind.min} to {kind.max}" if kind.max is not None else f", {kind.min} or more"
    return f"{max(parameter.opts, key=len)}: expected {what}{limits}"


def _has_colour(stream: Any) -> bool:
    """NO_COLOR (no-color.org), CLICOLOR and CLICOLOR_FORCE (bixense.com/clicolors), FORCE_COLOR."""
    wanted = os.environ.get
    if wanted("NO_COLOR") or _is_dumb(stream):
        return False
    if wanted("FORCE_COLOR") or wanted("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return wanted("CLICOLOR") != "0" and bool(stream.isatty())


def _is_dumb(stream: Any) -> bool:
    """A terminal that shows escape codes as text; one that does not say what it is counts as one."""
    kind = os.environ.get("TERM", "")
    return kind == "dumb" or (not kind and bool(stream.isatty()))


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


def _on_one_line(text: str) -> str:
    return one_line(text).replace("\t", "\\t")


def _cell_on_one_line(cell: Cell) -> Cell:
    return Cell(_on_one_line(cell.text), cell.style, cell.is_number)


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


def _cut_drawn(line: str, width: int) -> str:
    """Cuts a line with colours of ours, which take no room and end with it."""
    parts, room = [], width
    for part in _COLOUR_OR_TEXT.findall(line):
        if _COLOUR.fullmatch(part):
            parts.append(part)
            continue
        text = _cut(part, room)
        parts.append(text)
        if text != part:
            return "".join(parts) + ("\x1b[0m" if "\x1b" in line else "")
        room -= _width(part)
    return "".join(parts)


def _tsv(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    shown = [i for i, name in enumerate(header) if name]
    lines = [[header[i].lower() for i in shown]]
    lines += [[_on_one_line(row[i].text) for i in shown] for row in rows]
    return ["\t".join(line) for line in lines]

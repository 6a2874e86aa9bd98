"""Text of nodes, jobs and files, made harmless for a terminal: it cannot move the cursor, hide text or forge lines."""

from __future__ import annotations

import codecs
import re

# Control characters except tab and newline, and characters that change the direction of text.
_CONTROLS = (*range(9), *range(11, 32), *range(127, 160))
_TURNS = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_SIGN = "�"
_HARMLESS = dict.fromkeys((*_CONTROLS, *_TURNS), _SIGN)
_IN_NO_NAME = frozenset((*range(32), *_CONTROLS, *_TURNS))
_PLAIN = re.compile(rb"[\t\n\r\x20-\x7e]*")
# Colours and the like, or a string for the terminal: a title, a link, a clipboard, an image. Terminals take strings of
# any length; here one that has no end within its line, or within this length, is text.
_CODES = r"\x1b\[([0-?]{0,64})[ -/]{0,4}"
_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\r\n\x1b\x90\x98\x9c-\x9f]{0,4096}"
_SEQUENCE = re.compile(rf"{_CODES}([@-~])|{_STRING}(?:\x07|\x1b\\|\x9c)")
_BEGUN = re.compile(rf"(?:\x1b|{_CODES}|{_STRING}\x1b?)\Z")
_COLOURS = re.compile(r"[0-9;:]*")
# In a log: a progress bar returns to the start of its line, and deletes letters of it.
_LOG_HARMLESS = {code: sign for code, sign in _HARMLESS.items() if code not in (8, 13, 27)}


def clean(text: str) -> str:
    """Keeps tabs and newlines."""
    return text.translate(_HARMLESS)


def one_line(text: str) -> str:
    """A newline is shown as ``\\n``: a name cannot begin a line of its own."""
    return clean(text.replace("\n", "\\n") if "\n" in text else text)


def file_name(name: str) -> str:
    """On one line, and no two look alike: what no terminal should get is written as in Python."""
    return "".join(_escaped(letter) if ord(letter) in _IN_NO_NAME else letter for letter in name)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def message(text: str) -> str:
    """Only an indented line may follow the first."""
    return clean(re.sub(r"\n(?!  |\t)", r"\\n", text))


class TerminalFilter:
    """Output of a program, piece by piece. It may have colours and delete its line; nothing else."""

    def __init__(self, *, is_dumb: bool) -> None:
        self._is_dumb = is_dumb
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""  # a sequence whose end has not arrived
        self._is_coloured = False

    def feed(self, content: bytes) -> bytes:
        if not self._begun and not self._decoder.getstate()[0] and _PLAIN.fullmatch(content):
            return content
        return self._harmless(self._begun + self._decoder.decode(content)).encode()

    def end(self) -> bytes:
        """The rest, and back to the terminal's own colours."""
        text, self._begun = self._begun + self._decoder.decode(b"", final=True), ""
        reset = b"\x1b[0m" if self._is_coloured else b""
        self._is_coloured = False
        return text.replace("\x1b", _SIGN).translate(_LOG_HARMLESS).encode() + reset

    def _harmless(self, text: str) -> str:
        begun = _BEGUN.search(text)
        self._begun = begun[0] if begun else ""
        text = text.removesuffix(self._begun)
        parts: list[str] = []
        at = 0
        for found in _SEQUENCE.finditer(text):
            parts += [text[at : found.start()].replace("\x1b", _SIGN).translate(_LOG_HARMLESS), self._kept(found)]
            at = found.end()
        parts.append(text[at:].replace("\x1b", _SIGN).translate(_LOG_HARMLESS))
        return "".join(parts)

    def _kept(self, found: re.Match[str]) -> str:
        is_colour = found[2] == "m" and _COLOURS.fullmatch(found[1]) is not None
        deletes = found[2] == "K" and found[1] in ("", "0", "1", "2")
        if self._is_dumb or not (is_colour or deletes):
            return ""
        if is_colour:
            self._is_coloured = bool(found[1].strip("0;"))
        return found[0]

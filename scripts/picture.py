"""Draws docs/images/demo.svg: what `ugro demo` really shows, taken from a terminal.

``python scripts/picture.py docs/images/demo.svg`` runs it; that takes a minute and a half.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

_COLUMNS = 116
_UGRO = str(Path(sys.executable).with_name("ugro"))
_DRAWN_OVER = "\r\x1b[K"  # what ugro writes before it draws over a line


def main() -> None:
    Path(sys.argv[1]).write_text(_draw(_on_a_terminal([_UGRO, "demo"])))


def _on_a_terminal(argv: list[str]) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, _COLUMNS, 0, 0))
    with subprocess.Popen(argv, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"}) as process:
        os.close(theirs)
        output = bytearray()
        while True:
            try:
                output += os.read(ours, 65536)
            except OSError:  # the last process on this terminal has closed it
                break
    os.close(ours)
    if process.returncode:
        sys.exit(f"it ended with {process.returncode}:\n{output.decode()}")
    lines = output.decode().replace("\r\n", "\n").split("\n")
    shown = [line.rpartition(_DRAWN_OVER)[2] for line in lines]
    return "\n".join([f"$ {' '.join(['ugro', *argv[1:]])}", *shown])


def _draw(shown: str) -> str:
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown.rstrip()), "\n")  # an empty line: the frame is close
    svg = console.export_svg(title="ugro")
    # No picture of ours fetches a font from elsewhere.
    return re.sub(r"@font-face\s*{[^}]*}", "", svg)


if __name__ == "__main__":
    main()

"""Draws docs/images/health.svg: what `ugro health` really shows of a lab, taken from a terminal.

``python scripts/picture.py docs/images/health.svg`` brings up a lab with a hot card and a node that is down, in a state
directory of its own, and takes it down again.
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
import tempfile
import termios
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ugro.lab.pretend import PRETEND_MODELS, write_gpus

_COLUMNS = 118
_UGRO = str(Path(sys.executable).with_name("ugro"))


def main() -> None:
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="ugro") as home:
        env = {**os.environ, "UGRO_HOME": home, "TERM": "xterm-256color"}
        subprocess.run([_UGRO, "-q", "lab", "up", "--gpus", "1"], env=env, check=True, stdout=subprocess.DEVNULL)
        try:
            _make_interesting(Path(home), env)
            shown = _on_a_terminal([_UGRO, "health"], env)
            shown += "\n" + _on_a_terminal([_UGRO, "exec", "lab1", "lab2", "--", "uname", "-sr"], env)
        finally:
            subprocess.run([_UGRO, "lab", "down"], env=env, check=True)
            subprocess.run([_UGRO, "agent", "stop"], env=env, check=True)
    target.write_text(_draw(shown))


def _make_interesting(home: Path, env: dict[str, str]) -> None:
    busy = replace(PRETEND_MODELS["rtx-3070-ti"], temperature_c=86, use_percent=98, power_w=271.0)
    write_gpus(home / "lab" / "lab3" / "gpus", [replace(busy, memory_used_bytes=7 << 30)])
    calm = replace(PRETEND_MODELS["rtx-5070-ti"], temperature_c=61, use_percent=94, power_w=188.0)
    write_gpus(home / "lab" / "lab1" / "gpus", [replace(calm, memory_used_bytes=9 << 30)])
    subprocess.run([_UGRO, "-q", "node", "add", "gpu4", "--host", "127.0.0.1", "--port", "9"], env=env, check=False)


def _on_a_terminal(argv: list[str], env: dict[str, str]) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, _COLUMNS, 0, 0))
    with subprocess.Popen(argv, stdout=theirs, stderr=theirs, env=env):
        os.close(theirs)
        output = bytearray()
        while True:
            try:
                output += os.read(ours, 65536)
            except OSError:  # the last process on this terminal has closed it
                break
    os.close(ours)
    text = output.decode().replace("\r\n", "\n")
    # What was shown in place and wiped again is not part of the picture.
    return f"$ {' '.join(['ugro', *argv[1:]])}\n" + re.sub(r"\r\x1b\[K[^\r]*(?=\r)|\r\x1b\[K", "", text)


def _draw(shown: str) -> str:
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown.rstrip()))
    svg = console.export_svg(title="ugro")
    # No picture of ours fetches a font from elsewhere.
    return re.sub(r"@font-face\s*{[^}]*}", "", svg)


if __name__ == "__main__":
    main()

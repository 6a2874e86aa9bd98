"""A real terminal, drawn by tmux, with keys that are really pressed."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tests.rig.waiting import wait_until


class Ugro(Protocol):
    """The command, as a test has it."""

    def argv(self, *args: str) -> Sequence[str]: ...

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]: ...


PROMPT = "ready>"


class Screen:
    """A bash in a terminal of a given size."""

    def __init__(self, ugro: Ugro, folder: Path, columns: int, lines: int) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        variables = {**ugro.environment({"PS1": f"{PROMPT} ", "TERM": "xterm-256color"})}
        variables["PATH"] = f"{Path(ugro.argv()[0]).parent}:{variables['PATH']}"
        size = ["-x", str(columns), "-y", str(lines)]
        shell = ["env", "-u", "TMUX", "bash", "--norc", "--noprofile"]
        self._run("new-session", "-d", *size, *shell, env=variables)
        self._run("set-option", "-g", "window-size", "manual")
        self.wait_for(PROMPT)

    def type(self, text: str) -> None:
        self.write(text)
        self.press("Enter")

    def write(self, text: str) -> None:
        self._run("send-keys", "-l", text)

    def press(self, key: str) -> None:
        self._run("send-keys", key)

    def resize(self, columns: int, lines: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(lines))

    def text(self, *options: str) -> str:
        return self._run("capture-pane", "-p", *options)

    def title(self) -> str:
        return self._run("display-message", "-p", "#{pane_title}").strip()

    def rows(self) -> list[str]:
        return [line.rstrip() for line in self.text().splitlines() if line.strip()]

    def wait_for(self, pattern: str, timeout_s: float = 20) -> str:
        """The screen once the pattern is on it; on failure the screen is what was seen last."""
        seen = ""

        def is_there() -> bool:
            nonlocal seen
            seen = self.text()
            return re.search(pattern, seen, re.MULTILINE) is not None

        try:
            wait_until(is_there, timeout_s, pattern)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{seen}") from None
        return seen

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, timeout=10, check=False)

    def _run(self, *words: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run([*self._tmux, *words], capture_output=True, text=True, timeout=10, env=env, check=True)
        return done.stdout


def written(ugro: Ugro, *args: str, kind: str) -> tuple[int, bytes]:
    """The exit code, and the bytes that a command writes to a terminal that calls itself ``kind``."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        ugro.argv(*args), stdin=slave, stdout=slave, stderr=slave, env=ugro.environment({"TERM": kind})
    ) as process:
        os.close(slave)
        content = b""
        try:
            while part := os.read(master, 65536):
                content += part
        except OSError:  # how Linux says that nobody has the other end any more
            pass
        os.close(master)
        return process.wait(30), content

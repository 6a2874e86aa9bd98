"""The command line without a process of its own: for tests that only look at what is said."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from ugro.cli.main import run


def call(argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """As the process would answer; what it starts is started with ``env``."""
    out, err = _stream(), _stream()
    with _environment(env), chdir(cwd), _no_input(), redirect_stdout(out), redirect_stderr(err):
        code = run(list(argv))
    return subprocess.CompletedProcess(list(argv), code, _text(out), _text(err))


def _stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return str(stream.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]  # a BytesIO


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _no_input() -> Iterator[None]:
    before = sys.stdin
    with open(os.devnull) as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before

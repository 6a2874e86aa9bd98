"""A state directory and its agent for several tests: those that only look, or put back what they changed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.conftest import InProcess, Ugro
from tests.rig.waiting import end_all_with_variable, wait_until


@contextmanager
def commands(cluster: Path | None = None) -> Iterator[Ugro]:
    """The command line with a home of its own; in the end nothing that it started may be left."""
    home = Path(tempfile.mkdtemp(prefix="u"))
    for folder in ("cwd", "user"):
        (home / folder).mkdir()
    ugro = InProcess(home)
    ugro.cluster = cluster
    try:
        yield ugro
        stopped = ugro("agent", "stop")
        assert stopped.returncode == 0, stopped.stderr
        wait_until(lambda: not ugro.processes(), 20, "everything the agent started to end")
    finally:
        end_all_with_variable("UGRO_HOME", [str(home)])
        shutil.rmtree(home, ignore_errors=True)

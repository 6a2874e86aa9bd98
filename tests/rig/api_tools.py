"""Tools that know the API by its description alone, in an environment of their own: build/api-tools.

They need other versions of packages than UGRO and its tests, and are installed by the first test that uses them.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

TOOLS = ("openapi-python-client==0.29.1", "schemathesis==4.32.5")
_ROOT = Path(__file__).resolve().parents[2]
_INSTALL_S = 900


def api_tools() -> Path:
    """The folder of its programs."""
    venv = _ROOT / "build" / "api-tools"
    venv.parent.mkdir(exist_ok=True)
    stamp, wanted = venv / "installed", "\n".join(TOOLS)
    with (venv.parent / "api-tools.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side
        if not stamp.exists() or stamp.read_text() != wanted:
            _run([sys.executable, "-m", "venv", "--clear", str(venv)])
            _run([str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", *TOOLS])
            stamp.write_text(wanted)
    return venv / "bin"


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_INSTALL_S)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr[-2000:]}"

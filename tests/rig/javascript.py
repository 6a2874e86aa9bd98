"""Runs the dashboard's modules that touch no page, with the Node.js that Playwright brings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ugro.web.report import bundle, needed
from ugro.web.report_assets import modules

_TIMEOUT_S = 60


def answer_of(script: str) -> Any:
    """What the script gives to ``answer(…)``. It imports modules as pages do."""
    import playwright

    node = Path(playwright.__file__).parent / "driver" / "node"
    if not node.exists():
        pytest.skip("Playwright's Node.js is not installed")
    known = {"test": script} | {name: text for one in needed(script) for name, text in modules(one).items()}
    text = f"const answer = (value) => console.log(JSON.stringify(value));\n{bundle('test', known)}"
    done = subprocess.run(
        [str(node), "--input-type=module"], input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

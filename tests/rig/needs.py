"""Marks for tests that run somebody else's program. In CI, which installs them all, such a skip is a failure."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.rig.sshd import SYSTEM_PATH

ABSENT = ("not installed", "could not import")  # what such skips say; the second is pytest.importorskip's
IN_CI = os.environ.get("CI") == "true"


def programs(*names: str) -> pytest.MarkDecorator:
    absent = [name for name in names if shutil.which(name, path=SYSTEM_PATH) is None]
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")


def fail_if_absent(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    if report.skipped and any(words in reason for words in ABSENT):
        report.outcome = "failed"
        report.longrepr = f"{reason} (a skip elsewhere; scripts/setup.sh has to install it in CI)"

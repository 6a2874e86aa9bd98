"""Who submits: the account of the process, also where it has no name."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys

import pytest

from ugro.client.jobs import body_of

_NAMELESS = 54321
_ASK = f"""
import os
from ugro.client.jobs import body_of
os.setuid({_NAMELESS})
os.environ.clear()
print(body_of(None, None, None)["user"])
"""


def test_the_account_submits_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "somebody-else")
    assert body_of(None, None, None)["user"] == pwd.getpwuid(os.geteuid()).pw_name


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_id_without_a_name_submits_by_its_number() -> None:
    done = subprocess.run([sys.executable, "-c", _ASK], cwd="/", capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(_NAMELESS), done.stderr

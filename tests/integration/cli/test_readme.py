"""What the README tells a newcomer to type, typed: the commands after a ``$``, in their order, in a clone."""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.conftest import InProcess, Ugro

_ROOT = Path(__file__).parents[3]
# What fails on purpose.
_FAILS = {"ugro run -- python3 -c 'print(1 / 0)'": 1}


@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("torch") is None, reason="not installed: torch")
def test_every_step_of_the_tour_works_and_says_what_is_printed(ugro: Ugro) -> None:
    typed = InProcess(ugro.home)
    for command, printed in tour():
        done = typed(*shlex.split(command)[1:], cwd=_ROOT)
        assert done.returncode == _FAILS.get(command, 0), f"{command}\n{done.stdout}{done.stderr}"
        missing = [word for word in printed if word not in _words(done.stdout + done.stderr)]
        assert missing == [], f"{command}\n{done.stdout}{done.stderr}"


def test_the_two_commands_that_do_all_of_the_set_up_are_named_and_do_it() -> None:
    install = (_ROOT / "README.md").read_text().partition("## Install\n")[2].partition("\n## ")[0]
    named = re.findall(r"^make (\w+)  ", install, re.MULTILINE)
    assert named == ["demo", "test"], "these alone: a newcomer needs no other"
    groups = {"demo": "scripts/setup.sh demo", "test": "scripts/setup.sh"}  # without a name it is the group "test"
    for target in named:
        argv = ["make", "--no-print-directory", "-n", target]
        would = subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, check=True, timeout=60)
        first, *rest = would.stdout.splitlines()
        assert first == groups[target], "it makes .venv, and installs what it needs"
        assert rest, target


def tour() -> list[tuple[str, list[str]]]:
    """Each command, and the words of its output that are the same on every machine and at any time."""
    text = (_ROOT / "README.md").read_text()
    blocks = "\n".join(re.findall(r"^```\n(\$ .*?)^```", text, re.MULTILINE | re.DOTALL))
    found = re.findall(r"^\$ (ugro .*)\n((?:(?!\$ ).*\n)*)", blocks, re.MULTILINE)
    assert len(found) == 11
    return [(command, [word for word in _words(printed) if _is_lasting(word)]) for command, printed in found]


def _is_lasting(word: str) -> bool:
    """Neither a figure with its unit, nor a column that is left out where there is no terminal, nor a user's name."""
    return word.isalpha() and word.islower() and len(word) > 3 and word != "root"


def _words(text: str) -> list[str]:
    return re.findall(r"[\w.]+", text)

"""Completion in real shells: what pressing Tab does, with and without an agent."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.terminal import PROMPT, Screen
from tests.rig.waiting import wait_until

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux draws the terminal, and is not installed")
LONG_S = 5.0


@pytest.fixture(scope="module")
def ugro() -> Iterator[Ugro]:
    labels = {"n001": {"labels": ["fast", "lab2"]}, "n002": {"labels": ["fancy"]}}
    with ExitStack() as stack, commands(Farms(stack)(2).cluster_yaml(nodes=labels)) as ugro:
        done = ugro("run", "--no-sync", "--name", "prepare", "true")
        assert done.returncode == 0, done.stderr
        assert ugro("run", "-d", "--no-sync", "--name", "sleepy", "sleep", "600").returncode == 0
        wait_until(lambda: set(candidates(ugro, "exec n")) == {"n001", "n002"}, 20, "the agent to know its nodes")
        yield ugro


def candidates(ugro: Ugro, line: str, shell: str = "bash") -> list[str]:
    """What ugro answers to a shell that asks how the last word of a line goes on."""
    words = ["ugro", *line.split(" ")]
    asked = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1), "_UGRO_COMPLETE": f"{shell}_complete"}
    done = subprocess.run(
        ugro.argv(), env=ugro.environment(asked), cwd=ugro.home / "cwd", capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [text.partition(",")[2] for text in done.stdout.split()]


def ids(ugro: Ugro) -> dict[str, str]:
    rows = [row.split("\t") for row in ugro("status").stdout.splitlines()[1:]]
    return {row[1]: row[0] for row in rows}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("he", {"health"}),
        ("node re", {"resume"}),
        ("launch --gpu", {"--gpu-memory", "--gpu-model", "--gpus-per-node"}),
        ("launch --on-lost ", {"wait", "restart"}),
        ("launch --retry-on cuda", {"cuda_oom"}),
        ("run --label ", {"fast", "lab2", "fancy"}),
        ("node show n", {"n001", "n002"}),
        ("exec n001 n", {"n002"}),
        ("exec @fa", {"@fast", "@fancy"}),
        ("health @", {"@all", "@fast", "@lab2", "@fancy", "@worker"}),
        ("status --state run", {"running"}),
        ("completion ", {"bash", "zsh", "fish"}),
        ("nonsense x", set()),
    ],
)
def test_commands_options_nodes_and_labels_are_completed(ugro: Ugro, line: str, expected: set[str]) -> None:
    assert set(candidates(ugro, line)) == expected


def test_jobs_are_completed_by_id_and_by_name(ugro: Ugro) -> None:
    number = ids(ugro)
    assert set(candidates(ugro, "logs ")) == {*number, *number.values(), "last"}
    assert candidates(ugro, "logs pre") == ["prepare"]
    assert candidates(ugro, "launch --after sl") == ["sleepy"]
    assert set(candidates(ugro, "cancel ")) == {"sleepy", number["sleepy"], "last"}, "the other one has ended"


@needs_tmux
def test_tab_completes_in_bash(ugro: Ugro, tmp_path: Path) -> None:
    screen = Screen(ugro, tmp_path, 100, 30)
    try:
        screen.type('eval "$(ugro completion bash)"; echo installed')
        screen.wait_for("^installed")
        for typed, completed in (
            ("ugro heal", "ugro health"),
            ("ugro launch --checkpoint-d", "ugro launch --checkpoint-dir"),
            ("ugro exec @fas", "ugro exec @fast"),
            ("ugro logs pre", "ugro logs prepare"),
        ):
            screen.write(typed)
            screen.press("Tab")
            screen.wait_for(rf"{completed}\s*\Z")
            screen.press("C-c")
            screen.wait_for(rf"\^C\n{PROMPT}\s*\Z")
        screen.write("ugro node drain n")
        screen.press("Tab")
        screen.wait_for(r"ugro node drain n00\s*\Z")
        screen.press("Tab")
        screen.press("Tab")
        screen.wait_for(r"n001 +n002")
    finally:
        screen.close()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_tab_completes_in_fish(ugro: Ugro) -> None:
    def completed(line: str) -> dict[str, str]:
        variables = ugro.environment({})
        variables["PATH"] = f"{Path(ugro.argv()[0]).parent}:{variables['PATH']}"
        script = f"ugro completion fish | source; complete -C {shlex.quote(line)}"
        done = subprocess.run(
            ["fish", "--no-config", "-c", script], env=variables, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stderr == ""
        return dict((row.partition("\t")[0], row.partition("\t")[2]) for row in done.stdout.splitlines())

    assert completed("ugro compl") == {"completion": "Print a shell completion script."}
    assert set(completed("ugro exec @f")) == {"@fast", "@fancy"}
    assert completed("ugro logs pre") == {"prepare": "the newest job of this name"}
    assert completed(f"ugro why {ids(ugro)['sleepy']}")[ids(ugro)["sleepy"]].startswith("sleepy (")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed(ugro: Ugro, shell: str) -> None:
    printed = ugro("completion", shell)
    assert (printed.returncode, printed.stderr) == (0, "")
    assert f"_UGRO_COMPLETE={shell}_complete" in printed.stdout


def test_without_an_agent_it_is_quiet_and_starts_none(ugro: Ugro) -> None:
    """The last one here: it stops the agent."""
    assert ugro("cancel", "sleepy").returncode == 0
    ugro("wait", "sleepy")
    assert ugro("agent", "stop").returncode == 0
    began = time.monotonic()
    for line in ("logs ", "exec n", "exec @f", "cancel ", "launch --after "):
        assert candidates(ugro, line) == []
    assert time.monotonic() - began < 5 * LONG_S
    assert candidates(ugro, "heal") == ["health"]
    assert ugro("agent", "status").returncode == 5

"""A script whose import only some nodes have: where it is placed, what is said about it, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands

SCRIPT = "import os\nimport fancynet\nfrom local import helper\nprint('on', os.environ['UGRO_TEST_NODE'], fancynet.x)\n"


@pytest.fixture
def ugro(tmp_path: Path) -> Iterator[Ugro]:
    """n1 lacks the package; n2 and n3 find it in a folder that their environment names. n1 would be chosen first."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "fancynet.py").write_text("x = 'trains'\n")
    (tmp_path / "none").mkdir()
    folders = {"n1": tmp_path / "none", "n2": packages, "n3": packages}
    nodes = [
        f"  {name}: {{transport: [sh, -c, 'exec \"$@\"', sh], remote_root: {tmp_path}/{name},"
        f" env: {{PYTHONPATH: '{folder}', UGRO_TEST_NODE: {name}}}}}"
        for name, folder in folders.items()
    ]
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes:\n" + "\n".join(nodes) + "\n")
    with commands(file) as ugro:
        folder = ugro.home / "cwd"
        (folder / "train.py").write_text(SCRIPT)
        (folder / "local.py").write_text("helper = 1\n")
        yield ugro


def test_a_script_is_placed_where_its_imports_are(ugro: Ugro, tmp_path: Path) -> None:
    planned = ugro("launch", "train.py", "--nodes", "1", "--dry-run")
    assert "n2 and n3 have fancynet; n1 lacks it" in planned.stdout
    done = ugro("launch", "train.py", "--nodes", "1")
    assert (done.returncode, done.stdout) == (0, "on n2 trains\n"), done.stderr
    assert "note: n2 and n3 have fancynet; n1 lacks it" in done.stderr
    dry = ugro("launch", "train.py", "--nodes", "3", "--dry-run")
    assert (dry.returncode, dry.stdout) == (3, ""), dry.stderr
    assert "train would not start: n1 lacks fancynet, which the script imports" in dry.stderr
    refused = ugro("launch", "train.py", "--nodes", "3")
    assert refused.returncode == 1
    assert "not started: n1 lacks fancynet, which the script imports" in refused.stderr
    assert "under n1 in cluster.yaml: python: ~/venv/bin/python" in refused.stderr
    job = json.loads(ugro("status", "last", "--json").stdout)["job"]
    assert (job["attempt"], job["attempts"][0]["failure"]["cause"]) == (1, "import_error")
    setup = f"cp {tmp_path}/packages/fancynet.py {tmp_path}/none/"
    assert ugro("launch", "train.py", "--nodes", "3", "--setup", setup, "--dry-run").returncode == 0
    repaired = ugro("launch", "train.py", "--nodes", "3", "--setup", setup)
    assert repaired.returncode == 0, repaired.stderr
    assert ugro("launch", "train.py", "--nodes", "3").returncode == 0, "it is found as soon as it is there"


def test_a_dry_run_refuses_what_a_launch_refuses(ugro: Ugro) -> None:
    (ugro.home / "cwd" / "plain.py").write_text("print(1)\n")
    (ugro.home / "cwd" / "job.yaml").write_text("script: plain.py\nelastic: {min_ranks: 4}\nresources: {nodes: 3}\n")
    for words, said in {
        ("plain.py", "--nodes", "3", "--min-ranks", "5"): "it would have 3 ranks, fewer than its min_ranks 5",
        ("-f", "job.yaml"): "it would have 3 ranks, fewer than its min_ranks 4",
        ("plain.py", "--min-ranks", "1", "--train-sync", "local"): "an elastic job cannot train with local SGD",
    }.items():
        for dry in ((), ("--dry-run",)):
            refused = ugro("launch", *words, *dry)
            assert (refused.returncode in (2, 3), refused.stdout, said in refused.stderr) == (True, "", True), words
    assert ugro("status", "--json").stdout.count('"name"') == 0, "nothing was submitted"
    assert ugro("launch", "plain.py", "--nodes", "3", "--min-ranks", "3", "--dry-run").returncode == 0

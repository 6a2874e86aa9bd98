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
    refused = ugro("launch", "train.py", "--nodes", "3")
    assert refused.returncode == 1
    assert "not started: n1 lacks fancynet, which the script imports" in refused.stderr
    assert "under n1 in cluster.yaml: python: ~/venv/bin/python" in refused.stderr
    job = json.loads(ugro("status", "last", "--json").stdout)["job"]
    assert (job["attempt"], job["attempts"][0]["failure"]["cause"]) == (1, "import_error")
    setup = f"cp {tmp_path}/packages/fancynet.py {tmp_path}/none/"
    repaired = ugro("launch", "train.py", "--nodes", "3", "--setup", setup)
    assert repaired.returncode == 0, repaired.stderr
    assert ugro("launch", "train.py", "--nodes", "3").returncode == 0, "it is found as soon as it is there"

"""A package of somebody else adds a feature: examples/feature, as it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from urllib.request import HTTPCookieProcessor, Request, build_opener

import pytest

import ugro as package
from tests.integration.conftest import Ugro

EXAMPLE = Path(package.__file__).parents[2] / "examples/feature"

PRINTS = "for number in range(5): print('epoch', number, 'loss')"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """What an installer leaves of the package, on the path of Python."""
    shutil.copytree(EXAMPLE / "ugro_words", tmp_path / "ugro_words")
    about = tmp_path / "ugro_words-1.dist-info"
    about.mkdir()
    (about / "entry_points.txt").write_text("[other]\nx = y:z\n\n[ugro.features]\nwords = ugro_words:FEATURE\n")
    return tmp_path


def test_a_package_adds_a_command_an_operation_a_section_and_a_page(ugro: Ugro, site: Path) -> None:
    env = {"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"}
    file = site / "cluster.yaml"
    file.write_text("nodes: {here: {transport: local}}\nwords: {shown: 2}\n")
    ugro.cluster = file
    assert "Count the words in a job's log." in ugro("--help", env=env).stdout
    run = ugro("run", "--no-sync", "--cwd", "/", "--", "python3", "-c", PRINTS, env=env)
    assert run.returncode == 0, run.stderr
    counted = ugro("words", "last", "--json", env=env)
    assert counted.returncode == 0, counted.stderr
    assert json.loads(counted.stdout)["words"] == [{"word": "epoch", "times": 5}, {"word": "loss", "times": 5}]
    assert "epoch" in ugro("words", "last", env=env).stdout
    unknown = ugro("words", "no-such-job", env=env)
    assert (unknown.returncode, "there is no job" in unknown.stderr) == (4, True)
    link = json.loads(ugro("dashboard", "--json", env=env).stdout)["dashboard"]["url"]
    address, _, once = link.partition("/login?")
    browser = build_opener(HTTPCookieProcessor())
    browser.open(Request(f"{address}/login", once.encode(), {"Origin": address})).close()
    with browser.open(f"{address}/words/last") as page:
        assert b"Words of job" in page.read()


def test_a_feature_that_cannot_be_loaded_is_one_clear_error(ugro: Ugro, site: Path) -> None:
    (site / "ugro_words/__init__.py").write_text("import no_such_module\n")
    refused = ugro("--help", env={"PYTHONPATH": str(site)})
    assert refused.returncode == 2
    assert "the feature ugro_words:FEATURE cannot be loaded" in refused.stderr
    assert "Traceback" not in refused.stderr

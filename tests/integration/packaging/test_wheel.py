"""The wheel alone, without the clone: in an environment that has the packages it declares and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.integration.conftest import Ugro
from ugro.features.experiments.rules.grid import MODELS

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "src/ugro"
_LIMIT_S = 330


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source archive, of a copy: builds leave files behind."""
    pytest.importorskip("hatchling")
    copy = tmp_path_factory.mktemp("copy")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "examples", copy / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / PACKAGE, copy / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    argv = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--target", "sdist"]
    subprocess.run(argv, cwd=copy, check=True, capture_output=True, timeout=_LIMIT_S)
    (wheel,) = copy.glob("dist/*.whl")
    (archive,) = copy.glob("dist/*.tar.gz")
    return wheel, archive


def ours() -> set[str]:
    """Every file of the package: code, templates, static files, migrations, the node program."""
    found = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / PACKAGE).rglob("*") if path.is_file()}
    return {name for name in found if "__pycache__" not in name}


def trainings() -> set[str]:
    """The examples that experiments run."""
    return {f"ugro/examples/{model.script}" for model in MODELS.values()}


def test_wheel_and_archive_have_every_file_of_the_package(built: tuple[Path, Path]) -> None:
    wheel, archive = built
    with zipfile.ZipFile(wheel) as zipped:
        assert {name for name in zipped.namelist() if ".dist-info/" not in name} == ours() | trainings()
    with tarfile.open(archive) as packed:
        names = {member.name.partition("/src/")[2] for member in packed if member.isfile()}
    assert ours() <= names
    assert "ugro/py.typed" in names


class Installed(Ugro):
    """The command line of an environment that has the wheel and the packages it needs."""

    def __init__(self, home: Path, environment: Path) -> None:
        super().__init__(home)
        self.bin = environment / "bin"

    def argv(self, *args: str) -> list[str]:
        return [str(self.bin / "ugro"), *args]


@pytest.fixture
def installed(ugro: Ugro, built: tuple[Path, Path], tmp_path: Path) -> Installed:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=_LIMIT_S)
    options = ("--no-deps", "--no-index", "--no-compile", "--quiet")
    into = [sys.executable, "-m", "pip", "--python", str(environment), "install", *options]
    subprocess.run([*into, str(built[0])], check=True, timeout=_LIMIT_S)
    (packages,) = environment.glob("lib/python*/site-packages")
    add(packages, "ugro", besides={"ugro"})
    return Installed(ugro.home, environment)


def add(packages: Path, name: str, besides: set[str] | None = None) -> None:
    """Links to the distribution and all that it requires, as they are installed here."""
    left, seen = [name], set[str]()
    while left:
        found = distribution(left.pop())
        if found.name in seen:
            continue
        seen.add(found.name)
        left += required(found)
        for top in tops(found) if found.name not in (besides or ()) else ():
            if not (packages / top.name).exists():
                (packages / top.name).symlink_to(top)


def required(found: Distribution) -> list[str]:
    wanted = [Requirement(text) for text in found.requires or ()]
    return [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]


def tops(found: Distribution) -> set[Path]:
    names = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
    return {Path(str(found.locate_file(name))) for name in names}


@pytest.mark.proof
def test_the_wheel_runs_a_lab_and_its_dashboard(installed: Installed) -> None:
    up = installed("lab", "up", "--nodes", "2")
    try:
        assert up.returncode == 0, up.stderr
        assert installed("run", "--", "echo", "from the wheel").stdout == "from the wheel\n"
        link = json.loads(installed("dashboard", "--json", "--no-open").stdout)["dashboard"]["url"]
        expect_pages(link)
    finally:
        assert installed("lab", "down").returncode == 0


def expect_pages(link: str) -> None:
    address, _, word = link.partition("/login?")
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    browser.addheaders = [("Origin", address)]

    def text_of(url: str, form: bytes | None = None) -> str:
        with browser.open(url, form, timeout=20) as answer:
            return str(answer.read().decode())

    assert "<form" in text_of(link)
    text_of(f"{address}/login", word.encode())  # as the form does
    page = text_of(address)
    assert "lab2" in page
    found = re.findall(r'(?:href|src)="(/static/[^"]+)"', page)
    assert {Path(name).suffix for name in found} >= {".css", ".js"}
    for name in found:
        assert text_of(address + name)


@pytest.mark.proof
@pytest.mark.timeout(500)
def test_without_pytorch_the_demo_says_how_to_get_it_and_trains_in_plain_python(installed: Installed) -> None:
    done = installed("demo", timeout=_LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PyTorch is not installed" in done.stderr
    assert "pip install torch" in done.stderr
    assert "SIGKILL" in done.stderr
    assert "\ttrain\tsucceeded" in done.stdout


@pytest.mark.proof
@pytest.mark.timeout(500)
def test_with_pytorch_the_demo_balances_a_training(installed: Installed) -> None:
    (packages,) = installed.bin.parent.glob("lib/python*/site-packages")
    add(packages, "torch")
    done = installed("demo", "--json", "--epochs", "1", timeout=_LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PyTorch is not installed" not in done.stderr

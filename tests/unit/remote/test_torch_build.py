"""What torch was built for, as its own file says it: without importing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ugro.node.system import SOURCE


@pytest.mark.parametrize(
    ("says", "cuda"),
    [
        ("cuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n", "12.6"),
        ('cuda = "11.8"\n', "11.8"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "none (cpu)"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2.41133-dd7f95766'\n", "none (rocm6.2)"),
        ("cuda = None\nxpu: Optional[str] = '20250000'\n", "none (xpu)"),
        ("debug = False\n", None),
        (None, None),
    ],
)
def test_a_build_says_for_which_gpus_it_is(
    says: str | None, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "torch-2.13.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    if says is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "version.py").write_text(says)
    monkeypatch.syspath_prepend(tmp_path)
    assert _functions()["torch_cuda"]() == cuda


def test_nccl_of_conda_is_compared_with_that_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert _functions()["conda_nccl"]() is None
    (tmp_path / "conda-meta").mkdir()
    for name in ("nccl-tests-2.1-h1.json", "history", "nccl-2.27.3.1-h03a54cd_0.json"):
        (tmp_path / "conda-meta" / name).touch()
    assert _functions()["conda_nccl"]() == "2.27.3"


def _functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(SOURCE, found)
    return found

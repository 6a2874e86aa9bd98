"""What the budgets of the project are held against is counted right."""

from __future__ import annotations

import ast
import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

_MODULE = '''"""A docstring
of two lines."""

# a comment
import os


class One:
    """Another."""

    def go(self, other):
        text = """lines
        of a value"""
        other.part = text
        self.part = other
        return os.sep
'''


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure", ROOT / "scripts/measure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_blank_lines_comments_and_docstrings_are_no_code_and_values_are(measure: ModuleType) -> None:
    assert measure.code_lines(_MODULE) == 8


def test_a_part_that_is_put_into_another_object_is_set_late(measure: ModuleType) -> None:
    assert [measure._late(one) for one in measure._functions(_MODULE)] == [1]


@pytest.mark.parametrize(
    ("loop", "polls"),
    [
        ("while True:\n    await asyncio.sleep(1)", True),
        ("while True:\n    await changed.wait(seen, 5)", True),
        ("while True:\n    await changed.wait()", False),
        ("while queue:\n    queue.pop()", False),
    ],
)
def test_a_loop_that_looks_again_after_some_time_polls(measure: ModuleType, loop: str, polls: bool) -> None:
    tree = ast.parse(f"async def run():\n    {loop.replace(chr(10), chr(10) + '    ')}")
    assert [measure._polls(node) for node in ast.walk(tree) if isinstance(node, ast.While)] == [polls]


def test_each_count_has_a_budget_with_a_reason_and_what_is_above_it_fails(
    measure: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = tomllib.loads(measure.BUDGETS.read_text())
    assert set(measure.COUNTS) < set(budgets)
    assert all(len(one["why"].split()) > 2 for one in budgets.values())
    none = tmp_path / "budgets.toml"
    none.write_text("".join(f'["{name}"]\nmost = 0\nwhy = "a test"\n' for name in budgets))
    assert measure.main(["--check"], none) == 1
    assert "lines of code" in capsys.readouterr().out

"""The reference page is made from the schema, and says all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ugro.config.load import parse_config
from ugro.config.reference import example, main, render, sections
from ugro.config.schema import NodeEntry, Settings
from ugro.config.section import Section

ROOT = Path(__file__).resolve().parents[3]


def test_the_committed_page_is_what_the_schema_says() -> None:
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == render(), "run: python -m ugro.config.reference docs/configuration.md"


def test_the_pages_example_has_every_key_and_loads() -> None:
    assert f"```yaml\n{example()}```" in render()
    tree = yaml.safe_load(example())
    assert set(tree) == {"nodes", *Settings.known_keys()}
    for name, section in sections().items():
        assert set(tree[name]) == set(section.known_keys())
    used = {key for fields in tree["nodes"].values() for key in fields or {}}
    assert used == set(NodeEntry.known_keys())
    config = parse_config(example(), Path("cluster.yaml"), {})
    defaults = parse_config("nodes: [a]", Path("cluster.yaml"), {})
    assert replace(config, nodes=()) == replace(defaults, nodes=())


def test_every_snippet_of_the_page_loads() -> None:
    snippets = [part.partition("```")[0] for part in render().split("```yaml\n")[1:]]
    assert len(snippets) == 4
    for snippet in snippets:
        assert len(parse_config(snippet, Path("cluster.yaml"), {}).nodes) == 3


def test_every_key_stands_in_a_table_with_its_meaning() -> None:
    page = render()
    every: list[type[Section]] = [NodeEntry, *sections().values()]
    for section in every:
        for key, declared in section.known_keys().items():
            rows = [line for line in page.splitlines() if line.startswith(f"| `{key}` |")]
            assert any(declared.meaning in row for row in rows), key


def test_the_command_writes_the_page_and_notices_an_old_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "configuration.md"
    with pytest.raises(SystemExit) as missing:
        main([str(page), "--check"])
    assert missing.value.code == 1
    main([str(page)])
    assert page.read_text(encoding="utf-8") == render()
    main([str(page), "--check"])
    page.write_text("old")
    with pytest.raises(SystemExit) as old:
        main([str(page), "--check"])
    assert old.value.code == 1
    assert "is out of date" in capsys.readouterr().err
    assert page.read_text() == "old"

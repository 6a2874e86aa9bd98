"""The generated parts of the pages about the cluster file and job files say all that the schemas say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ugro.kernel.config.load import parse_config
from ugro.kernel.config.reference import cluster_example, filled, main, parts
from ugro.kernel.config.schema import NodeEntry, Settings
from ugro.kernel.config.section import Section

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "docs" / name for name in ("configuration.md", "jobs.md", "serving.md", "quotas.md")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_committed_page_is_what_the_schema_says(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert filled(page) == page, "run: make docs"


def test_every_part_is_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    for name, part in parts().items():
        assert text.count(f"<!-- generated: {name} -->\n{part}<!-- end -->\n") == 1, name


def test_the_pages_example_has_every_key_and_loads() -> None:
    tree = yaml.safe_load(cluster_example())
    assert set(tree) == {"nodes", *Settings.known_keys()}
    for name, section in Settings.sections().items():
        assert set(tree[name]) == set(section.known_keys())
    used = {key for fields in tree["nodes"].values() for key in fields or {}}
    assert used == set(NodeEntry.known_keys())
    config = parse_config(cluster_example(), Path("cluster.yaml"), {})
    defaults = parse_config("nodes: [a]", Path("cluster.yaml"), {})
    assert replace(config, nodes=()) == replace(defaults, nodes=())


def test_every_snippet_of_the_page_loads() -> None:
    snippets = [part.partition("```")[0] for part in PAGES[0].read_text(encoding="utf-8").split("```yaml\n")[1:]]
    assert len(snippets) == 4
    for snippet in snippets:
        assert len(parse_config(snippet, Path("cluster.yaml"), {}).nodes) == 3


def test_every_key_stands_in_a_table_with_its_meaning() -> None:
    rows = "".join(parts().values()).splitlines()
    every: list[type[Section]] = [NodeEntry, *Settings.sections().values()]
    for section in every:
        for key, declared in section.known_keys().items():
            assert any(row.startswith(f"| `{key}` |") and declared.meaning in row for row in rows), key


def test_the_command_writes_the_parts_and_notices_old_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("# By hand\n\n<!-- generated: causes -->\nold\n<!-- end -->\nmore\n", encoding="utf-8")
    with pytest.raises(SystemExit) as old:
        main([str(page), "--check"])
    assert old.value.code == 1
    assert "is out of date" in capsys.readouterr().err
    assert "old" in page.read_text(encoding="utf-8")
    main([str(page)])
    causes = parts()["causes"]
    assert page.read_text(encoding="utf-8") == (
        f"# By hand\n\n<!-- generated: causes -->\n{causes}<!-- end -->\nmore\n"
    )
    main([str(page), "--check"])

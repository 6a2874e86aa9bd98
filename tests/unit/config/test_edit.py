"""A node added to the text of a cluster file, or taken out: one change, and all the rest as it was."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.config.edit import add_node, remove_node, write_atomically
from ugro.kernel.config.load import load_config, parse_config, read_text
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.support.errors import ConfigError, NotFound, UsageError

FIELDS: dict[str, object] = {"ip": "10.0.0.3", "user": "ann", "port": 2222, "labels": ["a", "3070"]}
FLOW = 'gpu3: {ip: 10.0.0.3, user: ann, port: 2222, labels: [a, "3070"]}'

BLOCK_LIST = """\
# Our machines.
nodes:   # all of them
  - gpu1
  # the slow one
  - gpu2  # in the cellar

# How to get there.
ssh: {timeout: 3}
"""
BLOCK_MAP = """\
nodes:
  gpu1:
    ip: 10.0.0.1  # the fast one
    # port: 22

  # the slow one
  gpu2:
    ip: 10.0.0.2
    # in the cellar

  # gpu9: not bought yet
ssh: {timeout: 3}
"""
FLOW_LINES = "nodes: [\n  gpu1,  # fast\n  gpu2   # slow\n]\nssh: {timeout: 3}\n"


def names(text: str) -> list[str]:
    return [node.name for node in parse_config(text, Path("cluster.yaml"), {}).nodes]


@pytest.mark.parametrize(
    ("before", "old", "new"),
    [
        (BLOCK_LIST, "  - gpu2  # in the cellar\n", "  - gpu2  # in the cellar\n  - gpu3\n"),
        ("nodes:\n- gpu1\n- gpu2\nssh: {}\n", "- gpu2\n", "- gpu2\n- gpu3\n"),
        ("nodes:\n- gpu1\n- gpu2", "- gpu2", "- gpu2\n- gpu3"),
        ("nodes:\r\n  - gpu1\r\n  - gpu2\r\nssh: {}\r\n", "gpu2\r\n", "gpu2\r\n  - gpu3\r\n"),
        ("nodes:\r\n  - gpu1\r\n  - gpu2", "gpu2", "gpu2\r\n  - gpu3"),
        ("nodes: [gpu1, gpu2]  # c\n", "gpu2", "gpu2, gpu3"),
        ("nodes: [gpu1,\n  gpu2]\n", "gpu2", "gpu2, gpu3"),
        ("nodes: [gpu1, gpu2,]\n", "gpu2", "gpu2, gpu3"),
        (FLOW_LINES, "gpu2   # slow\n", "gpu2,   # slow\n  gpu3\n"),
        (FLOW_LINES.replace("gpu2 ", "gpu2,"), "# slow\n", "# slow\n  gpu3,\n"),
        (BLOCK_MAP, "    # in the cellar\n", "    # in the cellar\n  gpu3:\n"),
        ("nodes: {gpu1: {}, gpu2: {ip: b}}\n", "{ip: b}", "{ip: b}, gpu3: {}"),
        ("nodes: {gpu1, gpu2}\n", "gpu2", "gpu2, gpu3: {}"),
        ("nodes:\n  gpu1: &all {user: ann}\n  gpu2: *all\n", "*all\n", "*all\n  gpu3:\n"),
        ("\ufeffnodes: [gpu1, gpu2]\n", "gpu2", "gpu2, gpu3"),
        ("---\nnodes:\n  - gpu1\n  - gpu2\n...\n", "gpu2\n", "gpu2\n  - gpu3\n"),
    ],
)
def test_a_name_is_added_in_the_way_of_the_file(before: str, old: str, new: str) -> None:
    assert before.count(old) == 1
    after = add_node(before, "gpu3", {})
    assert after == before.replace(old, new)
    assert names(after) == ["gpu1", "gpu2", "gpu3"]


@pytest.mark.parametrize(
    ("before", "old", "new"),
    [
        (
            BLOCK_MAP,
            "    # in the cellar\n",
            '    # in the cellar\n  gpu3:\n    ip: 10.0.0.3\n    user: ann\n    port: 2222\n    labels: [a, "3070"]\n',
        ),
        ("nodes:\n  gpu1: {ip: a}\n  gpu2: {ip: b}  # c\nssh: {}\n", "{ip: b}  # c\n", f"{{ip: b}}  # c\n  {FLOW}\n"),
        ("nodes:\n  gpu1:\n  gpu2:", "gpu2:", f"gpu2:\n  {FLOW}"),
        ("nodes: {gpu1: {}, gpu2: {ip: b}}\n", "{ip: b}", f"{{ip: b}}, {FLOW}"),
        ("nodes: {\n  gpu1: {},\n  gpu2: {},\n}\n", "gpu2: {},\n", f"gpu2: {{}},\n  {FLOW},\n"),
        ('{"nodes": {"gpu2": {"ip": "b"}}}', '{"ip": "b"}', f'{{"ip": "b"}}, {FLOW}'),
    ],
)
def test_a_node_with_fields_is_added_in_the_way_of_the_file(before: str, old: str, new: str) -> None:
    assert before.count(old) == 1
    after = add_node(before, "gpu3", FIELDS)
    assert after == before.replace(old, new)
    added = parse_config(after, Path("cluster.yaml"), {}).nodes[-1]
    assert added == NodeSpec("gpu3", host="10.0.0.3", user="ann", port=2222, labels=("a", "3070"))


@pytest.mark.parametrize(
    ("before", "name", "gone"),
    [
        (BLOCK_LIST, "gpu1", "  - gpu1\n"),
        (BLOCK_LIST, "gpu2", "  - gpu2  # in the cellar\n"),
        ("nodes:\r\n- gpu1\r\n- gpu2\r\n", "gpu1", "- gpu1\r\n"),
        ("nodes:\n- gpu1\n- gpu2", "gpu2", "- gpu2"),
        ("nodes: [gpu1, gpu2]  # c\n", "gpu1", "gpu1, "),
        ("nodes: [gpu1, gpu2]  # c\n", "gpu2", ", gpu2"),
        ("nodes: [gpu1,  # fast\n  gpu2]\n", "gpu1", "gpu1,"),
        ("nodes: [gpu1,  # fast\n  gpu2]\n", "gpu2", "gpu2"),
        (FLOW_LINES, "gpu1", "  gpu1,  # fast\n"),
        (FLOW_LINES, "gpu2", "  gpu2   # slow\n"),
        (BLOCK_MAP, "gpu1", "  gpu1:\n    ip: 10.0.0.1  # the fast one\n    # port: 22\n"),
        (BLOCK_MAP, "gpu2", "  gpu2:\n    ip: 10.0.0.2\n    # in the cellar\n"),
        ("nodes: {gpu1: {ip: a}, gpu2: }\n", "gpu1", "gpu1: {ip: a}, "),
        ("nodes: {gpu1: {ip: a}, gpu2: }\n", "gpu2", ", gpu2:"),
        ("nodes:\n  gpu1: &all {user: ann}\n  gpu2: *all\n", "gpu2", "  gpu2: *all\n"),
        (
            "nodes:\n  gpu1:\n    labels:\n    - a\n    - b\n  gpu2:\n",
            "gpu1",
            "  gpu1:\n    labels:\n    - a\n    - b\n",
        ),
    ],
)
def test_a_node_is_taken_out_and_the_comments_of_others_stay(before: str, name: str, gone: str) -> None:
    assert before.count(gone) == 1
    after = remove_node(before, name)
    assert after == before.replace(gone, "")
    assert names(after) == [other for other in ("gpu1", "gpu2") if other != name]


@pytest.mark.parametrize("name", ["1", "on", "null", "3070ti", "1e3", "0x10", "y"])
def test_a_name_that_yaml_takes_for_something_else_is_quoted(name: str) -> None:
    for before in ("nodes: [a]\n", "nodes:\n- a\n", "nodes: {a: {}}\n", "nodes:\n  a:\n"):
        assert names(add_node(before, name, {})) == ["a", name]


@pytest.mark.parametrize("empty", ["", "# no nodes yet", "# no nodes yet\n"])
def test_a_file_without_content_gets_its_first_node(empty: str) -> None:
    assert names(add_node(empty, "gpu1", {})) == ["gpu1"]
    after = add_node(empty, "gpu1", {"ip": "10.0.0.1"})
    assert after.startswith(empty)
    assert parse_config(after, Path("cluster.yaml"), {}).nodes[0].host == "10.0.0.1"


def test_fields_that_say_nothing_new_are_not_written() -> None:
    after = add_node("nodes: [gpu1]\n", "gpu2", {"user": None, "role": "worker", "transport": "ssh"})
    assert after == "nodes: [gpu1, gpu2]\n"


def test_a_list_of_names_is_not_turned_into_a_map() -> None:
    with pytest.raises(ConfigError, match=r"lab\.yaml: nodes is a list of names, and gpu3 needs ip") as caught:
        add_node(BLOCK_LIST, "gpu3", {"ip": "10.0.0.3"}, file="lab.yaml")
    assert "gpu3: {ip: 10.0.0.3}" in str(caught.value.hint)
    assert "~/.ssh/config" in str(caught.value.hint)


@pytest.mark.parametrize("text", [BLOCK_LIST, BLOCK_MAP, FLOW_LINES, "nodes: {gpu1: }"])
def test_a_name_that_is_taken_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="there is a node named gpu1 already"):
        add_node(text, "gpu1", {})


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("-x", {}, "expected a node's name"),
        ("a b", {}, "expected a node's name"),
        ("a", {"port": 0}, r"a\.port: expected a whole number"),
        ("a", {"prot": 1}, r"a\.prot: unknown key"),
        ("a", {"host": "-oProxyCommand=x"}, r"a\.host: expected a host name"),
        ("a", {"ip": "x", "host": "y"}, r"a\.host: "),
        ("a", {"role": "master"}, "gpu1 is the master already"),
    ],
)
def test_a_node_that_could_not_be_loaded_is_not_written(name: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        add_node("nodes: {gpu1: {role: master}}\n", name, fields)
    assert caught.value.hint


def test_an_unknown_node_is_not_found_and_the_nearest_is_named() -> None:
    with pytest.raises(NotFound, match=r"no node named gpu3 in cluster\.yaml") as caught:
        remove_node("nodes: [gpu1, master]\n", "gpu3")
    assert caught.value.hint == "did you mean gpu1?"
    with pytest.raises(NotFound) as far:
        remove_node("nodes: [gpu1, master]\n", "zzz")
    assert far.value.hint == "the nodes are gpu1, master"


def test_the_last_node_stays() -> None:
    with pytest.raises(UsageError, match="gpu1 is the only node"):
        remove_node("nodes: [gpu1]\n", "gpu1")


def test_a_file_that_is_wrong_already_is_not_edited() -> None:
    for text in ("nodes: [gpu1]\nssh: {timeout: 0}\n", "nodes: []\n", "nodes: [a"):
        with pytest.raises(ConfigError, match=r"^cluster\.yaml:"):
            add_node(text, "gpu2", {})
        with pytest.raises(ConfigError, match=r"^cluster\.yaml:"):
            remove_node(text, "gpu1")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        # Without gpu1 the alias would point at nothing.
        ("nodes:\n  gpu1: &all {user: ann}\n  gpu2: *all\n", "gpu1"),
        ("nodes: {gpu1: &all {user: ann}, gpu2: *all}\n", "gpu2"),
    ],
)
def test_a_layout_that_cannot_be_cut_is_left_to_its_owner(text: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"edit lab\.yaml by hand") as caught:
        remove_node(text, name, file="lab.yaml")
    assert caught.value.hint == f"remove {name} under nodes"


def test_the_line_to_add_by_hand_is_in_the_hint() -> None:
    with pytest.raises(ConfigError, match=r"edit cluster\.yaml by hand") as caught:
        add_node("nodes: {gpu1: &all {user: ann}, gpu2: *all}\n", "gpu3", {"ip": "10.0.0.3"})
    assert caught.value.hint == "add under nodes: gpu3: {ip: 10.0.0.3}"


NAMES = st.lists(st.from_regex(r"gpu[a-z0-9._-]{0,5}", fullmatch=True), min_size=1, max_size=4, unique=True)
COMMENTS = st.sampled_from(["", "  # a comment", "   #, ]}: x"])
GAPS = st.sampled_from(["", "\n", "  # between\n", "# at the edge\n", "\n    # deep\n\n"])
ENDS = st.sampled_from(["", "\n", "\nssh: {timeout: 3}\n", "\n\n# done\nssh:\n  timeout: 3"])


@st.composite
def files(draw: st.DrawFn) -> tuple[list[str], str]:
    nodes = draw(NAMES)
    form = draw(st.sampled_from(["- {}", "{}:", "{}: {{user: ann}}", "{}:\n    user: ann"]))
    lines = [f"{draw(GAPS)}  {form.format(name)}{draw(COMMENTS)}" for name in nodes]
    text = "nodes:\n" + "\n".join(lines) + draw(ENDS)
    return nodes, text.replace("\n", draw(st.sampled_from(["\n", "\r\n"])))


@st.composite
def flow_files(draw: st.DrawFn) -> tuple[list[str], str]:
    nodes = draw(NAMES)
    (start, form, end) = draw(st.sampled_from([("[", "{}", "]"), ("{", "{}: {{user: ann}}", "}"), ("{", "{}", "}")]))
    separator = draw(st.sampled_from([", ", ",", ",\n  ", ",  # a comment\n  "]))
    opening = draw(st.sampled_from(["", " ", "\n  "]))
    closing = draw(st.sampled_from(["", " ", ",", "\n", ",\n", "  # the last\n"]))
    text = f"nodes: {start}{opening}{separator.join(form.format(name) for name in nodes)}{closing}{end}{draw(ENDS)}"
    return nodes, text


@given(st.one_of(files(), flow_files()))
def test_what_is_added_and_taken_out_again_leaves_the_file_as_it_was(file: tuple[list[str], str]) -> None:
    nodes, text = file
    added = add_node(text, "NEW", {})
    assert names(added) == [*nodes, "NEW"]
    assert re.findall(r"#[^\r\n]*", added) == re.findall(r"#[^\r\n]*", text)
    removed = remove_node(added, "NEW")
    assert names(removed) == nodes
    # But for a comma or a line end that the last entry needed when another one followed.
    assert re.sub(r"[\s,]", "", removed) == re.sub(r"[\s,]", "", text)


@given(st.one_of(files(), flow_files()), st.data())
def test_any_node_but_the_only_one_can_be_taken_out(file: tuple[list[str], str], data: st.DataObject) -> None:
    nodes, text = file
    name = data.draw(st.sampled_from(nodes))
    if len(nodes) > 1:
        assert names(remove_node(text, name)) == [other for other in nodes if other != name]


def test_a_write_replaces_the_file_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: [a]\n")
    path.chmod(0o640)
    before = path.stat().st_ino
    write_atomically(path, "nodes: [ä]\r\n")
    assert path.read_bytes() == "nodes: [ä]\r\n".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    # A new file took its place, so a reader never sees half of it.
    assert path.stat().st_ino != before
    assert os.listdir(tmp_path) == ["cluster.yaml"]


def test_a_write_follows_links_to_the_real_file(tmp_path: Path) -> None:
    real, link = tmp_path / "real" / "lab.yaml", tmp_path / "cluster.yaml"
    real.parent.mkdir()
    real.write_text("nodes: [a]\n")
    os.symlink("real/lab.yaml", link)
    write_atomically(link, "nodes: [b]\n")
    assert link.is_symlink()
    assert real.read_text() == "nodes: [b]\n"


def test_a_new_file_gets_the_usual_mode(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        write_atomically(tmp_path / "cluster.yaml", "nodes: [a]\n")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "cluster.yaml").stat().st_mode) == 0o640


def test_a_write_that_fails_is_one_error_and_leaves_the_old_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: no such file"):
        write_atomically(tmp_path / "gone" / "cluster.yaml", "x")
    (tmp_path / "directory").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_atomically(tmp_path / "directory", "x")
    assert os.listdir(tmp_path) == ["directory"]


def test_a_file_goes_round_through_disk_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xef\xbb\xbfnodes:\r\n  - gpu1  # one\r\n")
    write_atomically(path, add_node(read_text(path), "gpu2", {}))
    assert path.read_bytes() == b"\xef\xbb\xbfnodes:\r\n  - gpu1  # one\r\n  - gpu2\r\n"
    assert [node.name for node in load_config(path, {}).nodes] == ["gpu1", "gpu2"]

"""Patterns of users: what they match is what ``fnmatch`` and git say, and no pattern and no name takes long."""

from __future__ import annotations

import fnmatch
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.node.globs import Glob, PathGlob

NAMES = st.text("ab*?[]!-^\\.\n", max_size=8)
PATTERNS = st.text("ab*?[]!-^\\.", max_size=8)
PARTS = st.sampled_from(["**", "*", "a", "b", "a*", "?", "[ab]", "*a*", "ab"])


# A range of nothing, as b-a, is an error for re, and Pythons differ in what fnmatch makes of it; so of two hyphens.
ODD_RANGE = re.compile(r".-[^ab\]]|b-a|--|]-")


@given(PATTERNS, NAMES)
def test_a_pattern_matches_what_it_matches_for_fnmatch(pattern: str, name: str) -> None:
    if "[" in pattern and ODD_RANGE.search(pattern):
        return
    glob = Glob(pattern)
    assert glob.fits(name) is fnmatch.fnmatchcase(name, pattern)
    if glob.is_simple:
        fast = name in glob.whole or name.startswith(glob.beginnings) or name.endswith(glob.endings)
        assert fast is glob.fits(name)


@given(st.text("ab*?", max_size=8), st.text("ab\xff", max_size=8))
def test_a_pattern_of_bytes_matches_as_one_of_text(pattern: str, name: str) -> None:
    fits = Glob(pattern.encode("latin-1")).fits(name.encode("latin-1"))
    assert fits is Glob(pattern).fits(name)


@given(st.lists(PARTS, min_size=1, max_size=5), st.lists(st.text("ab", min_size=1, max_size=2), min_size=1, max_size=6))
def test_two_stars_are_any_number_of_folders(parts: list[str], names: list[str]) -> None:
    assert PathGlob("/".join(parts)).fits(names) is matches(parts, names)


def matches(parts: list[str], names: list[str]) -> bool:
    """The rule, said as plainly as can be, and in no time that anybody would accept."""
    if not parts:
        return not names
    if parts == ["**"]:
        return bool(names)
    if parts[0] == "**":
        return any(matches(parts[1:], names[count:]) for count in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and matches(parts[1:], names[1:])


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        (b"[^a]", b"b", True),
        (b"[!a]", b"a", False),
        (rb"\*", b"*", True),
        (rb"\*", b"a", False),
        (rb"a\?", b"ab", False),
        (b"[a", b"[a", True),
        (b"[]a]", b"]", True),
        (b"[b-a]", b"a", False),
    ],
)
def test_patterns_of_ignore_files_have_escapes(pattern: bytes, name: bytes, *, fits: bool) -> None:
    assert Glob(pattern, has_escapes=True).fits(name) is fits


CRUEL = [
    ("*a" * 13 + "*b", "a" * 250),
    ("a*" * 1000 + "b", "a" * 4000),
    ("?*" * 1000 + "b", "a" * 4000),
    ("*[ab]?" * 600 + "c", "ab" * 2000),
    ("*" * 100_000 + "b", "a" * 4000),
    ("?" * 1_000_000, "a" * 4000),
]


@pytest.mark.parametrize("number", range(len(CRUEL)))
def test_no_pattern_and_name_take_long(number: int) -> None:
    pattern, name = CRUEL[number]
    began_s = time.thread_time()
    assert not Glob(pattern).fits(name)
    assert time.thread_time() - began_s < 20, "it would take years, matched by backtracking"


def test_no_path_takes_long() -> None:
    began_s = time.thread_time()
    assert not PathGlob("**/a/" * 50 + "b").fits(["a"] * 2000)
    assert not PathGlob("/".join(["**", "*a*a*a*a*a*b"] * 20)).fits(["a" * 200] * 20)
    assert time.thread_time() - began_s < 20

"""Words that the project no longer uses, in code, docs and templates: each has a common word that everybody knows.

A complaint names the word to use instead. The check is a function from text to complaints, and has samples that it must
complain about and samples that it must leave alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LOOKED_AT = ("src", "docs", "examples", "deploy", "bench", "README.md", "ARCHITECTURE.md", "CHANGELOG.md")
TEXTS = (".py", ".md", ".html", ".js", ".css", ".yml", ".yaml", ".json", ".c")


def word(text: str) -> str:
    """A word of a sentence, or a part of an identifier such as ``keeper_pid`` or ``TheKeeper``."""
    capital = text[:1].upper() + text[1:]
    return rf"(?<![a-zA-Z]){text}(?![a-z])|(?<![A-Z])(?<!Zoo){capital}(?![a-z])|(?<![A-Z]){text.upper()}(?![A-Z])"


DROPPED: dict[str, str] = {
    # As a type, a function or a variable; in a sentence it is an ordinary word. Names in the database stay.
    r"\bTold\b|\btold_(?!at\b|jobs\b)\w+|\w+_told\b|\bdef told\b|\.told\(": "report",
    r"\b(?:told of|makes? no sense|made no sense)\b": "reported, invalid",
    r"\b(?:come|comes|came|coming|bring|brings|brought)(?: \w+)? home\b|\bat home\b": "collect; on this machine",
    word("homecoming"): "collector",
    r"\banew\b": "again",
    r"\b[Ww]hoever\b": "the caller, anybody who",
    r"\b(?:taken|takes?|took|goes|go|went) along\b": "include, send",
    r"\blast words?\b": "exit record, last lines",
    word("keepers?"): "runner, supervisor",
    word("wardens?"): "reaper",
    # A blank is also a space; a folder that waits to be used is not one.
    r"\bBlanks?\b|\bblanks\b|[a-z]_blanks?\b|\bblank_(?!line)\w+": "directory pool",
    r"\b[Aa] blank(?! line| page| field| string)\b": "directory pool",
    word("kin"): "ownership",
    word("parcels?"): "archive",
    word("heralds?"): "notifications",
    word("stor(?:y|ies)"): "failure facts",
    word("guises?"): "process title",
    r"\b[Dd]istrust\w*": "untrusted",
    word("desks?"): "claim table",
}
_PATTERNS = {re.compile(pattern): instead for pattern, instead in DROPPED.items()}
# A part of every match, in lower case: looking for these first is much quicker than for all patterns in every line.
_PARTS = (
    "told", "sense", "home", "anew", "whoever", "along", "last word", "keeper", "warden", "blank", "kin", "parcel",
    "herald", "stor", "guise", "distrust", "desk",
)  # fmt: skip


def dropped_words(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        lower = line.lower()
        if not any(part in lower for part in _PARTS):
            continue
        for pattern, instead in _PATTERNS.items():
            if found := pattern.search(line):
                yield f"{path}:{number}: {found[0]!r}; write: {instead}"


def texts() -> Iterator[tuple[str, str]]:
    for name in LOOKED_AT:
        start = ROOT / name
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            if path.suffix in TEXTS and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_dropped_words_stay_out() -> None:
    looked_at = list(texts())
    assert looked_at
    assert [complaint for path, text in looked_at for complaint in dropped_words(path, text)] == []


@pytest.mark.parametrize(
    "bad",
    [
        "class Told:",
        "def told(job: Job) -> None:",
        "what = engine.told(job)",
        "told_runs = 1",
        "runs_told = 1",
        "it has told of no step",
        "this makes no sense",
        "logs come home",
        "what came back home",
        "what stays at home",
        "class Homecoming:",
        "start anew",
        "Whoever asks",
        "it is taken along",
        "your code goes along",
        "the last word of a run",
        "the keeper",
        "keeper_pid",
        "Keepers",
        "class KeeperPool:",
        "RUN_KEEPER",
        "the warden ends it",
        "a blank is filled in",
        "class Blank:",
        "fill_blank(folder)",
        "blank_folder",
        "from ugro.node import kin",
        "class Kin:",
        "a parcel of files",
        "class Herald:",
        "the story of an attempt",
        "stories",
        "under the guise of",
        "we distrust nodes",
        "distrusted",
        "the desk has it",
        "class Desk:",
    ],
)
def test_a_dropped_word_is_noticed(bad: str) -> None:
    assert next(dropped_words("x.md", f"fine\n{bad}")).startswith("x.md:2: ")


@pytest.mark.parametrize(
    "good",
    [
        "a blank line, then text",
        "target='_blank'",
        "blank_lines = 2",
        "this is akin to it",
        "the kinds of values, a kind word",
        "skin, making, king",
        "ZooKeeper",
        "housekeeping",
        "a history of jobs, historical, HISTORY",
        "store, stored, stores",
        "a desktop application",
        "the user was told, told_at",
        "the last line",
        "home directory, homepage",
        "come and go",
        "distributed",
        "renewed, a new start",
    ],
)
def test_an_innocent_word_is_left_alone(good: str) -> None:
    assert list(dropped_words("x.md", good)) == []

"""How large a job may be: what is accepted fits into what Linux and the message to a node take."""

from __future__ import annotations

import time

import pytest

from tests.rig.job_files import load
from ugro.kernel.config.document import read_document
from ugro.kernel.config.kinds import Limits
from ugro.kernel.jobs.config.file import draft_job
from ugro.kernel.jobs.config.kinds import FILE_LIMITS, MOST_BYTES, MOST_WORDS
from ugro.kernel.jobs.engine.plan import Surroundings, plan
from ugro.kernel.jobs.engine.runs import RunStart, packed
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Placement, Share
from ugro.kernel.jobs.records import Rendezvous
from ugro.kernel.support.errors import ConfigError, UgroError

AROUND = Surroundings(Rendezvous("10.0.0.1", 29500), {"gpu1": "/usr/bin/python3"}, secret="s" * 64)
LONGEST = 128 * 1024 - 1
Fields = dict[str, object]


def made(**fields: object) -> JobSpec:
    return draft_job(None, fields=fields).spec({})


def refusal(**fields: object) -> str:
    with pytest.raises(ConfigError) as caught:
        made(**fields)
    return f"{caught.value}\n{caught.value.hint or ''}"


def largest(letter: str, **fields: object) -> JobSpec:
    """With as many words and variables of 100 letters as are accepted."""
    low, high, key = 0, 10_000, "command" if "command" in fields else "args"
    first = fields[key] if isinstance(fields.get(key), list) else []

    def wanted(count: int) -> Fields:
        return {**fields, key: [*first, *[letter * 100] * count], "env": {"A": letter * 100 * min(count, 100)}}  # type: ignore[misc]

    while high - low > 1:
        middle = (low + high) // 2
        try:
            made(**wanted(middle))
            low = middle
        except ConfigError:
            high = middle
    assert low > 2, "something is accepted"
    return made(**wanted(low))


@pytest.mark.parametrize("letter", ["x", "é", "\x01"], ids=["plain", "not ASCII", "control"])
@pytest.mark.parametrize(
    ("fields", "gpus"),
    [
        ({"command": ["echo"]}, 0),
        ({"script": "train.py"}, 16),
        ({"script": "train.py", "gpus_per_node": 4}, 4),
        ({"script": "train.py", "gpus_per_node": 64}, 64),
        ({"script": "train.py", "min_ranks": 1}, 16),
        ({"script": "train.py", "launcher": "torchrun"}, 16),
        ({"script": "train.py", "launcher": "ray"}, 16),
    ],
)
def test_what_is_accepted_fits_into_a_message_to_a_node_and_its_words_into_linux(
    fields: Fields, gpus: int, letter: str
) -> None:
    spec = largest(letter, **fields)
    placement = Placement((Share("gpu1", gpus=tuple(range(gpus)), uuids=("GPU-" + "0" * 36,) * gpus),))
    job = Job(7, spec, "ann", JobState.STARTING, "", "2026-01-01T00:00:00+00:00", attempt=1)
    [node] = plan(job, 1, placement, AROUND).nodes
    [runs] = packed([RunStart(7, 1, node, {}).params()])
    assert not isinstance(runs, UgroError), runs
    for rank in node.ranks:
        strings = [*rank.argv, *(f"{name}={value}" for name, value in rank.env)]
        assert max(len(one.encode()) for one in strings) <= LONGEST


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"command": ["echo", *["x"] * MOST_WORDS]}, f"COMMAND: expected at most {MOST_WORDS} words, got 10001"),
        ({"script": "t.py", "args": ["x"] * 400_000}, f"ARGS: expected at most {MOST_WORDS} words, got 400000"),
        ({"script": "t.py", "args": "x " * 20_000}, f"ARGS: expected at most {MOST_WORDS} words, got 20000"),
        ({"script": "t.py", "args": "'" * 3_000_001}, "ARGS: expected at most 256.0 KiB of words"),
        ({"script": "t.py", "args": ["x" * 100_000]}, "ARGS: the words and variables of a script with up to 16"),
        ({"command": ["echo", *["x" * 100_000] * 38]}, "COMMAND: the words and variables may have 256.0 KiB"),
        ({"command": ["true"], "env": {f"A{n}": "" for n in range(100_000)}}, "--env: expected at most 1000, got"),
        ({"command": ["true"], "env": {"A": "x" * LONGEST}}, "--env: expected at most 128 KiB"),
        ({"command": ["true"], "env": {f"A{n}": "x" * 1000 for n in range(900)}}, "env: the words and variables"),
        ({"command": ["true"], "output": [f"o{n}" for n in range(20_000)]}, "--output: expected at most 1000 items"),
    ],
)
def test_what_is_too_much_is_refused_with_the_limit_and_what_to_do(fields: Fields, said: str) -> None:
    began = time.process_time()
    text = refusal(**fields)
    assert text.startswith(said)
    assert "file" in text
    assert len(text) < 300
    assert time.process_time() - began < 5


def test_variables_that_the_submitter_gives_count_too() -> None:
    draft = draft_job(None, fields={"command": ["true"], "env": dict.fromkeys(("A", "B", "C"))})
    with pytest.raises(ConfigError, match=r"the words and variables may have 256\.0 KiB"):
        draft.spec({name: "x" * 120_000 for name in "ABC"})


LAUGHS = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)
# A map that is merged a few hundred times into another one, which then has as many values as before.
MERGED = f"a: &a {{{', '.join(f'k{number}: 1' for number in range(500))}}}\nb: {{<<: [{', '.join(['*a'] * 500)}]}}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("args: [" + "1, " * 11_000 + "]", "too many values (limit 10000)"),
        ("# " + "x" * MOST_BYTES, "larger than 256.0 KiB"),
        ("x: " + "é" * (MOST_BYTES // 2), "larger than 256.0 KiB"),
        ("%a b\n" * 700_000, "larger than 256.0 KiB"),
        (LAUGHS, "too many values (limit 10000); are aliases repeated?"),
        (MERGED, "too many values (limit 10000); are aliases repeated?"),
    ],
    ids=["values", "comment", "not ASCII", "directives", "aliases", "merges"],
)
def test_a_file_of_a_user_is_small(text: str, said: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert said in str(caught.value)
    assert time.process_time() - began < 5


def test_the_limits_of_a_file_are_the_ones_it_is_read_with() -> None:
    text = "x: [" + "1, " * 99 + "1]\n"
    assert read_document(text, "f", Limits(len(text), 103)).tree == {"x": [1] * 100}
    for limits in (Limits(len(text) - 1, 103), Limits(len(text), 102)):
        with pytest.raises(ConfigError):
            read_document(text, "f", limits)
    assert FILE_LIMITS.bytes == MOST_BYTES

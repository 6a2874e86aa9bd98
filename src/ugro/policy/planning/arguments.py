"""The arguments of a script that may change how fast it is, so that a trial need not be repeated for the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# Common options that change how long a training is, or what it is called, and not how long a step takes.
_WITHOUT_EFFECT = frozenset(
    {
        *("epochs", "num-epochs", "max-epochs", "num-train-epochs", "seed", "lr", "learning-rate", "weight-decay"),
        *("name", "run-name", "experiment", "tag", "tags", "notes", "output", "output-dir", "out", "log-dir"),
    }
)


def that_matter(arguments: Sequence[str]) -> tuple[str, ...]:
    return tuple(_that_matter(arguments))


def _that_matter(arguments: Sequence[str]) -> Iterator[str]:
    is_value = False
    for word in arguments:
        name, has_value, _ = word.partition("=")
        if name.startswith("--") and name[2:].replace("_", "-").lower() in _WITHOUT_EFFECT:
            is_value = not has_value
        elif is_value and not _is_option(word):
            is_value = False
        else:
            is_value = False
            yield word


def _is_option(word: str) -> bool:
    """A negative number is a value."""
    return word.startswith("-") and not word[1:2].isdigit()

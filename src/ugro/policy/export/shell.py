"""What the scripts for Slurm and for torchrun have in common: lines of bash, each word quoted once."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator

from ugro.policy.export.subject import Subject, Word

# From Python's own launcher on; the script's words follow as "$@".
TORCHRUN = '"${UGRO_PYTHON:-python3}" -u -m torch.distributed.run'
_WIDTH = 110


def comments(subject: Subject, usage: Iterable[str], unmapped: Iterable[str]) -> Iterator[str]:
    for line in (*subject.header(), *usage):
        yield from comment(line)
    if left := [*subject.unmapped(), *unmapped]:
        yield "#"
        yield "# Not mapped, because there is no word for it here:"
        for line in left:
            yield from comment(f"  {line}")


def preparation(subject: Subject) -> Iterator[str]:
    """The folder and the variables."""
    for name in subject.secrets:
        why = "only its user sees it" if name in subject.unseen else "it looks secret"
        yield f': "${{{name}:?is not in this script, because {why}: set it before}}"'
    yield from (f"export {name}" for name in subject.secrets)
    yield from (f"export {name}={shlex.quote(value)}" for name, value in subject.env)
    yield f"cd {shlex.quote(subject.spec.cwd)}" if subject.spec.cwd else 'cd "${UGRO_CODE:-$PWD}"'


def command(words: Iterable[Word]) -> str:
    return " ".join(map(_quoted, words))


def _quoted(word: Word) -> str:
    if not word.secrets:
        return shlex.quote(word.texts[0])
    return word.joined(lambda text: shlex.quote(text) if text else "", lambda name: f'"${{{name}}}"')


def comment(line: str) -> list[str]:
    """Of one line, whatever is in it: a name must not become a line of the script."""
    plain = "".join(letter if letter.isprintable() else " " for letter in line)
    indent = " " * (len(plain) - len(plain.lstrip()))
    wrapped = textwrap.wrap(plain, _WIDTH, subsequent_indent=f"{indent}  ", break_long_words=False) or [""]
    return [f"# {part}".rstrip() for part in wrapped]

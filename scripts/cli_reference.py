"""Writes docs/cli.md from the commands: ``python scripts/cli_reference.py docs/cli.md [--check]``."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from ugro.cli.main import cli

_INTRODUCTION = """# Commands

Generated from the commands by `make docs`; do not edit.

Results go to stdout, messages go to stderr. `--json` works on every command that shows something, and may stand before
or after it: it prints one JSON document, or one per line where a command streams. A table that is not written to a
terminal is tab-separated, with complete values. `NO_COLOR` is honoured, and `TERM=dumb` means no escape codes.

| Exit code | Meaning |
| --- | --- |
| 0 | done |
| 1 | failed, or a node is not healthy |
| 2 | wrong usage or configuration |
| 3 | the cluster cannot satisfy the request |
| 4 | not found |
| 5 | unreachable |
| 6 | not allowed |
| 70 | a bug in UGRO; the details are in `last-error.log` of the state directory |
| 124 | timed out; or the job reached its time limit |
| 130 | interrupted; or the job was cancelled, or keeps running without the command |

An attached `ugro run`, `ugro launch` or `ugro retry`, and `ugro wait`, return the job's own exit code. JOB is an id, a
name (the newest job of that name), or `last`.
"""


def render() -> str:
    return _INTRODUCTION + "".join(_sections(cli, "ugro"))


def _sections(command: click.Command, path: str) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    yield f"\n## `{path}`\n\n{_text(command)}\n\n{_usage(command, context, path)}{_options(command, context)}"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                yield from _sections(child, f"{path} {name}")


def _text(command: click.Command) -> str:
    return "\n\n".join(_paragraph(text) for text in inspect.cleandoc(command.help or "").split("\n\n"))


def _paragraph(text: str) -> str:
    """Click keeps the lines of a paragraph that begins with a backspace: here its indented lines are code."""
    if not text.startswith("\b\n"):
        return text
    title, *lines = text.removeprefix("\b\n").splitlines()
    return "\n".join([title, "```", *(line.removeprefix("  ") for line in lines), "```"])


def _usage(command: click.Command, context: click.Context, path: str) -> str:
    pieces = " ".join(command.collect_usage_pieces(context))
    return f"```\n{path} {pieces}\n```\n"


def _options(command: click.Command, context: click.Context) -> str:
    options = [parameter for parameter in command.get_params(context) if isinstance(parameter, click.Option)]
    records = [option.get_help_record(context) for option in options]
    rows = [f"| `{names.replace('|', chr(92) + '|')}` | {text} |" for names, text in filter(None, records)]
    return "\n".join(["", "| Option | Meaning |", "| --- | --- |", *rows, ""]) if rows else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args()
    path: Path = options.path
    if not options.check:
        path.write_text(render(), encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != render():
        parser.exit(1, f"{path} is out of date; write it with: make docs\n")


if __name__ == "__main__":
    main()

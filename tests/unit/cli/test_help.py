"""The help of the commands: in groups, a summary first, and a sentence for every option."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from ugro.cli.main import cli, commands


def every_command(group: click.Group = cli, path: str = "ugro") -> Iterator[tuple[str, click.Command]]:
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None, name
            yield f"{path} {name}", command
            if isinstance(command, click.Group):
                yield from every_command(command, f"{path} {name}")


def test_commands_are_listed_in_groups() -> None:
    with click.Context(cli, info_name="ugro") as context:
        text = cli.get_help(context)
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options:", "Cluster:", "Jobs:", "Results:", "Observe:", "Try it:"]
    for name, command in commands().items():
        assert f"  {name:<10}  {command.summary}\n" in f"{text}\n"


@pytest.mark.parametrize("path", [path for path, _ in every_command()])
def test_a_command_has_a_summary_of_one_line_and_its_options_a_sentence(path: str) -> None:
    command = dict(every_command())[path]
    summary, _, rest = (command.help or "").partition("\n")
    assert summary.endswith("."), path
    assert len(summary) < 80
    assert not rest.strip() or rest.startswith("\n"), "then an empty line"
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, f"{path} {option.name}"
            assert option.help.rstrip("]").rpartition("  [")[0].endswith(".") or option.help.endswith("."), option.help


def test_the_list_says_what_the_commands_say() -> None:
    said = {path.removeprefix("ugro "): (command.help or "").splitlines()[0] for path, command in every_command()}
    assert {name: text for name, text in said.items() if " " not in name} == {
        name: command.summary for name, command in commands().items()
    }


@pytest.mark.parametrize("name", ["serve", "sweep"])
def test_a_group_that_starts_something_without_a_word_says_where_its_options_are(name: str) -> None:
    group = dict(every_command())[f"ugro {name}"]
    with click.Context(group, info_name=f"ugro {name}") as context:
        assert f"ugro {name} start --help" in group.get_help(context)

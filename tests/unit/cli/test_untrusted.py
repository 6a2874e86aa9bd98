"""Text of nodes, jobs and files on a terminal: names, messages, and the output of programs."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.cli.untrusted import TerminalFilter, file_name, message, one_line

HARMLESS = re.compile(r"(?:\x1b\[[0-9;:]*m|\x1b\[[0-2]?K|[^\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f])*", re.DOTALL)


def filtered(*pieces: bytes, is_dumb: bool = False) -> bytes:
    kept = TerminalFilter(is_dumb=is_dumb)
    return b"".join(map(kept.feed, pieces)) + kept.end()


def test_a_name_stays_on_its_line() -> None:
    assert one_line("a\nerror: all is lost") == "a\\nerror: all is lost"
    assert one_line("a\rb\x1b[2J") == "a�b�[2J"


def test_a_message_goes_on_only_below_itself() -> None:
    assert message("too large. The largest:\n  7 B  a\n  5 B  b") == "too large. The largest:\n  7 B  a\n  5 B  b"
    assert message("a\nerror: forged") == "a\\nerror: forged"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"plain\ttext\r\n", b"plain\ttext\r\n"),
        (b"\x1b[31mred\x1b[0m", b"\x1b[31mred\x1b[0m"),
        (b" 50%\r\x1b[K100%\n", b" 50%\r\x1b[K100%\n"),  # a progress bar
        (b"\x1b[2J\x1b[Hall gone\x1b[1A\x1b[?1049h", b"all gone"),
        (b"a\x1b]0;title\x07b", b"ab"),
        (b"\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\", b"link"),
        (b"\x1b]52;c;ZXZpbA==\x07", b""),  # the clipboard
        (b"\x1bPq#0~~\x1b\\\x1b_apc\x1b\\\x1b^pm\x1b\\\x1bXsos\x1b\\.", b"."),
        ("\x9d0;title\x9c.\x90q\x9c".encode(), b"."),
        (b"\x1b]0;no end\nnext line", "�]0;no end\nnext line".encode()),
        (b"\x1b]0;no end 10%\r 20%", "�]0;no end 10%\r 20%".encode()),
        (b"\x1b]0;another\x1b[31mred\x1b[0m", "�]0;another\x1b[31mred\x1b[0m".encode()),
        (b"\x1b]" + b"a" * 5000 + b"\x07", f"�]{'a' * 5000}�".encode()),
        (b"\x1b[?25l\x1b[>4;1m\x1b[?1K\x1b[6n\x1b[1 q.", b"."),
        (b"\x1bc\x1bP\x05\x7f", "�c�P��".encode()),
        (b"\x9b31m \xff", "�31m �".encode()),
        ("\x9b31m\u202e".encode(), "�31m�".encode()),
        ("ünïcødé 風扇".encode(), "ünïcødé 風扇".encode()),
        (b"\x1b[31mleft red", b"\x1b[31mleft red\x1b[0m"),
        (b"ends early \x1b[", "ends early �[".encode()),
    ],
)
def test_the_output_of_a_program_may_have_colours_and_no_more(written: bytes, shown: bytes) -> None:
    assert filtered(written) == shown
    pieces = [written[at : at + 1] for at in range(len(written))]
    assert filtered(*pieces) == shown, "wherever it was broken"


def test_a_dumb_terminal_gets_no_colours_of_programs() -> None:
    assert filtered(b"\x1b[31mred\x1b[0m 50%\r\x1b[K100%", is_dumb=True) == b"red 50%\r100%"


PIECES = [
    *(b"\x1b", b"\x1b[", b"\x1b]", b"\x1bP", b"\x1b_", b"\x1b^", b"\x1bX", b"\x1b\\", b"\x07", b"\n", b"\r", b"\\"),
    *("\x9b".encode(), "\x9d".encode(), "\x90".encode(), "\x9c".encode(), b"\x9b", b"\xc2"),
    *(b"31", b";", b"m", b"K", b"J", b"0;", b"52;c;", b"text", b"?", b" q"),
]
HOSTILE = st.lists(st.one_of(st.binary(max_size=20), st.sampled_from(PIECES)))


@given(HOSTILE)
def test_no_output_of_a_program_steers_the_terminal(pieces: list[bytes]) -> None:
    assert HARMLESS.fullmatch(filtered(*pieces).decode())
    assert b"\x1b" not in filtered(*pieces, is_dumb=True)


@given(HOSTILE)
def test_it_does_not_matter_where_output_was_broken(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    assert filtered(*pieces) == filtered(whole)
    assert filtered(*(whole[at : at + 1] for at in range(len(whole)))) == filtered(whole)


@given(HOSTILE)
def test_nothing_swallows_what_comes_later(pieces: list[bytes]) -> None:
    """Neither the next line, nor what follows on a line after a while."""
    kept = TerminalFilter(is_dumb=False)
    for piece in pieces:
        kept.feed(piece)
    assert kept.feed(b"\nafterwards").endswith(b"\nafterwards")
    for piece in pieces:
        kept.feed(piece)
    assert b"progress" in kept.feed(b"." * 4200 + b"progress")


def test_hostile_output_costs_no_more_than_its_length() -> None:
    begun = time.process_time()
    filtered(*["\x9d".encode() * 20_000, b"\x1b]" * 20_000, b"\x1b[" * 20_000, b"\x1b]a" * 20_000] * 3)
    plain = b"\x1b[31mred" * 40_000
    hostile_s, begun = time.process_time() - begun, time.process_time()
    filtered(*[plain] * 3)
    assert hostile_s < 20 * (time.process_time() - begun)


def test_the_name_of_a_file_stays_on_its_line_and_shows_what_is_in_it() -> None:
    assert file_name("a\nb\x1b[2J\t\u202e") == r"a\nb\x1b[2J\t\u202e"
    assert file_name("plots/größe 1.png") == "plots/größe 1.png"

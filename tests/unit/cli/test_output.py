"""The printer: what people see on a terminal, what programs read from a pipe, and what neither must get."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import struct
import sys
import termios
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.cli.output import Cell, Output, clean
from ugro.client.client import Ended, OutputPiece
from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.links.model import Disk, Facts, Gpu, LinkQuality, Machine, NodeReport, Reason, Status
from ugro.kernel.support.errors import NotFound

ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LONG = b"x" * 70_000
HEADER = ("", "NODE", "SCORE", "NOTE")
ROWS = [
    [Cell("✓", "good"), Cell("gpu1", "bold"), Cell("100", is_number=True), Cell("")],
    [Cell("✗", "bad"), Cell("gpu10"), Cell("7", is_number=True), Cell("GPU 0 is hot: 91 °C", "bad")],
]


class Terminal:
    """A real pseudo-terminal that stands for stdout and stderr."""

    def __init__(self, columns: int, lines: int) -> None:
        self.master, slave = os.openpty()
        self.resize(columns, lines)
        self.stream = os.fdopen(slave, "w")
        os.set_blocking(self.master, False)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def shown(self) -> str:
        self.stream.flush()
        content = b""
        try:
            while part := os.read(self.master, 65536):
                content += part
        except BlockingIOError:
            pass
        return content.decode().replace("\r\n", "\n")

    def close(self) -> None:
        self.stream.close()
        os.close(self.master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], Terminal]]:
    made: list[Terminal] = []

    def start(columns: int, lines: int = 24) -> Terminal:
        made.append(Terminal(columns, lines))
        monkeypatch.setattr(sys, "stdout", made[-1].stream)
        monkeypatch.setattr(sys, "stderr", made[-1].stream)
        return made[-1]

    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    yield start
    monkeypatch.undo()
    for each in made:
        each.close()


def columns_of(line: str) -> int:
    plain = ESCAPES.sub("", line)
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in plain)


def test_without_a_terminal_a_table_is_tab_separated_with_whole_values(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 500
    Output().table(HEADER, [*ROWS, [Cell("?"), Cell("n"), Cell("0"), Cell(f"a\tb\nc  {long}", "bad")]])
    assert capsys.readouterr().out == (
        f"node\tscore\tnote\ngpu1\t100\t\ngpu10\t7\tGPU 0 is hot: 91 °C\nn\t0\ta\\tb\\nc  {long}\n"
    )


def test_on_a_terminal_a_table_is_aligned_and_coloured(terminal: Callable[[int, int], Terminal]) -> None:
    screen = terminal(80, 24)
    Output().table(HEADER, ROWS)
    shown = screen.shown()
    assert ESCAPES.sub("", shown).splitlines() == [
        "   NODE   SCORE  NOTE",
        "✓  gpu1     100",
        "✗  gpu10      7  GPU 0 is hot: 91 °C",
    ]
    assert "\x1b[31mGPU 0 is hot" in shown


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", ""), ("CLICOLOR", "0")])
def test_colour_can_be_refused(
    terminal: Callable[[int, int], Terminal], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    screen = terminal(80, 24)
    Output().table(HEADER, ROWS)
    Output().error(NotFound("gone", hint="look"))
    assert "\x1b" not in screen.shown()


@pytest.mark.parametrize("name", ["FORCE_COLOR", "CLICOLOR_FORCE"])
def test_colour_can_be_asked_for_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for one in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(one, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Output().styled("x", "good") == "x"
    monkeypatch.setenv(name, "1")
    assert Output().styled("x", "good") == "\x1b[32mx\x1b[0m"


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 132, 200])
def test_the_health_table_stays_within_any_terminal(terminal: Callable[[int, int], Terminal], columns: int) -> None:
    from ugro.cli import health

    screen = terminal(columns, 24)
    health.show(Output(), reports())
    lines = screen.shown().splitlines()
    assert [columns_of(line) for line in lines if columns_of(line) > columns] == []
    assert sum("gpu" in line for line in lines) == 3
    assert "NOTE" in lines[0]
    assert ("RTT" in lines[0], "VRAM" in lines[0]) == (columns > 120, columns >= 80)


def test_spare_columns_go_one_by_one_and_the_first_named_goes_first(
    terminal: Callable[[int, int], Terminal],
) -> None:
    screen = terminal(20, 24)
    header = ("A", "B", "C", "NOTE")
    row = [Cell("aaaaaaaa"), Cell("bbbb", is_number=True), Cell("cccc", is_number=True), Cell("note")]
    Output().table(header, [row], spare=("C", "B"))
    assert "C" not in ESCAPES.sub("", screen.shown())
    screen.resize(14, 24)
    Output().table(header, [row], spare=("C", "B"))
    assert ESCAPES.sub("", screen.shown()) == "A         NOTE\naaaaaaaa  note\n"


@given(
    st.lists(st.lists(st.text(max_size=30), min_size=4, max_size=4), max_size=4),
    st.integers(min_value=60, max_value=200),
)
def test_no_text_breaks_the_table(texts: list[list[str]], columns: int) -> None:
    screen = Terminal(columns, 24)
    before, sys.stdout = sys.stdout, screen.stream
    try:
        lines = Output().table_lines(("A", "B", "C", "D"), [[Cell(text) for text in row] for row in texts])
    finally:
        sys.stdout = before
        screen.close()
    assert len(lines) <= len(texts) + 1
    for line in lines:
        assert columns_of(line) <= columns + sum(bool(unicodedata.combining(letter)) for letter in line)
        assert not re.search(r"[\x00-\x1a\x1c-\x1f\x7f-\x9f]", line)


def test_a_wide_script_does_not_shift_the_columns(terminal: Callable[[int, int], Terminal]) -> None:
    screen = terminal(40, 24)
    Output().table(("NODE", "WHY", "END"), [[Cell("a"), Cell("風扇"), Cell("|")], [Cell("b"), Cell("fan"), Cell("|")]])
    ends = [columns_of(line.split("|")[0]) for line in screen.shown().splitlines()[1:]]
    assert ends[0] == ends[1]


def test_a_node_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "RTX\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\x7f\u202efdp"
    harmless = "RTX�]0;owned��[2J�31m����fdp"
    assert clean(evil) == harmless
    assert clean("tab\tand\nnewline stay, and so does ünïcødé") == "tab\tand\nnewline stay, and so does ünïcødé"
    output = Output()
    output.text(evil)
    output.note(evil)
    output.warn(evil, evil)
    output.table(("GPU",), [[Cell(evil)]])
    captured = capsys.readouterr()
    assert captured.out == f"{harmless}\ngpu\n{harmless}\n"
    assert captured.err == f"{harmless}\nwarning: {harmless}\nhint:  {harmless}\n"


def test_a_name_cannot_begin_a_line(terminal: Callable[[int, int], Terminal]) -> None:
    screen = terminal(60, 24)
    evil = "job\nerror: forged\tby a name"
    output = Output()
    output.text(evil)
    output.note(evil)
    output.warn(evil, evil)
    output.table(("NAME",), [[Cell(evil)]])
    output.record((evil, evil))
    output.drawn([output.styled(evil, "bold"), output.cut(evil)])
    output.progress(evil)
    output.redraw([], evil)
    assert not [line for line in screen.shown().splitlines() if line.startswith("error")]


def test_several_lines_are_printed_as_such_where_they_are_meant(capsys: pytest.CaptureFixture[str]) -> None:
    Output().block("a: 1\nb: \x1b[2J")
    Output().note("", "Done.")
    assert capsys.readouterr() == ("a: 1\nb: �[2J\n", "\nDone.\n")


def test_a_log_cannot_steer_the_terminal_and_a_pipe_gets_it_whole(
    terminal: Callable[[int, int], Terminal], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    evil = b"\x1b[31mred\x1b[2J\x1b]0;owned\x07\n"
    Output().raw(evil)
    assert capsysbinary.readouterr().out == evil
    screen = terminal(80, 24)
    output = Output()
    output.raw(evil)
    output.note("next")
    assert screen.shown() == "\x1b[31mred\n\x1b[0mnext\n", "what comes next has its own colours"


def test_a_dumb_terminal_gets_plain_lines_now_and_then(
    terminal: Callable[[int, int], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = terminal(80, 24)
    output = Output()
    for done in range(100):
        output.progress(f"{done} of 100 nodes have answered")
    output.raw(b"\x1b[31mred\x1b[0m\n")
    output.close()
    assert screen.shown() == "0 of 100 nodes have answered\nred\n"
    assert not output.can_redraw


def test_a_document_is_one_line_of_plain_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    Output(is_json=True).document({"text": "ü\n\x1b\udcff"})
    out = capsys.readouterr().out
    assert out.isascii()
    assert out.count("\n") == 1
    assert json.loads(out) == {"text": "ü\n\x1b\udcff"}


@pytest.mark.parametrize("output", [Output(is_quiet=True), Output(is_json=True)])
def test_talk_can_be_silenced_but_warnings_cannot(output: Output, capsys: pytest.CaptureFixture[str]) -> None:
    output.note("by the way")
    output.warn("mind this")
    assert capsys.readouterr() == ("", "warning: mind this\n")


def test_an_error_is_a_document_for_programs_and_a_sentence_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    Output(is_json=True).error(NotFound("no such node", subject="gpu9", hint="see: ugro node ls"))
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["kind"] == "not_found"
    assert captured.err == "error: gpu9: no such node\nhint:  see: ugro node ls\n"


def test_a_usage_error_points_to_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with click.Context(click.Command("health"), info_name="health") as context:
        Output().usage_error(click.UsageError("no", context))
    assert capsys.readouterr().err == "error: no\nhint:  see: health --help\n"


def test_progress_is_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    Output().progress("waiting")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "then",
    [
        lambda output: output.text("x"),
        lambda output: output.note("x"),
        lambda output: output.warn("x"),
        lambda output: output.document("x"),
        lambda output: output.raw(b"x\n"),
        lambda output: output.table(("A",), [[Cell("x")]]),
        lambda output: output.redraw(["x"], "y"),
    ],
)
def test_progress_is_gone_before_anything_else_is_said(
    terminal: Callable[[int, int], Terminal], then: Callable[[Output], None]
) -> None:
    screen = terminal(30, 24)
    output = Output()
    output.progress("a long sentence about what is waited for")
    assert columns_of(screen.shown().strip("\r")) == 29
    then(output)
    assert screen.shown().startswith("\r\x1b[K")
    output.end_progress()
    assert "\x1b[K" not in screen.shown()


def test_progress_of_several_lines_is_drawn_over_the_last_and_never_scrolls(
    terminal: Callable[[int, int], Terminal],
) -> None:
    screen = terminal(30, 6)
    output = Output()
    output.progress("three", "lines", "of progress")
    assert screen.shown().count("\n") == 2
    output.progress("one")
    assert screen.shown().startswith("\r\x1b[K\x1b[A\x1b[K\x1b[A\x1b[K"), "from where the first line was"
    output.progress(*(f"line {n}" for n in range(50)))
    assert screen.shown().count("\n") < 6
    output.text("done")
    assert screen.shown().count("\x1b[A") == 3


@pytest.mark.parametrize("columns", [200, 40, 25])
def test_a_table_in_progress_keeps_its_colours_and_the_width(
    terminal: Callable[[int, int], Terminal], columns: int
) -> None:
    screen = terminal(columns, 24)
    output = Output()
    evil = "a \x1b[2J reason that is longer than any terminal is wide: " + "ü" * 200
    rows = [[Cell("7", "id", is_number=True), Cell("running", "good"), Cell("8"), Cell(evil, "bad")]]
    lines = output.table_lines(("TRIAL", "STATE", "A NUMBER OF NO USE", "REASON"), rows)
    output.progress("sweep a runs", table=lines)
    drawn = screen.shown()
    assert "\\x1b[36m" not in drawn, "no code of ours is shown as text"
    assert "\x1b[36m7\x1b[0m" in drawn
    plain = re.sub(r"\x1b\[[0-9;]*[mKA]", "", drawn).strip("\r")
    assert "\x1b" not in plain
    assert max(map(columns_of, plain.splitlines())) < columns
    assert drawn.rstrip().endswith(("\x1b[0m", "…")), "a colour ends with its line"
    output.end_progress()


def test_text_and_bytes_come_out_in_the_order_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, write_through=False))
    output = Output()
    output.text("one")
    output.raw(bytes(range(256)))
    output.text("three")
    sys.stdout.flush()
    assert buffer.getvalue() == b"one\n" + bytes(range(256)) + b"three\n"


def test_a_screen_is_not_drawn_past_its_last_line(terminal: Callable[[int, int], Terminal]) -> None:
    screen = terminal(40, 6)
    Output().redraw([f"line {number}" for number in range(10)], "the end")
    shown = ESCAPES.sub("", screen.shown()).splitlines()
    assert shown == ["line 0", "line 1", "line 2", "… 7 more lines", "the end"]


def test_a_bug_leaves_its_trace_in_a_file_and_one_line_for_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UGRO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("UGRO_DEBUG", raising=False)
    bug = ZeroDivisionError("division by zero")
    assert Output().crash(bug) == 70
    file = tmp_path / "home" / "last-error.log"
    assert capsys.readouterr().err == (
        f"error: internal error: ZeroDivisionError: division by zero\nhint:  please report it with {file}\n"
    )
    assert "ZeroDivisionError" in file.read_text()
    monkeypatch.setenv("UGRO_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        Output().crash(bug)


def test_what_could_not_be_killed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    from ugro.features.exec import cli as module

    module._summarise(Output(), [Ended("gpu1", signal=9, unkillable=(7, 8)), Ended("gpu2", code=0)])
    assert capsys.readouterr().err == (
        "warning: gpu1: SIGKILL did not end 7, 8\n"
        "hint:  they wait for a disk or a driver; run ps -l on the node\n"
        "1 ok · gpu1 ended by SIGKILL\n"
    )


def test_prefixes_are_as_wide_as_the_longest_name(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = exec_lines("gpu1", "gpu-master")
    lines.piece(OutputPiece("gpu1", False, b"one\ntwo\n"))
    lines.piece(OutputPiece("gpu-master", False, b"three\n"))
    assert capsysbinary.readouterr().out == b"gpu1       | one\ngpu1       | two\ngpu-master | three\n"


def test_others_wait_for_the_end_of_a_long_line(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = exec_lines("a", "b")
    lines.piece(OutputPiece("a", False, LONG))
    lines.piece(OutputPiece("b", False, b"one\n" + LONG))
    lines.piece(OutputPiece("b", False, b"yyy\n"))
    lines.piece(OutputPiece("a", False, b"xxx"))
    assert capsysbinary.readouterr().out == b"a | " + LONG + b"xxx"
    lines.piece(OutputPiece("a", False, b"\ntwo\n"))
    assert capsysbinary.readouterr().out == b"\nb | one\nb | " + LONG + b"yyy\na | two\n"
    lines.piece(OutputPiece("a", False, LONG))
    lines.piece(OutputPiece("b", True, b"three"))
    lines.ended(Ended("b", code=0))
    lines.ended(Ended("a", code=0))
    assert capsysbinary.readouterr() == (b"a | " + LONG + b"\n", b"b | three\n")


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_long_line_is_broken_only_when_too_much_waits(capsysbinary: pytest.CaptureFixture[bytes], end: bytes) -> None:
    lines = exec_lines("a", "b")
    lines.piece(OutputPiece("a", False, LONG))
    held = 0
    while held <= 1024 * 1024:
        assert capsysbinary.readouterr().out in (b"a | " + LONG, b"")
        lines.piece(OutputPiece("b", False, b"y" * 5000 + end))
        held += 5000 + len(end)
    broken = capsysbinary.readouterr().out
    assert broken.startswith(b"\nb | yyy")
    assert broken.count(b"y") == held // (5000 + len(end)) * 5000
    lines.piece(OutputPiece("a", False, b"x\n"))
    lines.ended(Ended("b", code=0))
    assert capsysbinary.readouterr().out == (b"a | x\n" if end else b"\na | x\n")


def test_a_letter_in_two_pieces_is_text_and_what_is_no_letter_is_base64(capsys: pytest.CaptureFixture[str]) -> None:
    from ugro.features.exec import cli as module

    documents = module._Json(Output(is_json=True))
    for content in (b"gr\xc3", b"\xbcn", b"\xff!", b"\xc3"):
        documents.piece(OutputPiece("gpu1", True, content))
    documents.ended(Ended("gpu1", code=0))
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document.get("stderr") for document in shown] == ["gr", "ün", None, None, None]
    assert [document.get("stderr_base64") for document in shown] == [None, None, "/yE=", "ww==", None]


def exec_lines(*nodes: str) -> Any:
    from ugro.features.exec import cli as module

    return module._Lines(Output(), nodes, has_prefix=True)


def test_a_node_that_has_just_gone_is_not_said_to_be_gone_since(capsys: pytest.CaptureFixture[str]) -> None:
    from ugro.cli import health

    for at, note in (("10:00:59", "refused"), ("10:02:00", "refused; since 10:00 UTC")):
        gone = NodeReport(
            "gpu3",
            Status.UNREACHABLE,
            0,
            error="refused",
            since="2026-01-01T10:00:00+00:00",
            checked_at=f"2026-01-01T{at}+00:00",
        )
        health.show(Output(), [gone])
        assert capsys.readouterr().out.splitlines()[-1].split("\t")[-1] == note


def test_findings_stand_below_each_other_node_by_node(terminal: Callable[[int, int], Terminal]) -> None:
    from ugro.features.health import cli as doctor

    screen = terminal(80, 24)
    subjects = ("gpu1 → gpu10", "gpu10", "cluster", "gpu2")
    findings = [Finding(subject, "reach", Grade.FAILED, "gone", "look") for subject in subjects]
    findings.sort(key=lambda finding: doctor._place(finding, ()))
    doctor.show(Output(), findings)
    shown = ESCAPES.sub("", screen.shown()).splitlines()
    assert [line[2:14].strip() for line in shown[::2]] == ["gpu2", "gpu10", "cluster", "gpu1 → gpu10"]
    assert {line.index("reach  gone") for line in shown[::2]} == {16}
    assert {line.index("→ look") for line in shown[1::2]} == {16}
    named = sorted(findings, key=lambda finding: doctor._place(finding, ("gpu10", "gpu2")))
    assert [finding.subject for finding in named][:2] == ["gpu10", "gpu2"]


def reports() -> list[NodeReport]:
    machine = Machine("h", "Linux", "6.1", "x86_64", "b", "u", "/r", "3.11", "/p", 16, "cpu", 64 * 2**30)
    gpus = tuple(
        Gpu(index, f"GPU-{index}", "NVIDIA GeForce RTX 5070 Ti Laptop GPU", 12 * 2**30, 2**30, 0.5, 70.0, 99.0, 140.0)
        for index in range(2)
    )
    facts = Facts(0.0, 99.0, (1.0, 2.0, 3.0), 0.5, 64 * 2**30, 32 * 2**30, (Disk("/", 10**12, 10**11),), gpus)
    healthy = NodeReport("gpu1", Status.HEALTHY, 97, machine=machine, facts=facts, link=LinkQuality(0.0005))
    hot = Reason("gpu", "GPU 1 is very hot: 91 °C (limit 85 °C)", 20.0)
    unwell = NodeReport("gpu2", Status.UNHEALTHY, 51, (hot,), machine=machine, facts=facts)
    error = "connection refused: no SSH server at that address and port"
    gone = NodeReport("gpu3", Status.UNREACHABLE, 0, error=error, since="2026-01-01T10:00:00+00:00")
    return [healthy, unwell, gone]


def test_what_is_waited_for_is_a_line_now_and_then_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    for text in ("the head starts Ray on gpu1", "the head starts Ray on gpu1", "another one at once"):
        output.waiting(text)
    seen = capsys.readouterr()
    assert (seen.out, seen.err) == ("", "the head starts Ray on gpu1\n")
    Output(is_json=True).waiting("not for programs")
    Output(is_quiet=True).waiting("nor for those who asked for quiet")
    assert capsys.readouterr().err == ""

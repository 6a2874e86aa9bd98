"""``ugro doctor``: what could be in the way, each with its remedy."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from ugro.cli.output import Cell, Output, Style, clean
from ugro.cli.session import Session, json_option, pass_session
from ugro.core.finding import Finding, Grade
from ugro.core.quantity import format_duration

SIGNS: dict[Grade, tuple[str, Style]] = {
    Grade.OK: ("✓", "good"),
    Grade.WARNING: ("!", "warn"),
    Grade.FAILED: ("✗", "bad"),
}
_HEADER = ("GRADE", "SUBJECT", "CHECK", "TEXT", "REMEDY")
_CHECK_WIDTH = 8


@click.command()
@click.argument("nodes", nargs=-1)
@json_option
@pass_session
def doctor(session: Session, nodes: tuple[str, ...]) -> int:
    """Check everything that could be in the way on NODES (names, @all, @label; default all), and between them.

    Exit code: 0 nothing failed (warnings may be there), 1 something did, 5 a node cannot be reached.
    """
    started = time.monotonic()
    output = session.output
    is_live = output.is_terminal and not output.is_json
    lines = _Lines(output)
    findings = []
    output.progress("looking at the nodes")
    for finding in session.client().doctor(nodes):
        findings.append(finding)
        if is_live:
            lines.show(finding)
            output.progress("looking further")
    if output.is_json:
        output.document({"findings": findings})
    elif not is_live:
        output.table(_HEADER, _rows(findings))
    output.note(_summary(findings, time.monotonic() - started))
    return _exit_code(findings)


class _Lines:
    """Findings as they come: nothing is known of the later ones, so the columns only ever grow."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._width = 0

    def show(self, finding: Finding) -> None:
        output = self._output
        sign, style = SIGNS[finding.grade]
        subject = clean(finding.subject)
        self._width = max(self._width, len(subject))
        head = f"{output.styled(sign, style)} {output.styled(subject.ljust(self._width), 'bold')}"
        found = output.styled(clean(finding.text), "" if finding.grade is Grade.OK else style)
        lines = f"{head}  {finding.check.ljust(_CHECK_WIDTH)}  {found}\n"
        if finding.remedy:
            indent = " " * (2 + self._width + 2)
            lines += f"{indent}{output.styled('→ ' + clean(finding.remedy), 'id')}\n"
        output.progress("")  # what was waited for gives way to what came
        output.raw(lines.encode())


def _rows(findings: Sequence[Finding]) -> list[list[Cell]]:
    return [
        [Cell(word) for word in (finding.grade, finding.subject, finding.check, finding.text, finding.remedy or "")]
        for finding in findings
    ]


def _summary(findings: Sequence[Finding], elapsed_s: float) -> str:
    counts = [(grade, sum(finding.grade is grade for finding in findings)) for grade in Grade]
    told = " · ".join(f"{count} {grade}" for grade, count in counts if count)
    return f"{told}   checked in {format_duration(elapsed_s)}"


def _exit_code(findings: Sequence[Finding]) -> int:
    failed = {finding.check for finding in findings if finding.grade is Grade.FAILED}
    return 5 if "reach" in failed else 1 if failed else 0

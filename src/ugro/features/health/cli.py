"""``ugro doctor``: finds problems on nodes and between them, each with a remedy."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import click

from ugro.cli import candidates
from ugro.cli.output import Cell, Output, Style, clean
from ugro.cli.session import Session, json_option, pass_session
from ugro.features.health.operations import Diagnose
from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.support.quantities import format_duration

SIGNS: dict[Grade, tuple[str, Style]] = {
    Grade.OK: ("✓", "good"),
    Grade.WARNING: ("!", "warn"),
    Grade.FAILED: ("✗", "bad"),
}
_HEADER = ("GRADE", "SUBJECT", "CHECK", "TEXT", "REMEDY")


@click.command()
@click.argument("nodes", nargs=-1, shell_complete=candidates.nodes)
@json_option
@pass_session
def doctor(session: Session, nodes: tuple[str, ...]) -> int:
    """Find problems on nodes and between them, with remedies.

    NODES are names, @all or @label; the default is all nodes. Checks SSH, Python, disks, GPUs, versions and the network
    between nodes.

    Exit code: 0 if nothing failed (there may be warnings), 1 if a check failed, 5 if a node cannot be reached.

    \b
    Examples:
      ugro doctor
      ugro doctor gpu1 gpu2
    """
    started = time.monotonic()
    output = session.output
    findings: list[Finding] = []
    output.progress("checking the nodes")
    for finding in session.client(uses_nodes=True).follow(Diagnose(tuple(nodes))):
        findings.append(finding)
        output.progress(f"checking the nodes: {_counts(findings)} so far")
    findings.sort(key=lambda finding: _place(finding, nodes))
    if output.is_json:
        output.document({"findings": findings})
    elif output.is_terminal:
        show(output, findings)
    else:
        output.table(_HEADER, _rows(findings))
    output.note(_summary(findings, time.monotonic() - started))
    return _exit_code(findings)


def _place(finding: Finding, nodes: Sequence[str]) -> tuple[bool, int, str]:
    """Nodes in the order they were given, else gpu2 before gpu10; findings between nodes last."""
    subject = finding.subject
    is_between = subject == "cluster" or " → " in subject
    place = nodes.index(subject) if subject in nodes else len(nodes)
    return is_between, place, re.sub(r"[0-9]+", lambda digits: digits[0].zfill(20), subject)


def show(output: Output, findings: Sequence[Finding]) -> None:
    subject_width = max((len(clean(finding.subject)) for finding in findings), default=0)
    check_width = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        sign, style = SIGNS[finding.grade]
        subject = output.styled(clean(finding.subject).ljust(subject_width), "bold")
        found = output.styled(clean(finding.text), "" if finding.grade is Grade.OK else style)
        lines = f"{output.styled(sign, style)} {subject}  {finding.check.ljust(check_width)}  {found}\n"
        if finding.remedy:
            indent = " " * (2 + subject_width + 2)
            lines += f"{indent}{output.styled('→ ' + clean(finding.remedy), 'id')}\n"
        output.raw(lines.encode())


def _rows(findings: Sequence[Finding]) -> list[list[Cell]]:
    return [
        [Cell(word) for word in (finding.grade, finding.subject, finding.check, finding.text, finding.remedy or "")]
        for finding in findings
    ]


def _summary(findings: Sequence[Finding], elapsed_s: float) -> str:
    return f"{_counts(findings)}   checked in {format_duration(elapsed_s)}"


def _counts(findings: Sequence[Finding]) -> str:
    counts = [(grade, sum(finding.grade is grade for finding in findings)) for grade in Grade]
    return " · ".join(f"{count} {grade}" for grade, count in counts if count)


def _exit_code(findings: Sequence[Finding]) -> int:
    failed = {finding.check for finding in findings if finding.grade is Grade.FAILED}
    return 5 if "reach" in failed else 1 if failed else 0

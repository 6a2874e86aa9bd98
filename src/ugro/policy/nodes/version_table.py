"""The versions on every node side by side, for ``ugro node setup``: what there is, and where nodes differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ugro.core.env_report import NodeVersions
from ugro.core.finding import Finding, Grade
from ugro.policy.nodes.versions import Installed, all_differences, judge_versions, versions_of
from ugro.policy.wording import count_of, names
from ugro.remote.messages import Packages

_MOST_NAMED = 5  # packages in one sentence
_SHOWN_ELSEWHERE = ("torch", "nvidia-nccl-cu", "nvidia-cuda-runtime")
_TOOLS = frozenset({"pip", "setuptools", "wheel"})  # of the environment itself; no rank imports them


@dataclass(frozen=True, slots=True)
class Found:
    """One node: the versions that decide, and all its packages."""

    installed: Installed
    packages: tuple[tuple[str, str], ...] = ()


def compared(
    rows: Sequence[NodeVersions], found: Sequence[Found], *, must_agree: bool = False
) -> tuple[list[NodeVersions], list[Finding]]:
    """The rows with the versions that were found, and marked where they differ; and what to say about it.

    ``must_agree``: a difference that breaks a job on all these nodes is a failure, because nobody asked for it.
    """
    installed = [one.installed for one in found]
    differences = all_differences(installed)
    others = differing_packages({one.installed.node: one.packages for one in found if one.packages})
    marks: dict[str, list[str]] = {}
    for difference in differences:
        for node in difference.others:
            marks.setdefault(node, []).append(difference.kind)
    for package, by_node in others.items():
        for node in _unlike_most(by_node):
            marks.setdefault(node, []).append(package)
    by_name = {one.node: one for one in installed}
    filled = [
        _filled(row, by_name[row.node], others, marks.get(row.node, ())) if row.node in by_name else row
        for row in rows
    ]
    broken = {one.text for one in differences if one.is_fatal} if must_agree else set()
    findings = [
        replace(one, grade=Grade.FAILED) if one.text in broken else one for one in judge_versions(installed)
    ]
    return filled, [*findings, *_judge_others(others)]


def differing_packages(nodes: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, dict[str, str | None]]:
    """By package: the version on each node, None where it is not installed. Only packages that differ."""
    installed = {node: {_normal(name): version for name, version in packages} for node, packages in nodes.items()}
    every = {name for packages in installed.values() for name in packages}
    by_package = {name: {node: packages.get(name) for node, packages in installed.items()} for name in sorted(every)}
    return {
        name: by_node
        for name, by_node in by_package.items()
        if len(set(by_node.values())) > 1 and name not in _TOOLS and not name.startswith(_SHOWN_ELSEWHERE)
    }


def _filled(
    row: NodeVersions, one: Installed, others: Mapping[str, Mapping[str, str | None]], marks: Sequence[str]
) -> NodeVersions:
    versions = versions_of(one)
    torch = one.packages.torch if isinstance(one.packages, Packages) else None
    return replace(
        row,
        environment=one.environment,
        label=one.label,
        python=one.python,
        python_path=one.python_path,
        torch=torch,
        cuda=versions["CUDA"],
        nccl=versions["NCCL"],
        driver=one.gpu_driver,
        others=tuple((name, by_node[row.node]) for name, by_node in others.items() if row.node in by_node),
        differs=tuple(marks),
    )


def _unlike_most(by_node: Mapping[str, str | None]) -> list[str]:
    most = Counter(by_node.values()).most_common(1)[0][0]
    return [node for node, version in by_node.items() if version != most]


def _judge_others(others: Mapping[str, Mapping[str, str | None]]) -> list[Finding]:
    if not others:
        return []
    parts = [f"{name} ({_who_has_what(by_node)})" for name, by_node in list(others.items())[:_MOST_NAMED]]
    if len(others) > _MOST_NAMED:
        parts.append(f"and {len(others) - _MOST_NAMED} more")
    verb = "differs" if len(others) == 1 else "differ"
    text = f"{count_of(len(others), 'other package')} {verb}: {', '.join(parts)}"
    return [Finding("cluster", "packages", Grade.OK, text)]


def _who_has_what(by_node: Mapping[str, str | None]) -> str:
    nodes: dict[str | None, list[str]] = {}
    for node, version in by_node.items():
        nodes.setdefault(version, []).append(node)
    ordered = sorted(nodes.items(), key=lambda group: -len(group[1]))
    return ", ".join(f"{names(who)} {version or 'none'}" for version, who in ordered)


def _normal(name: str) -> str:
    """As package indexes compare names."""
    return name.lower().replace("_", "-").replace(".", "-")

"""Whether the nodes have the same versions of what the ranks of one job share, and how to get there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ugro.core.finding import Finding, Grade
from ugro.core.node import Facts
from ugro.policy.nodes.examination import Examination, Packages

Groups = Mapping[str, Sequence[Examination]]  # who has which version, the most common first


def judge_versions(nodes: Sequence[Examination]) -> list[Finding]:
    findings = [*_missing_torch(nodes)]
    agreed = []
    for kind, version_of in _KINDS.items():
        groups = _grouped(nodes, version_of)
        if len(groups) > 1:
            text = "; ".join(f"{version} on {_names(holders)}" for version, holders in groups.items())
            findings.append(_finding(Grade.WARNING, f"{kind} differs: {text}", _remedy(kind, groups)))
        elif groups:
            agreed.append(f"{kind} {next(iter(groups))}")
    if agreed and len(nodes) > 1:
        findings.append(_finding(Grade.OK, f"nodes agree on {', '.join(agreed)}"))
    return findings


def _package(version_of: Callable[[Packages], str | None]) -> Callable[[Examination], str | None]:
    return lambda node: version_of(node.packages) if isinstance(node.packages, Packages) else None


_torch_of = _package(lambda packages: packages.torch_release)
_KINDS: dict[str, Callable[[Examination], str | None]] = {
    "Python": lambda node: ".".join(node.machine.python.split(".")[:2]),
    "torch": _torch_of,
    "CUDA": _package(lambda packages: packages.cuda),
    "NCCL": _package(lambda packages: packages.nccl if packages.torch else None),
    "GPU driver": lambda node: node.facts.gpu_driver if isinstance(node.facts, Facts) else None,
}


def _grouped(nodes: Sequence[Examination], version_of: Callable[[Examination], str | None]) -> Groups:
    groups: dict[str, list[Examination]] = {}
    for node in nodes:
        if (version := version_of(node)) is not None:
            groups.setdefault(version, []).append(node)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _missing_torch(nodes: Sequence[Examination]) -> Iterator[Finding]:
    told = [node for node in nodes if isinstance(node.packages, Packages)]
    without = [node for node in told if _torch_of(node) is None]
    if told and without == told:
        yield _finding(Grade.OK, f"torch is not installed on {_names(told)}")
    elif without:
        version = next(iter(_grouped(told, _torch_of)))
        text = f"torch is not installed on {_names(without)}; others have {version}"
        yield _finding(Grade.WARNING, text, _install(without, f"torch=={version}"))


def _remedy(kind: str, groups: Groups) -> str:
    (wanted, holders), *rest = groups.items()
    others = [node for _, nodes in rest for node in nodes]
    if kind == "Python":
        return f"under {_names(others)} in cluster.yaml: python: python{wanted}"
    if kind == "GPU driver":
        return f"install driver {wanted} on {_names(others)} and reboot"
    torch = f"torch=={_torch_of(holders[0])}"
    if kind == "torch":
        return _install(others, torch)
    # CUDA and NCCL come with the build of torch.
    digits = wanted.replace(".", "")
    index = f" --index-url https://download.pytorch.org/whl/cu{digits}" if kind == "CUDA" and digits.isdigit() else ""
    return _install(others, f"--force-reinstall {torch}{index}")


def _install(nodes: Sequence[Examination], what: str) -> str:
    paths = {node.machine.python_path for node in nodes}
    python = paths.pop() if len(paths) == 1 else "python3"
    return f"ugro exec {' '.join(node.name for node in nodes)} -- {python} -m pip install {what}"


def _names(nodes: Sequence[Examination]) -> str:
    return ", ".join(node.name for node in nodes)


def _finding(grade: Grade, text: str, remedy: str | None = None) -> Finding:
    return Finding("cluster", "versions", grade, text, remedy)

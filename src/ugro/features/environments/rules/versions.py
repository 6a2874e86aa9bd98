"""Whether nodes have the same versions of what the ranks of one job share, and how to make them agree.

``ugro doctor`` reports every difference; a launch is refused by those that would break the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ugro.features.environments.model import Made, NodeVersions
from ugro.features.environments.rules.imports import MODULE, TOO_OLD
from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.jobs.model import Cause, Failure, Launcher
from ugro.kernel.links.rules import Unknown
from ugro.kernel.support.quantities import count_of, in_words, names
from ugro.node.messages import Packages


@dataclass(frozen=True, slots=True)
class Installed:
    """What is installed for the Python that runs a node's ranks."""

    node: str
    python: str
    python_path: str
    packages: Packages | Unknown
    gpu_driver: str | None = None
    has_gpus: bool = False
    environment: str | None = None  # the name of the one that UGRO made; None: it is the node's own Python
    label: str = ""  # of the node, whose override decided what is in it


@dataclass(frozen=True, slots=True)
class Need:
    """The properties of a job that decide which differences break it."""

    launcher: Launcher
    uses_gpus: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    text: str
    hint: str | None = None
    is_fatal: bool = False
    node: str | None = None  # the node that differs from the others, if there is only one
    kind: str = ""
    others: tuple[str, ...] = ()  # nodes that differ from most


_VENV = "~/ugro-env"
_DRIVER = "GPU driver"
_RAY = "Ray"
_ANY_JOB = Need(Launcher.DDP, uses_gpus=True)
_Version = Callable[[Installed], str | None]
_Groups = Mapping[str, Sequence[Installed]]  # nodes by version, the most common version first


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    version: _Version
    decisive: _Version  # the part of the version that must be equal
    is_for_gpus: bool = False
    is_of_packages: bool = True  # an environment decides it


def judge_versions(installed: Sequence[Installed]) -> list[Finding]:
    """For ``ugro doctor``. A node whose packages are unknown has a finding of its own, and none here."""
    findings = [_finding(one) for one in all_differences(installed)]
    agreed = []
    for kind in _KINDS:
        match list(_grouped(installed, kind.version).items()):
            case [(version, [_, _, *_])]:  # one node alone agrees with nobody
                agreed.append(f"{kind.name} {version}")
    if agreed:
        findings.append(Finding("cluster", "versions", Grade.OK, f"nodes agree on {', '.join(agreed)}"))
    return findings


def judge_machines(installed: Sequence[Installed]) -> list[Finding]:
    """For ``ugro doctor`` where jobs bring their packages: the node's own do not count, only its driver."""
    text = "jobs run in the Python environment of cluster.yaml; for its versions: ugro node setup"
    own = [_finding(one) for one in all_differences(installed) if one.kind == _DRIVER]
    return [*own, Finding("cluster", "versions", Grade.OK, text)]


def _finding(one: Difference) -> Finding:
    # Without a hint there is nothing to repair.
    return Finding("cluster", "versions", Grade.WARNING if one.hint else Grade.OK, one.text, one.hint)


def all_differences(installed: Sequence[Installed]) -> list[Difference]:
    """Whatever job may come."""
    return list(_differences(installed, _ANY_JOB))


def versions_of(one: Installed) -> dict[str, str | None]:
    """By kind: Python, torch, CUDA, NCCL, GPU driver."""
    return {kind.name: kind.version(one) for kind in _KINDS}


def packages_in(made: Made) -> Packages:
    """What of an environment ranks must share."""
    found = packages_among(made.version, made.packages)
    return replace(found, torch_cuda=made.torch_cuda, nccl=found.nccl or made.nccl)


def packages_among(python: str, installed: Iterable[tuple[str, str]]) -> Packages:
    """What of all installed packages ranks must share."""
    found = {name.lower().replace("_", "-"): version for name, version in installed}

    def first(base: str, *suffixes: str) -> str | None:
        return next((found[base + suffix] for suffix in suffixes if base + suffix in found), None)

    return Packages(
        python,
        found.get("torch"),
        cuda_runtime=first("nvidia-cuda-runtime", "", "-cu12", "-cu11"),
        nccl=first("nvidia-nccl", "-cu13", "-cu12", "-cu11"),
        ray=found.get("ray"),
    )


def differences(installed: Sequence[Installed], need: Need) -> list[Difference]:
    """For a launch, fatal ones first. Unknown packages are noted and not fatal: they prove nothing."""
    if need.launcher is Launcher.COMMAND:
        return []
    unknown = [
        Difference(f"{one.node}: cannot tell which packages are installed: {one.packages.text}", one.packages.hint)
        for one in installed
        if isinstance(one.packages, Unknown)
    ]
    return sorted([*unknown, *_differences(installed, need)], key=lambda difference: not difference.is_fatal)


def lack_of_imports(missing: Mapping[str, Sequence[str]], pythons: Mapping[str, str]) -> Failure | None:
    """Why the ranks of a job would end as they begin. ``missing``: by node, what the script imports and it lacks."""
    lacking = {node: modules for node, modules in missing.items() if modules}
    if not lacking:
        return None
    alike: dict[str, list[str]] = {}
    for node, modules in lacking.items():
        alike.setdefault(in_words(modules), []).append(node)
    parts = [f"{names(nodes)} {'lacks' if len(nodes) == 1 else 'lack'} {what}" for what, nodes in alike.items()]
    reason = "; ".join(parts)
    node = next(iter(lacking))
    where = f"{pythons[node]} on {node}" if node in pythons else node
    # UGRO's own package goes with the job: where it is missing, Python is too old for it.
    what = TOO_OLD if MODULE in lacking[node] else f"install what is missing for {where}, or name a Python that has it"
    hint = (
        f"{what}, under {node} in cluster.yaml: python: ~/venv/bin/python; "
        "or let UGRO install it: see docs/environments.md"
    )
    return Failure(Cause.IMPORT_ERROR, f"not started: {reason}, which the script imports", node=node, hint=hint)


def _differences(installed: Sequence[Installed], need: Need) -> Iterator[Difference]:
    yield from _missing_ray(installed) if need.launcher is Launcher.RAY else _missing_torch(installed, need)
    for kind in _RAY_KINDS if need.launcher is Launcher.RAY else _KINDS:
        groups = _grouped(installed, kind.version)
        if len(groups) > 1 and (need.uses_gpus or not kind.is_for_gpus):
            is_fatal = len(_grouped(installed, kind.decisive)) > 1
            others = [one for holders in list(groups.values())[1:] for one in holders]
            node = others[0].node if len(others) == 1 else None
            where = tuple(one.node for one in others)
            wish = _override(groups) if kind.is_of_packages else ""
            # What the user asked for needs no remedy, unless it breaks the job.
            hint = _remedy(kind, groups, others) if is_fatal or not wish else None
            yield Difference(_text(kind, groups) + wish, hint, is_fatal, node, kind.name, where)


def _missing_torch(installed: Sequence[Installed], need: Need) -> Iterator[Difference]:
    known = [one for one in installed if isinstance(one.packages, Packages)]
    without = [one for one in known if _torch(one) is None]
    if not without:
        return
    text = f"torch is not installed on {names([one.node for one in without])}"
    node = without[0].node if len(without) == 1 else None
    if len(without) < len(known):
        version = next(iter(_grouped(known, _torch)))
        yield Difference(f"{text}; others have {version}", _install(without, f"torch=={version}"), True, node)
    elif need.launcher is Launcher.TORCHRUN:
        yield Difference(f"{text}, and torchrun is a part of it", _install(without, "torch"), True, node)
    elif with_gpus := [one for one in without if one.has_gpus]:
        where = names([one.node for one in with_gpus])
        yield Difference(f"{text}: trainings cannot use the GPUs of {where}", _install(without, "torch"), False, node)
    else:
        yield Difference(text)


def _missing_ray(installed: Sequence[Installed]) -> Iterator[Difference]:
    known = [one for one in installed if isinstance(one.packages, Packages)]
    if without := [one for one in known if _ray(one) is None]:
        version = next(iter(_grouped(known, _ray)), None)
        wanted = "'ray[default]" + (f"=={version}'" if version else "'")
        text = f"Ray is not installed on {names([one.node for one in without])}"
        yield Difference(text, _install(without, wanted), True, without[0].node if len(without) == 1 else None)


def _text(kind: _Kind, groups: _Groups) -> str:
    """'torch differs: gpu1 and gpu3 have 2.6.0, gpu2 2.5.1 (+cpu)'."""
    parts: list[str] = []
    for version, holders in groups.items():
        verb = "" if parts else "has " if len(holders) == 1 else "have "
        build = _build(holders) if kind.name == "torch" else ""
        parts.append(f"{names([one.node for one in holders])} {verb}{version}{build}")
    return f"{kind.name} differs: {', '.join(parts)}"


def _override(groups: _Groups) -> str:
    """'; gpu3 has the override for label old', if such overrides alone are why versions differ."""
    by_label: dict[str, dict[str, list[str]]] = {}
    for version, holders in groups.items():
        for one in holders:
            by_label.setdefault(one.label, {}).setdefault(version, []).append(one.node)
    if len(by_label) == 1 or any(len(versions) > 1 for versions in by_label.values()):
        return ""
    nodes = {label: [node for part in versions.values() for node in part] for label, versions in by_label.items()}
    parts = [
        f"{names(who)} {'has' if len(who) == 1 else 'have'} the override for label {label}"
        for label, who in nodes.items()
        if label
    ]
    return f"; {', '.join(parts)}"


def _build(holders: Sequence[Installed]) -> str:
    """What torch was built for. A different build is not by itself a different version."""
    builds = {one.packages.torch_build for one in holders if isinstance(one.packages, Packages)}
    build = builds.pop() if len(builds) == 1 else ""
    return f" (+{build})" if build else ""


def _remedy(kind: _Kind, groups: _Groups, others: Sequence[Installed]) -> str:
    """How the other nodes get the most common version."""
    wanted, holders = next(iter(groups.items()))
    where = ", ".join(one.node for one in others)
    if kind.is_of_packages and any(one.environment for one in (*holders, *others)):
        pin = f'python: "{wanted}"' if kind.name == "Python" else f"packages: [{_pinned(kind, holders[0])}, …]"
        return f"pin it for all nodes, below environment: {pin}"
    if kind.name == "Python":
        return f"under {where} in cluster.yaml: python: python{wanted}"
    if kind.name == _DRIVER:
        return f"install driver {wanted} on {where} and reboot"
    torch = _pinned(kind, holders[0])
    if kind.name in ("torch", _RAY):
        return _install(others, torch)
    # CUDA and NCCL come with the build of torch.
    digits = wanted.replace(".", "")
    is_cuda = kind.name == "CUDA" and digits.isdigit()
    index = f" --index-url https://download.pytorch.org/whl/cu{digits}" if is_cuda else ""
    return _install(others, f"--force-reinstall {torch}{index}")


def _pinned(kind: _Kind, holder: Installed) -> str:
    return f"ray=={_ray(holder)}" if kind.name == _RAY else f"torch=={_torch(holder)}"


def _install(nodes: Sequence[Installed], what: str) -> str:
    if any(one.environment for one in nodes):  # it never changes: another one is made
        return f"add it below environment: packages: [{what}, …]"
    paths = {one.python_path for one in nodes}
    python = paths.pop() if len(paths) == 1 else "python3"
    where = " ".join(one.node for one in nodes)
    if not any(isinstance(one.packages, Packages) and one.packages.is_managed for one in nodes):
        return f"ugro exec {where} -- {python} -m pip install {what}"
    # pip refuses to install into a Python of the system's package manager.
    make = f"{python} -m venv {_VENV} && {_VENV}/bin/pip install {what}"
    return f"ugro exec {where} -- sh -c '{make}', then under {where} in cluster.yaml: python: {_VENV}/bin/python"


def _grouped(installed: Sequence[Installed], version_of: _Version) -> _Groups:
    groups: dict[str, list[Installed]] = {}
    for one in installed:
        if (version := version_of(one)) is not None:
            groups.setdefault(version, []).append(one)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


# --- versions of one node ----------------------------------------------------------------------------------------


def _package(version_of: Callable[[Packages], str | None]) -> _Version:
    return lambda one: version_of(one.packages) if isinstance(one.packages, Packages) else None


def _minor(version_of: _Version) -> _Version:
    """3.11.7 → 3.11: patch releases are compatible."""
    return lambda one: ".".join(version.split(".")[:2]) if (version := version_of(one)) else None


def _cuda_vendor(packages: Packages) -> str | None:
    """Different CUDA versions work together; a build for another vendor's GPUs, or for none, does not."""
    return "CUDA" if packages.cuda and not packages.cuda.startswith("none") else packages.cuda


_python = _minor(lambda one: one.python)
_torch = _package(lambda packages: packages.torch_release)
# NCCL refuses to talk to any other version of itself.
_nccl = _package(lambda packages: packages.nccl if packages.torch else None)
_KINDS = (
    _Kind("Python", _python, _python),
    _Kind("torch", _torch, _minor(_torch)),
    _Kind("CUDA", _package(lambda packages: packages.cuda), _package(_cuda_vendor), is_for_gpus=True),
    _Kind("NCCL", _nccl, _nccl, is_for_gpus=True),
    _Kind(_DRIVER, lambda one: one.gpu_driver, lambda one: None, is_for_gpus=True, is_of_packages=False),
)
# Ray's nodes refuse every other release of Ray; a patch release of Python may differ.
_ray = _package(lambda packages: packages.ray)
_RAY_KINDS = (_Kind("Python", _python, _python), _Kind(_RAY, _ray, _ray))


# --- version table ----------------------------------------------------------------------------------------------------
# The versions on every node side by side, for ``ugro node setup``: what there is, and where nodes differ.


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

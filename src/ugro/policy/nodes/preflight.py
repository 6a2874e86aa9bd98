"""Whether the nodes of a job have the same versions of what its ranks share, so that they can work together at all.

As ``policy.agreement`` for ``ugro doctor``, but about one job: what would break it is told apart from what would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ugro.core.job import Launcher
from ugro.policy.nodes.examination import Packages, Untold
from ugro.policy.wording import names


@dataclass(frozen=True, slots=True)
class Installed:
    """What the Python that will run a node's ranks has."""

    node: str
    python_path: str
    packages: Packages | Untold


@dataclass(frozen=True, slots=True)
class Need:
    """What of a job says which differences matter to it."""

    launcher: Launcher
    uses_gpus: bool = False


@dataclass(frozen=True, slots=True)
class Disagreement:
    text: str
    hint: str | None = None
    is_fatal: bool = False
    node: str | None = None  # the one that is unlike the others, if it is a single one


def judge(installed: Sequence[Installed], need: Need) -> list[Disagreement]:
    """What breaks the job first. A node that could not tell is only noted: that proves nothing."""
    if need.launcher is Launcher.COMMAND:
        return []
    found = [*_silent(installed), *_torch_missing(installed, need), *_differing(installed, need)]
    return sorted(found, key=lambda disagreement: not disagreement.is_fatal)


Version = Callable[[Packages], str | None]
_Groups = Mapping[str, Sequence[Installed]]  # who has which version, the most common first


def _differing(installed: Sequence[Installed], need: Need) -> Iterator[Disagreement]:
    yield from _compared("Python", installed, _python, _feature(_python))
    yield from _compared("torch", installed, _torch, _feature(_torch))
    if need.uses_gpus:
        # Ranks with NCCLs of different versions refuse to talk, down to the last digit.
        yield from _compared("NCCL", installed, _nccl, _nccl)
        yield from _compared("CUDA", installed, _cuda, _cuda_kind)


def _compared(kind: str, installed: Sequence[Installed], shown: Version, counted: Version) -> Iterator[Disagreement]:
    """``counted`` is the part of a version that must be the same; another difference in ``shown`` is only noted."""
    is_fatal = len(_grouped(installed, counted)) > 1
    groups = _grouped(installed, shown)
    if len(groups) < 2:
        return
    text = f"{kind} differs: " + ", ".join(
        f"{names([one.node for one in holders])} {_verb(index, holders)}{version}{_build(kind, holders)}"
        for index, (version, holders) in enumerate(groups.items())
    )
    others = [one for holders in list(groups.values())[1:] for one in holders]
    hint = _remedy(kind, next(iter(groups)), next(iter(groups.values()))[0], others)
    yield Disagreement(text, hint, is_fatal, others[0].node if len(others) == 1 else None)


def _verb(index: int, holders: Sequence[Installed]) -> str:
    if index > 0:
        return ""
    return "has " if len(holders) == 1 else "have "


def _build(kind: str, holders: Sequence[Installed]) -> str:
    """What a torch was built for belongs to its version, and is no difference by itself."""
    builds = {(_packages(one).torch or "").partition("+")[2] for one in holders} if kind == "torch" else set()
    build = builds.pop() if len(builds) == 1 else ""
    return f" (+{build})" if build else ""


def _torch_missing(installed: Sequence[Installed], need: Need) -> Iterator[Disagreement]:
    told = [one for one in installed if isinstance(one.packages, Packages)]
    without = [one for one in told if _packages(one).torch is None]
    if not without:
        return
    where = names([one.node for one in without])
    node = without[0].node if len(without) == 1 else None
    if len(without) < len(told):
        version = next(iter(_grouped(told, _torch)))
        text = f"torch is not installed on {where}; others have {version}"
        yield Disagreement(text, _install(without, f"torch=={version}"), True, node)
    elif need.launcher is Launcher.TORCHRUN:
        text = f"torch is not installed on {where}, and torchrun is a part of it"
        yield Disagreement(text, _install(without, "torch"), True, node)
    else:
        yield Disagreement(f"torch is not installed on {where}", _install(without, "torch"))


def _silent(installed: Sequence[Installed]) -> Iterator[Disagreement]:
    for one in installed:
        if isinstance(one.packages, Untold):
            yield Disagreement(f"{one.node} did not say what is installed: {one.packages.text}", one.packages.hint)


def _remedy(kind: str, wanted: str, holder: Installed, others: Sequence[Installed]) -> str:
    if kind == "Python":
        where = names([one.node for one in others])
        return f"under {where} in cluster.yaml: python: python{'.'.join(wanted.split('.')[:2])}"
    torch = f"torch=={_torch(_packages(holder))}"
    # CUDA and NCCL come with the build of torch.
    return _install(others, torch if kind == "torch" else f"--force-reinstall {torch}")


def _install(nodes: Sequence[Installed], what: str) -> str:
    paths = {one.python_path for one in nodes}
    python = paths.pop() if len(paths) == 1 else "python3"
    return f"ugro exec {' '.join(one.node for one in nodes)} -- {python} -m pip install {what}"


def _grouped(installed: Sequence[Installed], version_of: Version) -> _Groups:
    groups: dict[str, list[Installed]] = {}
    for one in installed:
        if isinstance(one.packages, Packages) and (version := version_of(one.packages)) is not None:
            groups.setdefault(version, []).append(one)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _packages(one: Installed) -> Packages:
    assert isinstance(one.packages, Packages)
    return one.packages


def _python(packages: Packages) -> str | None:
    return packages.python


def _torch(packages: Packages) -> str | None:
    return packages.torch_release


def _nccl(packages: Packages) -> str | None:
    return packages.nccl if packages.torch else None


def _cuda(packages: Packages) -> str | None:
    return packages.cuda


def _cuda_kind(packages: Packages) -> str | None:
    """Any CUDA works with another one; one built for no GPU or another maker's does not."""
    cuda = packages.cuda
    return "CUDA" if cuda is not None and not cuda.startswith("none") else cuda


def _feature(version_of: Version) -> Version:
    """3.11.7 → 3.11: what changes behind that keeps to what was agreed."""

    def feature(packages: Packages) -> str | None:
        version = version_of(packages)
        return ".".join(version.split(".")[:2]) if version else None

    return feature

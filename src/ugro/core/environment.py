"""What a job ran with: the origin of its code, and what was installed on its nodes."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.core.support.codec import dumps


@dataclass(frozen=True, slots=True)
class Origin:
    """The git state of the submitted code."""

    commit: str | None = None  # None: no commit yet
    is_dirty: bool = False  # tracked files were changed since
    branch: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """A node's Python environment as a job sees it; ``None`` means not installed, or not known."""

    python: str
    python_path: str
    arch: str
    packages: tuple[tuple[str, str], ...] = ()  # name and version, sorted
    torch_cuda: str | None = None
    gpu_driver: str | None = None
    node_env: str | None = None  # a hash of the node's configured variables, which may be secret
    name: str | None = None  # of the Python environment that UGRO made, or where an existing one is

    @property
    def fingerprint(self) -> str:
        import hashlib  # not at the top: most commands do not need it

        return hashlib.sha256(dumps(self).encode()).hexdigest()

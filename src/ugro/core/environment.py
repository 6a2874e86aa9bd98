"""What a job ran with: where its code came from, and what was installed where it ran."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.core.support.codec import dumps


@dataclass(frozen=True, slots=True)
class Origin:
    """Of the submitted code, as git tells."""

    commit: str | None = None  # None: nothing was committed yet
    is_dirty: bool = False  # a file that git knows was changed since
    branch: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """Of a node's Python, as a job sees it. ``None`` is not there, or not said."""

    python: str
    python_path: str
    arch: str
    packages: tuple[tuple[str, str], ...] = ()  # name and version, sorted
    torch_cuda: str | None = None
    gpu_driver: str | None = None
    node_env: str | None = None  # of the variables that everything on the node gets, a hash: they may be secret

    @property
    def fingerprint(self) -> str:
        import hashlib  # commands that only pass environments on have no use for it

        return hashlib.sha256(dumps(self).encode()).hexdigest()

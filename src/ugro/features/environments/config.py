"""The map ``environment`` of a job file and of the cluster file: the Python and the packages that jobs run with.

It reads no file: the files that it names are read by the agent when a job is submitted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ugro.features.environments.model import EnvRequest
from ugro.kernel.config.kinds import BadValueError, Bool, ByteCount, Kind, ListOf, MapOf, Text, is_encodable, shown
from ugro.kernel.config.section import LABEL, NO_OPTION, Nested, Section, is_line, is_path_on_node, key, section
from ugro.kernel.support.secrets import without_passwords

_MOST_OVERRIDES = 100
_MOST_TEXT = 1 << 20
_MOST_LINE = 1 << 16  # a line may carry the hashes of a hundred wheels
FILES = ("requirements", "constraints", "lock", "project")
# Where packages come from. A job that does not say so takes it from the cluster file.
_SOURCES = ("index_url", "extra_index_url", "find_links", "no_index", "offline")
_PASSWORD = "INDEX_PASSWORD"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def _is_minor(text: str) -> bool:
    return re.fullmatch(r"3\.(?:[89]|[1-9][0-9])", text) is not None


def _is_file(text: str) -> bool:
    return is_line(text) and not text.startswith("-")


def _is_requirement(text: str) -> bool:
    is_one_line = 0 < len(text) <= _MOST_LINE and text.isprintable() and text == text.strip()
    return is_one_line and not text.startswith(("-", "#"))


class TextFile(Kind):
    """A file's name. A job file that UGRO writes has the file's text instead, which has more than one line."""

    expected = "a file on this machine"
    metavar = "FILE"

    def parse(self, value: object) -> str:
        if isinstance(value, str) and "\n" in value and len(value) <= _MOST_TEXT and is_encodable(value):
            return value
        return _FILE.parse(value)


class Address(Kind):
    """It may hold a password, so no message shows it."""

    metavar = "URL"

    def __init__(self, *, may_be_folder: bool = False) -> None:
        self.may_be_folder = may_be_folder
        more = ", or a folder on this machine" if may_be_folder else ""
        self.expected = f"an address that starts with https:// or http://{more}"

    def parse(self, value: object) -> str:
        is_text = isinstance(value, str) and is_line(value) and " " not in value and not value.startswith("-")
        is_address = is_text and str(value).startswith(("https://", "http://", "file://"))
        if not is_address and not (is_text and self.may_be_folder and "://" not in str(value)):
            got = shown(value) if not isinstance(value, str) else "something else"
            raise BadValueError(f"expected {self.expected}, got {got}")
        return str(value)


_FILE = Text("a file on this machine", _is_file)
_PYTHON = Text('a version of Python such as "3.11"', _is_minor, metavar="VERSION")
_PACKAGE = Text("a package such as torch==2.13.0, without options", _is_requirement, metavar="PACKAGE")
_PACKAGES = ListOf("a list of packages such as [torch==2.13.0, numpy]", _PACKAGE, may_be_single=True)
_INDEX = Address()
_INDEXES = ListOf("a list of addresses", _INDEX, may_be_single=True, may_repeat=True)
_LINKS = ListOf("a list of addresses and folders", Address(may_be_folder=True), may_be_single=True, may_repeat=True)
_ENV_PATH = Text("a folder on the nodes that begins with / or ~", is_path_on_node, metavar="DIR")
_INDEX_MEANING = (
    "The package index to use instead of that of pip on this machine, or PyPI. `${NAME}` in it is replaced by a "
    "variable of the submitter's environment: that is the place for a password."
)


@section
class OverrideSection(Section):
    """What is different on nodes with a label."""

    noun = "an override"

    packages: tuple[str, ...] = key(
        (),
        _PACKAGES,
        "Packages that replace those of the same name; others are added.",
        example=["torch==2.6.0+cu118"],
    )
    index_url: str | None = key(
        None, _INDEX, "The package index to use there instead.", example="https://download.pytorch.org/whl/cu118"
    )
    extra_index_url: tuple[str, ...] = key(
        (), _INDEXES, "Further package indexes to use there.", example=["https://download.pytorch.org/whl/cu118"]
    )

    def check(self) -> None:
        if not self.written():
            raise BadValueError("it changes nothing", hint="give packages or index_url")


class _Overrides(MapOf):
    def written(self, value: Mapping[str, OverrideSection]) -> object:
        return {label: one.written() for label, one in value.items()}


@section
class EnvironmentSection(Section):
    """The Python environment that the job runs in. UGRO makes it on its nodes, once, from exactly the same packages."""

    python: str | None = key(
        None,
        _PYTHON,
        "The version of Python. Null is the one that the job's nodes have, if they agree.",
        example="3.11",
    )
    requirements: str | None = key(
        None,
        TextFile(),
        "A requirements file, read when the job is submitted. A relative path starts at `workdir`, for an option where "
        "you are. It may include other files of its folder (`-r`, `-c`).",
        example="requirements.txt",
    )
    packages: tuple[str, ...] = key(
        (), _PACKAGES, "Packages to install.", example=["torch==2.13.0", "numpy"], option="package"
    )
    constraints: str | None = key(
        None,
        TextFile(),
        "A file of versions that packages must have if they are installed.",
        example="constraints.txt",
        option=NO_OPTION,
    )
    lock: str | None = key(
        None,
        TextFile(),
        "A `uv.lock` or `pylock.toml` whose packages are installed, instead of `requirements` and `packages`.",
        example="uv.lock",
        option=NO_OPTION,
    )
    project: str | None = key(
        None,
        TextFile(),
        "The `pyproject.toml` of a `uv.lock`. Null is the one beside it.",
        example="pyproject.toml",
        option=NO_OPTION,
    )
    index_url: str | None = key(
        None, _INDEX, _INDEX_MEANING, example="https://pypi.example.org/simple", option=NO_OPTION
    )
    extra_index_url: tuple[str, ...] = key(
        (),
        _INDEXES,
        "Further package indexes. A package is taken from the first that has it, these before `index_url`.",
        example=["https://download.pytorch.org/whl/cu128"],
        option=NO_OPTION,
    )
    find_links: tuple[str, ...] = key(
        (),
        _LINKS,
        "Folders on this machine, or pages, with wheels. The nodes get wheels of a folder from the agent.",
        example=["wheels"],
        option=NO_OPTION,
    )
    no_index: bool = key(
        False, Bool(), "Use no package index, only `find_links`.", example=True, option=NO_OPTION
    )
    offline: bool = key(
        False,
        Bool(),
        "Send all packages from this machine, which downloads them once. This is also done for a node that does not "
        "reach the index.",
        example=True,
        option=NO_OPTION,
    )
    overrides: dict[str, OverrideSection] = key(
        {},
        _Overrides("a map of labels to maps", LABEL, Nested(OverrideSection), most=_MOST_OVERRIDES),
        "What is different on nodes with a label, such as another CUDA build for older GPUs. If a node has several of "
        "the labels, the first one here counts. The keys are `packages`, `index_url` and `extra_index_url`.",
        example={"pascal": {"packages": ["torch==2.6.0+cu118"]}},
        option=NO_OPTION,
    )
    existing: str | None = key(
        None,
        _ENV_PATH,
        "A virtual or conda environment that is on every node. It is checked, and never changed.",
        example="~/miniconda3/envs/torch",
        option="existing_environment",
    )
    upgrade: bool = key(
        False,
        Bool(),
        "Resolve the packages again when the job is submitted, to the newest versions. Otherwise the same request "
        "stays the same environment.",
        example=True,
    )
    enabled: bool = key(
        True,
        Bool(),
        "Whether the job runs in an environment. False is the node's own Python, also if the cluster file names an "
        "environment.",
        option="environment",
    )

    def check(self) -> None:
        if self.lock is not None:
            self._refuse_beside("lock", ("requirements", "packages", "constraints", "overrides"))
        if self.existing is not None:
            others = (*FILES, "packages", *_SOURCES, "overrides")
            self._refuse_beside("existing", others)

    def _refuse_beside(self, name: str, others: tuple[str, ...]) -> None:
        for other in others:
            if getattr(self, other) != self.known_keys()[other].default:
                raise BadValueError(f"cannot be used beside {name}", hint="remove one of them", at=(other,))

    @property
    def names_packages(self) -> bool:
        """Whether it says what is to be there, and not only where packages come from."""
        return any(name not in (*_SOURCES, "upgrade", "enabled") for name in self.written())

    @property
    def addresses(self) -> tuple[str, ...]:
        """All places where packages are looked for; what its files say is not among them."""
        overrides = self.overrides.values()
        others = (one for override in overrides for one in (override.index_url, *override.extra_index_url))
        return tuple(one for one in (self.index_url, *self.extra_index_url, *self.find_links, *others) if one)

    def located(self, folder: Callable[[str], Path]) -> Self:
        """The same with whole paths; ``folder``: where a relative path of a key starts."""
        changes: dict[str, Any] = {}
        for name in FILES:
            value = getattr(self, name)
            if value is not None and "\n" not in value:
                changes[name] = str(folder(name) / Path(value).expanduser())
        links = [
            link if "://" in link else str(folder("find_links") / Path(link).expanduser()) for link in self.find_links
        ]
        return replace(self, **changes, find_links=tuple(links))

    def over(self, default: EnvironmentSection) -> EnvironmentSection:
        """This one, if it names packages, else the default; each with its own sources where it has some.

        Who names an index means it, also where the default is to use none.
        """
        if not self.enabled:
            return self
        base = self if self.names_packages else default
        if base.existing is not None:
            return base
        sources = {name: getattr(self if name in self.given_keys else default, name) for name in _SOURCES}
        if "no_index" not in self.given_keys and (self.index_url or self.extra_index_url):
            sources["no_index"] = False
        return replace(base, **sources, upgrade=self.upgrade or default.upgrade)

    @classmethod
    def of_request(cls, request: EnvRequest | None) -> Self:
        """The other way round. Passwords are left out: they must be given at submission."""
        if request is None:
            return cls()
        return cls(
            python=request.python,
            packages=request.requirements,
            constraints="".join(f"{line}\n" for line in request.constraints) or None,
            lock=request.lock,
            project=request.project,
            index_url=without_password(request.index_url) if request.index_url else None,
            extra_index_url=tuple(map(without_password, request.extra_index_url)),
            find_links=tuple(map(without_password, request.find_links)),
            no_index=request.no_index,
            offline=request.offline,
            overrides={
                one.label: OverrideSection(
                    packages=one.requirements,
                    index_url=without_password(one.index_url) if one.index_url else None,
                    extra_index_url=tuple(map(without_password, one.extra_index_url)),
                )
                for one in request.overrides
            },
            existing=request.existing,
        )


def without_password(address: str) -> str:
    """With a variable in its place, whose value the submitter must give."""
    if without_passwords(address) == address:
        return address
    scheme, _, rest = address.partition("://")
    login, _, place = rest.rpartition("@")
    name, colon, _ = login.partition(":")
    return f"{scheme}://{name}:${{{_PASSWORD}}}@{place}" if colon else f"{scheme}://${{{_PASSWORD}}}@{place}"


def variables_in(request: EnvRequest) -> tuple[str, ...]:
    """The variables whose values its addresses need."""
    return tuple(dict.fromkeys(name for text in request.addresses for name in _VARIABLE.findall(text)))


def expanded(request: EnvRequest, env: Mapping[str, str]) -> EnvRequest:
    """With the values of variables in its addresses; all are known."""
    return request.with_addresses(lambda text: _VARIABLE.sub(lambda found: env[found[1]], text))


@section
class EnvironmentsSection(Section):
    """The Python environments that UGRO makes on nodes."""

    max_size: int = key(
        50_000_000_000,
        ByteCount(),
        "How much space they may take on each node. Above it, those that were not used for longest are removed; one "
        "that a running job uses stays.",
    )

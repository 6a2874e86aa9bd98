"""Requirements files: their lines, with the files that they include, as far as every node can install them.

What would be something else on each machine is refused, with its file and line: code that is not in a package, paths
of this machine, and variables, which uv and pip would replace with their own. Nothing is looked up.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from ugro.kernel.support.secrets import without_passwords, without_userinfo

_MOST_FILES = 50
_MOST_LINES = 20_000
_NAME = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(\[[^\]]*\])?\s*(.*)", re.DOTALL)
_OPTION = re.compile(r"(--?[A-Za-z][A-Za-z-]*)(?:\s*=\s*|\s+|$)(.*)", re.DOTALL)
_INCLUDES = {"-r": "r", "--requirement": "r", "-c": "c", "--constraint": "c"}
_SOURCES = {"-i": "index", "--index-url": "index", "--extra-index-url": "extra", "-f": "links", "--find-links": "links"}
# They change nothing here: wheels are preferred, and every file is checked by its hash.
_IGNORED = frozenset({"--require-hashes", "--prefer-binary", "--only-binary", "--no-binary", "--use-feature"})
_EDITABLE = frozenset({"-e", "--editable"})
_SPECIFIER = re.compile(r"(===|==|~=|!=|<=|>=|<|>)")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # a carriage return would begin a line of its own for uv
# uv also takes an address that ends with .git for a repository.
_REPOSITORY = re.compile(r"(?:git|hg|svn|bzr)\+|[^\s?#]*\.git/*(?:[@?#]|$)", re.IGNORECASE)


class BadRequirement(ValueError):
    """``where`` is a file and a line; empty for a list of packages."""

    def __init__(self, message: str, hint: str, where: str = "") -> None:
        super().__init__(message)
        self.message = f"{where}: {message}" if where else message
        self.hint = hint


@dataclass(slots=True)
class Found:
    requirements: list[str] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)
    index_url: str | None = None
    extra_index_url: list[str] = field(default_factory=list)
    find_links: list[str] = field(default_factory=list)
    no_index: bool = False


def read_requirements(file: str, read: Callable[[str], str], inside: Sequence[str] = ()) -> Found:
    """``read`` gives the text of a file; included files must be in its folder, or below one of ``inside``."""
    reading = _Reading(read, (posixpath.dirname(file), *inside))
    reading.follow(file, is_constraint=False)
    return reading.found


def read_constraints(file: str, read: Callable[[str], str], inside: Sequence[str] = ()) -> list[str]:
    reading = _Reading(read, (posixpath.dirname(file), *inside))
    reading.follow(file, is_constraint=True)
    return reading.found.constraints


def checked(line: str, where: str = "") -> str:
    """One requirement, as every node understands it."""
    if _CONTROL.search(line):
        raise BadRequirement(f"not a package: {_brief(line)}", "remove its control characters", where)
    if "${" in line:
        hint = "write the address as it is; a password belongs into index_url, as ${NAME}"
        raise BadRequirement(f"a variable in a package is not replaced: {_brief(line)}", hint, where)
    found = _NAME.fullmatch(line)
    rest = found[3] if found else ""
    is_file = line.split(None, 1)[0].endswith((".whl", ".tar.gz", ".zip"))
    if found is None or is_file or line.startswith("file:") or not _follows_a_name(rest):
        if re.match(r"https?://", line):
            raise BadRequirement(f"an address without a name: {_brief(line)}", "write it as NAME @ https://…", where)
        if _is_path(line):
            raise _local(line, where)
        raise BadRequirement(f"not a package: {_brief(line)}", "for example: torch==2.13.0", where)
    if rest.startswith("@"):
        _check_address(line, where)
    return line


def address_in(line: str) -> tuple[str, str | None]:
    """A requirement's name, and the address that it is taken from, if it has one."""
    found = _NAME.fullmatch(line)
    words = found[3][1:].split() if found and found[3].startswith("@") else []
    return (found[1] if found else line), (words[0] if words else None)


def project(line: str) -> str:
    """The package's name, as indexes compare it."""
    found = _NAME.match(line)
    return normal(found[1]) if found else line


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class _Reading:
    def __init__(self, read: Callable[[str], str], inside: Sequence[str]) -> None:
        self.found = Found()
        self._read = read
        self._inside = [posixpath.normpath(folder) for folder in inside]
        self._seen: set[tuple[str, bool]] = set()
        self._lines = 0

    def follow(self, file: str, *, is_constraint: bool) -> None:
        if (file, is_constraint) in self._seen:
            return
        self._seen.add((file, is_constraint))
        if len(self._seen) > _MOST_FILES:
            raise BadRequirement(f"more than {_MOST_FILES} files include each other", "put them into one file", file)
        for number, line in logical_lines(self._read(file)):
            self._lines += 1
            if self._lines > _MOST_LINES:
                raise BadRequirement(f"more than {_MOST_LINES} lines", "is it a requirements file?", file)
            where = f"{posixpath.basename(file)}:{number}"
            if line.startswith("-"):
                self._option(line, file, where, is_constraint)
            else:
                (self.found.constraints if is_constraint else self.found.requirements).append(checked(line, where))

    def _option(self, line: str, file: str, where: str, is_constraint: bool) -> None:
        split = _OPTION.fullmatch(line)
        name, value = (split[1], split[2].strip().strip("'\"")) if split else (line, "")
        short = next((one for one in ("-r", "-c", "-i", "-f", "-e") if line.startswith(one) and line[1] != "-"), None)
        if short is not None:  # pip also takes -rfile.txt
            name, value = short, line[2:].strip().strip("'\"")
        if name in _EDITABLE:
            hint = "remove the line: the job's code is sent with the job, and is not part of an environment"
            raise BadRequirement("an editable package is a folder of this machine", hint, where)
        if name in _INCLUDES:
            included = self._included(value, file, where)
            self.follow(included, is_constraint=is_constraint or _INCLUDES[name] == "c")
        elif name in _SOURCES:
            self._source(_SOURCES[name], value, file)
        elif name == "--no-index":
            self.found.no_index = True
        elif name not in _IGNORED:
            raise BadRequirement(f"the option {_brief(name)} is not supported", "remove it", where)

    def _included(self, value: str, file: str, where: str) -> str:
        if "://" in value:
            raise BadRequirement("an included file must be on this machine", "download it into the folder", where)
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), value))
        if not any(path.startswith(f"{folder}/") for folder in self._inside):
            hint = "move it into the job's folder"
            raise BadRequirement(f"{value} is outside the folder of the job", hint, where)
        return path

    def _source(self, kind: str, value: str, file: str) -> None:
        if kind == "index":
            self.found.index_url = value
        elif kind == "extra":
            self.found.extra_index_url.append(value)
        else:
            is_address = "://" in value
            folder = posixpath.normpath(posixpath.join(posixpath.dirname(file), value))
            self.found.find_links.append(value if is_address else folder)


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Without comments; lines that end with a backslash are joined. With the number of the first."""
    begun: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), start=1):
        first = first if begun else number
        is_continued = line.endswith("\\")
        begun.append(re.sub(r"(?s)(^|\s)#.*", "", line.removesuffix("\\")).strip())
        if not is_continued:
            joined = " ".join(part for part in begun if part)
            begun = []
            if joined:
                yield first, joined
    if joined := " ".join(part for part in begun if part):
        yield first, joined


def _follows_a_name(rest: str) -> bool:
    return not rest or rest.startswith(("@", ";", "(", "--hash", ",")) or _SPECIFIER.match(rest) is not None


def _is_path(line: str) -> bool:
    return "/" in line or line.endswith((".whl", ".tar.gz", ".zip")) or line.startswith((".", "~"))


def _check_address(line: str, where: str) -> None:
    what, address = address_in(line)
    if address is None or address.lower().startswith("file:") or "://" not in address:
        raise _local(line, where)
    if _REPOSITORY.match(address):
        hint = "name a release of it, or a wheel: NAME @ https://….whl"
        raise BadRequirement(f"{what} is taken from a repository, which no hash can check", hint, where)
    if not re.match(r"https?://", address, re.IGNORECASE):
        hint = "write it as NAME @ https://…"
        raise BadRequirement(f"the address of {what} does not start with https:// or http://", hint, where)
    if without_passwords(address) != address:
        hint = "put the password into index_url, as ${NAME}"
        raise BadRequirement(f"the address of {what} has a password in it", hint, where)


def _local(line: str, where: str) -> BadRequirement:
    hint = "name the package, and put the wheel's folder into find_links"
    return BadRequirement(f"a path of this machine, which the nodes do not have: {_brief(line)}", hint, where)


def _brief(text: str) -> str:
    shown = without_passwords(text)
    shown = "".join(letter if letter.isprintable() else "?" for letter in shown)
    return shown if len(shown) <= 60 else f"{shown[:59]}…"


# --- lock file --------------------------------------------------------------------------------------------------------
# Lock files: which kind a text is, its indexes, and the packages of a ``pylock.toml`` as requirements with hashes.


UV_LOCK = "uv.lock"
PYLOCK = "pylock.toml"
_PYPI = "https://pypi.org/simple"
_HASH = re.compile(r"[0-9a-f]{64}")
_LOCK_FILE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9.!+_-]{1,100}")


def kind_of_lock(text: str) -> str:
    """Raises BadRequirement if it is neither."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadRequirement(f"not valid TOML: {error}", "name a uv.lock or a pylock.toml") from error
    if "lock-version" in found:
        return PYLOCK
    if isinstance(found.get("version"), int) and ("package" in found or "requires-python" in found):
        return UV_LOCK
    raise BadRequirement("not a lock file", "name a uv.lock or a pylock.toml")


def lock_indexes(text: str, named: Iterable[str] = ()) -> tuple[str, ...]:
    """The indexes on the web that its packages were found in. Not PyPI: that is the default, which may be replaced.

    ``named``: addresses that are used anyway. They may have a login, which a lock does not have.
    """
    found = tomllib.loads(text)
    packages = [*_maps(found.get("package")), *_maps(found.get("packages"))]
    addresses = [address for package in packages if (address := _index(package)).startswith(("https://", "http://"))]
    for address in addresses:
        if "${" in address or re.search(r"[\s,]", address):
            hint = "write the index's address as it is, and lock again"
            raise BadRequirement("the address of an index has a variable, a space or a comma in it", hint)
    known = {_PYPI, *(without_userinfo(one).rstrip("/") for one in named)}
    return tuple(one for one in dict.fromkeys(addresses) if one.rstrip("/") not in known)


def _index(package: Mapping[str, Any]) -> str:
    source = package.get("source")  # of a uv.lock
    named = source.get("registry") if isinstance(source, Mapping) else package.get("index")
    return named if isinstance(named, str) else ""


def pylock_requirements(text: str) -> tuple[str, ...]:
    packages = tomllib.loads(text).get("packages", [])
    if not isinstance(packages, list):
        raise BadRequirement("packages is not a list", "write it again: uv export --format pylock.toml")
    return tuple(_line(package) for package in packages if isinstance(package, dict))


def _line(package: Mapping[str, Any]) -> str:
    name, version, marker = (str(package.get(key, "")) for key in ("name", "version", "marker"))
    hint = "write the file without it, or use a requirements file"
    if not _LOCK_FILE_NAME.fullmatch(name):
        raise BadRequirement(f"not a package's name: {name[:60]!r}", hint)
    for place in ("vcs", "directory", "archive"):
        if place in package:
            raise BadRequirement(f"{name} comes from a {place}, not from a package index", hint)
    if re.search(r"\b(extras|dependency_groups)\b", marker) or "\n" in marker:
        raise BadRequirement(f"{name} depends on an extra or a group", hint)
    hashes = sorted(set(_hashes(package)))
    if not _VERSION.fullmatch(version) or not hashes:
        raise BadRequirement(f"{name} has no version or no hashes", hint)
    condition = f" ; {marker}" if marker else ""
    return checked(f"{name}=={version}{condition} {' '.join(f'--hash=sha256:{one}' for one in hashes)}")


def _hashes(package: Mapping[str, Any]) -> Iterator[str]:
    files = [*_maps(package.get("wheels")), *_maps([package.get("sdist")])]
    for file in files:
        hashes = file.get("hashes")
        found = hashes.get("sha256") if isinstance(hashes, Mapping) else None
        if isinstance(found, str) and _HASH.fullmatch(found):
            yield found


def _maps(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


# --- pinned -----------------------------------------------------------------------------------------------------------
# Resolved requirements as text: every package with its version and the hashes of its files.


_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*===?\s*([^\s;,]+)")
_PINNED_HASH = re.compile(r"--hash[= ](sha256:[0-9a-f]{64})")


def with_given_hashes(resolved: str, given: Iterable[str]) -> str:
    """Where somebody has given hashes for a version, only files with these are accepted, whatever the index has now."""
    known = {pin: hashes for line in given if (pin := _pin(line)) and (hashes := _PINNED_HASH.findall(line))}
    if not known:
        return resolved
    lines = []
    for _, line in logical_lines(resolved):
        accepted = known.get(_pin(line) or ("", ""), [])
        bare = line.partition(" --hash")[0]
        lines.append(f"{bare} {' '.join(f'--hash={one}' for one in accepted)}" if accepted else line)
    return "".join(f"{line}\n" for line in lines)


def versions(resolved: str) -> list[tuple[str, str]]:
    """Name and version of each package."""
    return [pin for _, line in logical_lines(resolved) if (pin := _pin(line)) is not None]


def _pin(line: str) -> tuple[str, str] | None:
    found = _PIN.match(line)
    return (normal(found[1]), found[2]) if found else None


# --- wheels only ------------------------------------------------------------------------------------------------------
# What holds for packages that somebody chose who does not have the agent's account: they are wheels, from the web.
#
# A package without a wheel would have to be built to be resolved, and building runs its code on the agent's machine.
# And uv reads any file that an index or a package refers to: with the agent's account, a wheel of the owner's own.


HINT = (
    "build a wheel of it and name where that can be downloaded (index_url, find_links), "
    "or use an environment that the nodes have: existing"
)
_WHEELS_ONLY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# What uv says of a package that it was not allowed to build.
_SAID = (
    re.compile(r"[Ww]heels are required for `([^`\s]+)`"),
    re.compile(r"[Bb]uilding source distributions for `([^`\s]+)` is disabled"),
)


def without_wheel(name: str) -> str:
    return f"{name} has no wheel, and the agent builds no packages for others than its owner"


def source_archive(lines: Iterable[str]) -> str | None:
    """The first package that is taken from an address which is not that of a wheel."""
    for line in lines:
        name, address = address_in(line)
        if address is not None and not _is_wheel(address):
            return name
    return None


def unbuilt(said: str) -> str | None:
    """The package without a wheel, from what uv said when it failed."""
    text = " ".join(said.split())  # uv breaks its lines
    before, sentence, _ = text.partition(" has no usable wheels")
    name = _WHEELS_ONLY_NAME.search(before.rpartition(" ")[2]) if sentence else None
    return name[0] if name else next((found[1] for pattern in _SAID if (found := pattern.search(text))), None)


def requirements_from_web(lock: str, folders: Sequence[str]) -> str:
    """What uv resolved, as pinned requirements with hashes. Raises BadRequirement.

    ``lock``: a pylock.toml, which says of each file where it is. ``folders``: of this machine, which the owner allows.
    """
    packages = tomllib.loads(lock).get("packages", [])
    return "".join(f"{checked(_wheels_only_line(package, folders))}\n" for package in packages)


def _wheels_only_line(package: Mapping[str, Any], folders: Sequence[str]) -> str:
    name, files = package["name"], package.get("wheels", [])
    what = f"{name}=={package.get('version', '')}"
    if (archive := package.get("archive")) is not None:
        files, what = [archive], f"{name} @ {archive.get('url', '')}"
    if not files:
        raise BadRequirement(without_wheel(name), HINT)
    if not all(_may_be_read(file.get("url", ""), folders) for file in files):
        raise BadRequirement(f"{name} is a file of the agent's machine", "name an index that has the package itself")
    hashes = sorted({file["hashes"]["sha256"] for file in files if "sha256" in file.get("hashes", {})})
    condition = f" ; {package['marker']}" if "marker" in package else ""
    return " ".join((f"{what}{condition}", *(f"--hash=sha256:{one}" for one in hashes)))


def _may_be_read(address: str, folders: Sequence[str]) -> bool:
    parts = urlsplit(address)
    if parts.scheme in ("http", "https"):
        return True
    path = posixpath.normpath(unquote(parts.path))
    return parts.scheme == "file" and any(path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _is_wheel(address: str) -> bool:
    try:
        return urlsplit(address).path.endswith(".whl")
    except ValueError:
        return False

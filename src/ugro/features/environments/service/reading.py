"""Reads the files that an ``environment`` names, when a job is submitted: later edits do not change the job."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ugro.features.environments.config import FILES, EnvironmentSection, expanded, variables_in, without_password
from ugro.features.environments.model import EnvOverride, EnvRequest, Whose
from ugro.features.environments.rules.requirements import (
    PYLOCK,
    UV_LOCK,
    BadRequirement,
    Found,
    checked,
    kind_of_lock,
    lock_indexes,
    pylock_requirements,
    read_constraints,
    read_requirements,
)
from ugro.kernel.access.caller import caller, may_read_files
from ugro.kernel.config.kinds import BadValueError
from ugro.kernel.config.load import MAX_FILE_BYTES, read_text
from ugro.kernel.config.schema import Config
from ugro.kernel.files.client_files import remote_client
from ugro.kernel.jobs.config.file import Draft
from ugro.kernel.support.errors import ConfigError

T = TypeVar("T")
_PROJECT = "pyproject.toml"
_NONE = EnvironmentSection()
_WEB = ("http://", "https://")
_SPLITS = re.compile(r"[\s,]")  # what uv and pip separate addresses by: behind it, a folder could follow
_CHOOSES_NOTHING = frozenset({"upgrade", "enabled"})


def read_request(
    section: EnvironmentSection, inside: Sequence[Path], read: Callable[[str], str] | None = None
) -> EnvRequest | None:
    """None: the job runs in the node's own Python. Blocks. Raises BadValueError, at a key of the section.

    The section's paths are whole. ``inside``: folders whose files may be included. ``read``: another way to a file's
    text than from this machine's disk.
    """
    read = read or _read
    if not section.enabled or not section.names_packages:
        return None
    if section.existing is not None:
        return EnvRequest(python=section.python, existing=section.existing)
    if section.project is not None and section.lock is None:
        raise BadValueError("there is no lock", hint="name the uv.lock that belongs to it", at=("project",))
    if section.no_index and not section.find_links:
        raise BadValueError("there are no packages then", hint="name folders in find_links", at=("no_index",))
    folders = [str(folder) for folder in inside]
    found = _at("requirements", lambda: _requirements(section, folders, read))
    packages = [_at("packages", partial(checked, line)) for line in section.packages]
    request = EnvRequest(
        python=section.python,
        requirements=(*found.requirements, *packages),
        constraints=(*found.constraints, *_at("constraints", lambda: _constraints(section, folders, read))),
        index_url=section.index_url or found.index_url,
        extra_index_url=(*section.extra_index_url, *found.extra_index_url),
        find_links=(*section.find_links, *found.find_links),
        overrides=tuple(_overrides(section)),
        offline=section.offline,
        no_index=section.no_index or found.no_index,
        upgrade=section.upgrade,
    )
    return request if section.lock is None else _at("lock", lambda: _locked(request, section, read))


def environment_of(draft: Draft, here: Path, config: Config, old: EnvRequest | None = None) -> EnvRequest | None:
    """Of a job, with the cluster file's where it has none of its own. Blocks. Raises ConfigError.

    ``here``: the submitter's current folder. ``old``: of the job that this one is made from, in a browser; the places
    that it named may be named again, and no other files. Variables in addresses have no values yet.
    """
    own, default = draft.section.environment, config.environment
    if own == _NONE and default == _NONE:
        return None
    folder = here / draft.workdir
    common = default.located(lambda key: config.path.parent if config.path is not None else folder)

    def base(key: str) -> Path:
        return here if ("environment", key) in draft.given.values else folder

    offer = remote_client()
    if offer is None and not may_read_files():
        refuse_files(draft)
    read = (lambda file: offer.text(file)) if offer is not None and own.names_packages else None
    own = own.located(base)
    try:
        request = read_request(own.over(common), [folder], read)
    except BadValueError as error:
        if own.names_packages:
            draft.refuse(("environment", *error.at), error.message, error.hint)
        key = ".".join(map(str, ("environment", *error.at)))
        raise ConfigError(f"{config.path}: {key}: {error.message}", hint=error.hint) from error
    if request is None:
        return None
    # The cluster file is the owner's: what it names may be used.
    known = common.addresses if config.path is not None else default.addresses
    # Of the request as it is in the end: a file that it names can name sources, too.
    chosen = request.addresses if own.names_packages else own.addresses
    _refuse_places(draft, own, [one for one in chosen if one not in known], old)
    whose, asks = _whose(own, request, config), caller()
    return replace(request, whose=whose, user=asks.user if asks is not None and whose is Whose.OTHER else "")


def _refuse_places(draft: Draft, own: EnvironmentSection, chosen: Sequence[str], old: EnvRequest | None) -> None:
    for address in chosen:
        if (problem := _problem_of(address, old)) is not None:
            draft.refuse(("environment", _key_of(own, address)), *problem)


def _problem_of(address: str, old: EnvRequest | None) -> tuple[str, str] | None:
    """Why a place that the submitter names cannot be used, and a hint.

    A client on another machine means its own folders, which are not here. Those that are here the agent would read
    with its own account.
    """
    if remote_client() is not None and "://" not in address:
        return "a folder of another machine cannot be used", "name an address"
    is_of_owner = may_read_files()
    if (is_of_owner and old is None) or (old is not None and address in old.addresses):
        return None
    if not address.startswith(_WEB):
        return "a folder of this machine cannot be named here", "name an address that starts with https:// or http://"
    if not is_of_owner and _SPLITS.search(address):
        return "an address has a space or a comma in it", "write it as addresses do: %20, %2C"
    return None


def _key_of(own: EnvironmentSection, address: str) -> str:
    """Where it was named."""
    if address in own.find_links:
        return "find_links"
    if address in (own.index_url, *own.extra_index_url):
        return "index_url" if address == own.index_url else "extra_index_url"
    if address in own.addresses:
        return "overrides"
    return "lock" if own.lock is not None else "requirements"


def _whose(own: EnvironmentSection, request: EnvRequest, config: Config) -> Whose:
    if may_read_files():
        return Whose.OWNER
    # A variable has the submitter's value: with it, they choose the address.
    is_default = not ({*own.given_keys, *own.written()} - _CHOOSES_NOTHING) and not variables_in(request)
    return Whose.CLUSTER if is_default and config.path is not None else Whose.OTHER


def refuse_files(draft: Draft) -> None:
    """Of a job file from elsewhere, such as a browser: it names no files of this machine."""
    section = draft.section.environment
    for key in FILES:
        value = getattr(section, key)
        if value is not None and "\n" not in value:
            draft.refuse(("environment", key), "a file of this machine cannot be named here", "list the packages")


def with_variables(request: EnvRequest | None, env: Mapping[str, str]) -> EnvRequest | None:
    """With the values of the variables in its addresses. Raises ConfigError if one is missing."""
    for name in variables_in(request) if request else ():
        if not env.get(name):
            text = f"environment: an address needs the variable {name}, which has no value here"
            raise ConfigError(text, hint=f"set it where you submit: export {name}=…")
    if request is None:
        return None
    found = expanded(request, env)
    if request.is_foreign:
        _check_values(request, found)
    return found


def _check_values(before: EnvRequest, after: EnvRequest) -> None:
    """A value must not make a second address, or another variable, which uv would replace with one of the agent's."""
    for written, address in zip(before.addresses, after.addresses, strict=True):
        if "${" in address or (address != written and _SPLITS.search(address)):
            text = "environment: a variable of an address has a space, a comma or ${ in its value"
            raise ConfigError(text, hint="write it as addresses do: %20, %2C, %24%7B")


def with_old_passwords(request: EnvRequest | None, old: EnvRequest | None) -> EnvRequest | None:
    """The addresses that a job file has without their passwords, as the job had them that it was written from."""
    if request is None or old is None:
        return request
    known = {without_password(address): address for address in old.addresses}
    return request.with_addresses(lambda address: known.get(address, address))


def _requirements(section: EnvironmentSection, inside: Sequence[str], read: Callable[[str], str]) -> Found:
    if section.requirements is None:
        return Found()
    file, read = _text(section.requirements, "requirements.txt", read)
    return read_requirements(file, read, inside)


def _constraints(section: EnvironmentSection, inside: Sequence[str], read: Callable[[str], str]) -> list[str]:
    if section.constraints is None:
        return []
    file, read = _text(section.constraints, "constraints.txt", read)
    return read_constraints(file, read, inside)


def _overrides(section: EnvironmentSection) -> list[EnvOverride]:
    found = []
    for label, one in section.overrides.items():
        lines = [_at("overrides", partial(checked, line)) for line in one.packages]
        found.append(EnvOverride(label, tuple(lines), one.index_url, one.extra_index_url))
    return found


def _locked(request: EnvRequest, section: EnvironmentSection, read_file: Callable[[str], str]) -> EnvRequest:
    assert section.lock is not None
    file, read = _text(section.lock, UV_LOCK, read_file)
    text = read(file)
    kind = kind_of_lock(text)
    if not request.no_index:
        own = lock_indexes(text, request.places)
        request = replace(request, extra_index_url=(*request.extra_index_url, *own))
    if kind == PYLOCK:
        return replace(request, requirements=pylock_requirements(text))
    project, read = _text(section.project or str(Path(file).with_name(_PROJECT)), _PROJECT, read_file)
    return replace(request, lock=text, lock_name=kind, project=read(project))


def _text(value: str, name: str, read: Callable[[str], str]) -> tuple[str, Callable[[str], str]]:
    """A file and how to read it; a text of several lines stands for the file itself."""
    if "\n" in value:
        return name, lambda file: value
    return value, read


def _read(file: str) -> str:
    path = Path(file)
    if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
        hint = "export what the job needs: uv export --no-dev -o requirements.txt"
        raise BadRequirement(f"{path.name} is larger than 1 MiB", hint)
    return read_text(path)


def _at(key: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except BadRequirement as error:
        raise BadValueError(error.message, hint=error.hint, at=(key,)) from error
    except ConfigError as error:  # a file that cannot be read
        raise BadValueError(error.message, hint=error.hint, at=(key,)) from error

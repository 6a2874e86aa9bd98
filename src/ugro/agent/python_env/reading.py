"""Reads the files that an ``environment`` names, when a job is submitted: later edits do not change the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ugro.agent.support.caller import may_read_files
from ugro.agent.support.client_files import remote_client
from ugro.config.job.file import Draft
from ugro.config.kinds import BadValueError
from ugro.config.load import MAX_FILE_BYTES, read_text
from ugro.config.python_env import FILES, EnvironmentSection, expanded, variables_in, without_password
from ugro.config.schema import Config
from ugro.core.errors import ConfigError
from ugro.core.python_env import EnvOverride, EnvRequest
from ugro.policy.python_env.lock_file import PYLOCK, UV_LOCK, kind_of_lock, pylock_requirements
from ugro.policy.python_env.requirements import (
    BadRequirement,
    Found,
    checked,
    read_constraints,
    read_requirements,
)

T = TypeVar("T")
_PROJECT = "pyproject.toml"
_NONE = EnvironmentSection()


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


def environment_of(draft: Draft, here: Path, config: Config) -> EnvRequest | None:
    """Of a job, with the cluster file's where it has none of its own. Blocks. Raises ConfigError.

    ``here``: the submitter's current folder. Variables in addresses have no values yet.
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
        refuse_files(draft, None)
    read = (lambda file: offer.text(file)) if offer is not None and own.names_packages else None
    if offer is not None and any("://" not in link for link in own.find_links):
        draft.refuse(("environment", "find_links"), "a folder of another machine cannot be used", "name an address")
    try:
        return read_request(own.located(base).over(common), [folder], read)
    except BadValueError as error:
        if own.names_packages:
            draft.refuse(("environment", *error.at), error.message, error.hint)
        key = ".".join(map(str, ("environment", *error.at)))
        raise ConfigError(f"{config.path}: {key}: {error.message}", hint=error.hint) from error


def refuse_files(draft: Draft, old: EnvRequest | None) -> None:
    """Of a job file from elsewhere, such as a browser: it names no files of this machine that the old job did not."""
    section = draft.section.environment
    for key in FILES:
        value = getattr(section, key)
        if value is not None and "\n" not in value:
            draft.refuse(("environment", key), "a file of this machine cannot be named here", "list the packages")
    known = old.places if old is not None else ()
    places = {"index_url": (section.index_url or "",), "extra_index_url": section.extra_index_url}
    for key, links in {**places, "find_links": section.find_links}.items():
        if any(link and not link.startswith(("http://", "https://")) and link not in known for link in links):
            draft.refuse(("environment", key), "a folder of this machine cannot be named here", "remove it")


def with_variables(request: EnvRequest | None, env: Mapping[str, str]) -> EnvRequest | None:
    """With the values of the variables in its addresses. Raises ConfigError if one is missing."""
    for name in variables_in(request) if request else ():
        if not env.get(name):
            text = f"environment: an address needs the variable {name}, which has no value here"
            raise ConfigError(text, hint=f"set it where you submit: export {name}=…")
    return expanded(request, env) if request else None


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

"""``/settings``: the configuration in force and the channels; ``/about``: versions and licences."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from fastapi import FastAPI, Request, Response

from ugro.features.alerts.config import LOG, AlertSection
from ugro.kernel.config.kinds import flow
from ugro.kernel.config.schema import Config
from ugro.kernel.config.section import Key, Section
from ugro.kernel.support.secrets import masked, without_passwords
from ugro.web.site import Site

_DEPENDENCIES = ("fastapi", "starlette", "uvicorn", "h11", "jinja2", "pydantic", "click", "PyYAML")


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    value: str
    default: str
    meaning: str
    is_changed: bool


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    meaning: str
    settings: list[Setting]

    @property
    def changed(self) -> int:
        return sum(setting.is_changed for setting in self.settings)


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    version: str
    licence: str


def add_settings_pages(app: FastAPI, site: Site) -> None:
    @app.get("/settings")
    async def settings(request: Request) -> Response:
        config = site.agent.cluster.config
        return await site.render(
            request,
            "settings.html",
            cli="ugro agent status",
            groups=list(groups(config)),
            nodes=[(spec, masked(spec.env)) for spec in config.nodes],
            # Without addresses, which may be secret.
            channels=[(LOG, "the agent's log"), *((name, one.type) for name, one in config.channels.items())],
            alert_channels=config.section(AlertSection).channels,
            token_file=site.agent.home.path / "dashboard.token",
            is_encrypted=config.dashboard.certificate_file is not None,
        )

    @app.get("/about")
    async def about(request: Request) -> Response:
        return await site.render(
            request,
            "about.html",
            cli="ugro --version",
            python=platform.python_version(),
            system=platform.platform(),
            packages=list(_packages()),
        )


def groups(config: Config) -> Iterator[Group]:
    yield Group("", "", [_setting(config, "remote_root")])
    for name, section in config.sections().items():
        own: Section = getattr(config, name)
        yield Group(name, section.__doc__ or "", [_setting(own, key) for key in section.known_keys()])


def _setting(section: Section, key: str) -> Setting:
    declared = section.known_keys()[key]
    value, default = getattr(section, key), declared.default
    is_changed = flow(value) != flow(default)
    return Setting(key, _shown(declared, value), _shown(declared, default), declared.meaning, is_changed)


def _shown(declared: Key, value: object) -> str:
    """With its unit. An index's address may hold a password."""
    return flow(value) if value is None else without_passwords(declared.kind.described(value))


def _packages() -> Iterator[Package]:
    for name in _DEPENDENCIES:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        yield Package(found.metadata["Name"], found.version, _licence(found))


def _licence(found: Distribution) -> str:
    """From the package's metadata: an expression, a line of text, or a classifier."""
    stated = _field(found, "License-Expression") or _field(found, "License")
    if stated and "\n" not in stated.strip():
        return stated.strip()
    classified = [one for one in found.metadata.get_all("Classifier") or () if one.startswith("License ::")]
    return classified[0].rpartition(":: ")[2] if classified else "unknown"


def _field(found: Distribution, key: str) -> str:
    values = found.metadata.get_all(key)
    return str(values[0]) if values else ""

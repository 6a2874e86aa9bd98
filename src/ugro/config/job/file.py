"""From a job file, the options of a command, or both, to one ``JobSpec``, or one error that says where to look.

Options go over the file. It submits nothing, and compares with no cluster.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ugro.config.document import Document, compose, read_document
from ugro.config.job.flags import Given, read_flags, with_flags
from ugro.config.job.schema import JobSection
from ugro.config.kinds import BadValueError, Environment
from ugro.config.load import read_text
from ugro.config.problems import KeyPath, Problem, config_error
from ugro.config.validate import validated
from ugro.config.yamltext import escaped, shown
from ugro.core.errors import ConfigError, NotFound
from ugro.core.job import After, JobSpec

JOB_FILE = "job.yaml"
_EXAMPLE = "for example: script: train.py"

Resolve = Callable[[str], int]  # from a job's name to its id; raises NotFound


@dataclass(frozen=True, slots=True)
class Request:
    """A job as it is to be submitted. ``workdir`` is on this machine: the directory whose code it runs."""

    spec: JobSpec
    workdir: Path
    is_workdir_given: bool = False
    sends_code: bool = True


def load_job(
    path: Path, *, overrides: Mapping[str, object], env: Mapping[str, str], resolve: Resolve | None = None
) -> JobSpec:
    return read_job(path, fields=overrides, env=env, resolve=resolve).spec


def job_from_fields(
    fields: Mapping[str, object], *, env: Mapping[str, str], resolve: Resolve | None = None
) -> JobSpec:
    return read_job(None, fields=fields, env=env, resolve=resolve).spec


def read_job(
    path: Path | None, *, fields: Mapping[str, object], env: Mapping[str, str], resolve: Resolve | None = None
) -> Request:
    """``fields`` are options, named as ``jobflags`` says; ``env`` is the submitter's environment."""
    return draft_job(path, fields=fields).request(env, resolve)


def parse_job(
    text: str, path: Path, *, fields: Mapping[str, object], env: Mapping[str, str], resolve: Resolve | None = None
) -> Request:
    given = read_flags(fields)
    return _draft(_Source(given, path, _document(text, escaped(str(path))))).request(env, resolve)


def draft_job(path: Path | None, *, fields: Mapping[str, object]) -> Draft:
    """A job that is judged by itself: what it still needs of its submitter and of the agent can be asked for."""
    given = read_flags(fields)
    if path is None:
        return _draft(_Source(given))
    return _draft(_Source(given, path, _document(_text(path), escaped(str(path)))))


def _draft(source: _Source) -> Draft:
    section = validated(JobSection, source.tree, (), source.document, source.problems)
    source.refuse_problems()
    assert section is not None, "what is not valid has a problem"
    return Draft(source, section)


@dataclass(slots=True)
class Draft:
    source: _Source
    section: JobSection

    @property
    def wanted_variables(self) -> tuple[str, ...]:
        """Environment variables whose values must come from the submitter."""
        return tuple(name for name, text in self.section.env.items() if text is None)

    @property
    def named_jobs(self) -> tuple[str, ...]:
        """Jobs that it comes after and names: their ids are to be found."""
        after = self.section.after
        return tuple(job for job in (*after.ok, *after.any) if isinstance(job, str))

    def request(self, env: Mapping[str, str], resolve: Resolve | None) -> Request:
        source, section = self.source, self.section
        variables = source.variables(section, env)
        after = After(
            ok=source.ids(("after", "ok"), section.after.ok, resolve),
            any=source.ids(("after", "any"), section.after.any, resolve),
        )
        source.refuse_problems()
        spec = section.spec(variables, after)
        return Request(spec, source.workdir(section), section.workdir is not None, section.sync)


@dataclass(slots=True)
class _Source:
    """A job's keys before they are judged, and where each came from."""

    given: Given
    path: Path | None = None
    document: Document = field(default_factory=Document)
    tree: dict[str, object] = field(init=False)
    problems: list[Problem] = field(init=False)

    def __post_init__(self) -> None:
        self.problems = list(self.document.problems)
        self.tree = with_flags(self.document.tree if isinstance(self.document.tree, dict) else {}, self.given)

    def variables(self, section: JobSection, env: Mapping[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, text in section.env.items():
            value = env.get(name, "") if text is None else text
            if text is None and not value:
                hint = f"give it with the submit: --env {name}=VALUE, or export {name}"
                self._note(("env", name), "it has no value here, and none is set in this environment", hint)
                continue
            try:
                found |= Environment().parse({name: value})
            except BadValueError as error:
                self._note(("env", name), error.message, error.hint)
        return found

    def ids(self, path: KeyPath, jobs: tuple[int | str, ...], resolve: Resolve | None) -> tuple[int, ...]:
        found: dict[int, None] = {}  # a job may be given by its id and by its name
        for index, job in enumerate(jobs):
            if isinstance(job, int):
                found[job] = None
            elif resolve is None:
                self._note((*path, index), f"expected a job's id, got the name {job}", "see: ugro status")
            else:
                try:
                    found[resolve(job)] = None
                except NotFound as error:
                    self._note((*path, index), error.message, error.hint)
        return tuple(found)

    def workdir(self, section: JobSection) -> Path:
        """A relative one is seen from where it was written: from the file, or from where the command runs."""
        here = Path() if self.path is None or ("workdir",) in self.given.values else self.path.parent
        return here / (section.workdir or "")

    def refuse_problems(self) -> None:
        blamed = [problem for problem in self.problems if self.path is None or problem.key in self.given.names]
        if blamed:
            first = blamed[0]
            name = self.given.names.get(first.key, first.key)
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise ConfigError(f"{name}: {first.message}{more}" if name else f"{first.message}{more}", hint=first.hint)
        if self.problems:
            raise config_error(escaped(str(self.path)), self.problems)

    def _note(self, path: KeyPath, message: str, hint: str | None) -> None:
        self.problems.append(self.document.problem(path, message, hint))


def _text(path: Path) -> str:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"{escaped(str(path))}: not a file", hint=f"name the file itself, such as {path / JOB_FILE}")
    return read_text(path)


def _document(text: str, file: str) -> Document:
    if compose(text, file) is None:
        raise ConfigError(f"{file}:1: the file is empty", hint=_EXAMPLE)
    document = read_document(text, file)
    if not isinstance(document.tree, dict):
        message = f"expected a map of keys to values, got {shown(document.tree)}"
        raise config_error(file, [Problem(1, "", message, _EXAMPLE)])
    return document

"""From a job file, the options of a command, or both, to one ``JobSpec``, or one error that says where to look.

Options override the file. This module submits nothing, and compares with no cluster.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ugro.config.document import Document, compose, read_document
from ugro.config.job.options import Given, read_options
from ugro.config.job.schema import JobSection
from ugro.config.kinds import BadValueError, Environment
from ugro.config.load import read_text
from ugro.config.problems import KeyPath, Problem, config_error
from ugro.config.yamltext import escaped, shown
from ugro.core.errors import ConfigError, NotFound
from ugro.core.job import After, JobSpec

JOB_FILE = "job.yaml"
_EXAMPLE = "for example: script: train.py"

Resolve = Callable[[str], int]  # from a job's name to its id; raises NotFound


def draft_job(path: Path | None, *, fields: Mapping[str, object]) -> Draft:
    """``fields`` are options, named as ``ugro.config.job.options`` says."""
    given = read_options(fields)
    return _draft(given, None, Document()) if path is None else _parsed(_text(path), path, given)


def parse_job(text: str, path: Path, *, fields: Mapping[str, object]) -> Draft:
    return _parsed(text, path, read_options(fields))


def edited_job(text: str, given: Given) -> Draft:
    """From the text of a job file that was edited elsewhere, and fields that override it."""
    return _parsed(text, Path(JOB_FILE), given)


def _parsed(text: str, path: Path, given: Given) -> Draft:
    return _draft(given, path, _document(text, escaped(str(path))))


def _draft(given: Given, path: Path | None, document: Document) -> Draft:
    tree = given.over(document.tree if isinstance(document.tree, dict) else {})
    section = document.read(JobSection, tree)
    _refuse_problems(given, path, document)
    assert section is not None, "what is not valid has a problem"
    return Draft(given, path, document, section)


@dataclass(slots=True)
class Draft:
    """A valid job that may still need variables of its submitter, and ids of jobs that it names."""

    given: Given
    path: Path | None
    document: Document
    section: JobSection

    @property
    def wanted_variables(self) -> tuple[str, ...]:
        """Environment variables whose values must come from the submitter."""
        return tuple(name for name, text in self.section.env.items() if text is None)

    @property
    def named_jobs(self) -> tuple[str, ...]:
        """Jobs to wait for that are given by name."""
        after = self.section.after
        return tuple(job for job in (*after.ok, *after.any) if isinstance(job, str))

    @property
    def workdir(self) -> Path:
        """The directory here whose code the job runs. A relative path starts at the file, or where the command runs."""
        here = Path() if self.path is None or ("workdir",) in self.given.values else self.path.parent
        return here / (self.section.workdir or "")

    def folders(self, here: Path) -> dict[str, Path]:
        """The folders that it reads. A relative path starts at the file, or where the command runs (``here``)."""
        found = {}
        for name, path in self.section.folders.items():
            is_given = self.path is None or ("folders", name) in self.given.values
            found[name] = here / (Path() if is_given or self.path is None else self.path.parent) / path
        return found

    def refuse_changes(self, before: JobSection, keys: Iterable[str], reason: str) -> None:
        """Raises ConfigError if one of these keys is not as it was."""
        for name in keys:
            if getattr(self.section, name) != getattr(before, name):
                self.document.note((name,), reason)
        _refuse_problems(self.given, self.path, self.document)

    def refuse_lack(self, known: Iterable[str], message: str, hint: str) -> None:
        """Raises ConfigError if a variable without a value is not among the known ones."""
        for name in sorted(set(self.wanted_variables) - set(known)):
            self.document.note(("env", name), message, hint)
        _refuse_problems(self.given, self.path, self.document)

    def refuse(self, path: KeyPath, message: str, hint: str | None) -> NoReturn:
        """Raises ConfigError about a key that somebody else found wrong."""
        self.document.note(path, message, hint)
        _refuse_problems(self.given, self.path, self.document)
        raise AssertionError

    def spec(self, env: Mapping[str, str], resolve: Resolve | None = None) -> JobSpec:
        """``env`` is the submitter's environment."""
        after = self.section.after
        variables = self._variables(env)
        ids = After(
            ok=self._ids(("after", "ok"), after.ok, resolve), any=self._ids(("after", "any"), after.any, resolve)
        )
        _refuse_problems(self.given, self.path, self.document)
        return self.section.spec(variables, ids)

    def _variables(self, env: Mapping[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, text in self.section.env.items():
            value = env.get(name, "") if text is None else text
            if text is None and not value:
                hint = f"give it when you submit: --env {name}=VALUE, or export {name}"
                self.document.note(("env", name), "it has no value here, and none is set in your environment", hint)
                continue
            try:
                found |= Environment().parse({name: value})
            except BadValueError as error:
                self.document.note(("env", name), error.message, error.hint)
        return found

    def _ids(self, path: KeyPath, jobs: tuple[int | str, ...], resolve: Resolve | None) -> tuple[int, ...]:
        found: dict[int, None] = {}  # a job may be given by its id and by its name
        for index, job in enumerate(jobs):
            if isinstance(job, int):
                found[job] = None
            elif resolve is None:
                self.document.note((*path, index), f"expected a job's id, got the name {job}", "see: ugro status")
            else:
                try:
                    found[resolve(job)] = None
                except NotFound as error:
                    self.document.note((*path, index), error.message, error.hint)
        return tuple(found)


def _refuse_problems(given: Given, path: Path | None, document: Document) -> None:
    problems = document.problems
    first = next((problem for problem in problems if path is None or problem.key in given.names), None)
    if first is not None:
        name = given.names.get(first.key, first.key)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{name}: {first.message}{more}" if name else f"{first.message}{more}", hint=first.hint)
    if problems:
        raise config_error(escaped(str(path)), problems)


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

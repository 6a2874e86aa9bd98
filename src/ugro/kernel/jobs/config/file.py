"""From a job file, the options of a command, or both, to one ``JobSpec``, or one error that says where to look.

Options override the file. This module submits nothing, and compares with no cluster.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from ugro.kernel.config.document import Document, read_document
from ugro.kernel.config.kinds import BadValueError, Environment, escaped, flow, shown
from ugro.kernel.config.load import read_text
from ugro.kernel.config.section import KeyPath, Problem, config_error
from ugro.kernel.jobs.config.kinds import FILE_LIMITS, USE_A_FILE, why_too_large
from ugro.kernel.jobs.config.options import Given, read_options
from ugro.kernel.jobs.config.schema import JobSection
from ugro.kernel.jobs.model import After, JobSpec
from ugro.kernel.support.errors import ConfigError, NotFound

# --- from a job back to a file ----------------------------------------------------------------------------------------
# The file has the keys that are not defaults. Reading it gives the same job.


def job_file(spec: JobSpec) -> str:
    return yaml.safe_dump(JobSection.of_spec(spec).written(), sort_keys=False, allow_unicode=True, width=100)


def settings(spec: JobSpec) -> dict[str, str]:
    """The keys of its job file that are not defaults, such as ``resources.gpus_per_node``, as a user writes them.

    Without its name, command and variables, which are about this job alone.
    """
    written = JobSection.of_spec(spec).written()
    return dict(_flat("", {name: value for name, value in written.items() if name not in _ALONE}))


_ALONE = frozenset({"name", "command", "script", "args", "env", "sync"})


def _flat(prefix: str, written: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in written.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value if isinstance(value, str) else flow(value)


# --- from a file to a job ---------------------------------------------------------------------------------------------


JOB_FILE = "job.yaml"
_EXAMPLE = "for example: script: train.py"

Resolve = Callable[[str], int]  # from a job's name to its id; raises NotFound


def draft_job(path: Path | None, *, fields: Mapping[str, object], as_options: bool = True) -> Draft:
    """``fields`` are options or keys, named as ``ugro.kernel.jobs.config.options`` says."""
    given = read_options(fields, as_options=as_options)
    return _draft(given, None, Document()) if path is None else _parsed(_text(path), path, given)


def parse_job(text: str, path: Path, *, fields: Mapping[str, object], as_options: bool = True) -> Draft:
    return _parsed(text, path, read_options(fields, as_options=as_options))


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
    script_folder: Path | None = None  # that of a script outside of the folder that would be sent

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
        if self.script_folder is not None:
            return self.script_folder
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
        spec = self.section.spec(variables, ids)
        if (found := why_too_large(spec)) is not None:
            self.refuse((found[0],), found[1], USE_A_FILE)
        return spec

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
        rest = [one for one in problems if one is not first]
        more = f" (and {len(rest)} more)" if rest else ""
        said, *others = (_said(one, given, path) for one in (first, *rest))
        shown = [(text, one.hint) for text, one in zip(others, rest, strict=True)]
        raise ConfigError(f"{said}{more}", hint=first.hint, others=shown)
    if problems:
        raise config_error(escaped(str(path)), problems)


def _said(problem: Problem, given: Given, path: Path | None) -> str:
    """Named by its option, or by its place in the file."""
    name = given.names.get(problem.key, problem.key)
    is_of_file = path is not None and problem.key not in given.names
    place = f"{escaped(str(path))}:{problem.line}: " if is_of_file else ""
    return f"{place}{name}: {problem.message}" if name else f"{place}{problem.message}"


def _text(path: Path) -> str:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"{escaped(str(path))}: not a file", hint=f"name the file itself, such as {path / JOB_FILE}")
    return read_text(path)


def _document(text: str, file: str) -> Document:
    document = read_document(text, file, FILE_LIMITS, example=_EXAMPLE)
    if not isinstance(document.tree, dict):
        message = f"expected a map of keys to values, got {shown(document.tree)}"
        raise config_error(file, [Problem(1, "", message, _EXAMPLE)])
    return document

"""Which requests change something, what they are called in the audit log, and what they are about. Pure.

A request that no rule names is recorded by its method and path, so that a new route is never left out. One that changes
nothing is recorded if it was refused.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

from ugro.kernel.operations.registry import request_for
from ugro.kernel.operations.request import Operation
from ugro.kernel.support.secrets import HIDDEN, looks_secret, masked_command, without_passwords
from ugro.node import foreign

SIGN_IN = "sign in"
TUNNEL = "tunnel"
READ = "read"
READ_TOKEN = "read token of Ray cluster"
LONGEST = 300  # of a subject, and of an outcome
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
# They change nothing: a plan, a look at a file.
_QUIET = re.compile(r"/v1/(sweeps/plan|recipes/launch|remote/.+)")
TUNNEL_PATH = "/v1/tunnel"  # open ones record themselves: one entry for all of a process to the same end
_JOB = r"/v1/jobs/([^/]+)"
_NUMBER = re.compile(rb'"id":([0-9]+),"spec"')
_ID = re.compile(rb'\{"id":([0-9]+)\}')


@dataclass(frozen=True, slots=True)
class Rule:
    method: str
    path: str
    action: str
    fields: tuple[str, ...] = ()  # of the request's body that say what it is about
    makes_jobs: bool = False  # their numbers are in the answer


RULES = (
    Rule("POST", r"/jobs/([0-9]+)/again", "launch again", makes_jobs=True),
    Rule("POST", r"/v1/plans", "plan"),
    Rule("POST", r"/v1/sweeps", "sweep"),
    Rule("POST", r"/v1/services", "serve", ("model",)),
    Rule("POST", r"/v1/services/([^/]+)/update", "update service"),
    Rule("POST", r"/login", SIGN_IN),
    Rule("POST", r"/logout", "sign out"),
)
_PATTERNS = {
    method: [(rule, re.compile(rule.path)) for rule in RULES if rule.method == method]
    for method in {rule.method for rule in RULES}
}


def rule_for(method: str, path: str) -> tuple[Rule, str] | None:
    """The rule, and what the path is about; None if the request changes nothing."""
    if (declared := request_for(method, path)) is not None:
        return _declared(declared.operation, path)
    if method in _READING or _QUIET.fullmatch(path):
        return None
    for rule, pattern in _PATTERNS.get(method, ()):
        if found := pattern.fullmatch(path):
            return rule, found[1] if found.groups() else ""
    return Rule(method, path, f"{method} {bounded(path)}"), ""


def _declared(operation: Operation, path: str) -> tuple[Rule, str] | None:
    if operation.audit is None:
        return None
    action, *names = re.split(r" ?\{(\w+)\}", operation.audit)
    named = operation.values_in(path) or {}
    of_body = tuple(name for name in names[::2] if name not in named)
    about = " ".join(named[name] for name in names[::2] if name in named)
    return Rule(operation.method, path, action, of_body), about


def refused_look(method: str, path: str, query: bytes, status: int) -> tuple[str, str] | None:
    """Of a request that no rule names, what it is called and about: a tunnel that did not open, or a forbidden look."""
    if path == TUNNEL_PATH:
        return (TUNNEL, tunnel_end(query)) if status >= 400 else None
    if status != 403:
        return None
    return (READ, bounded(path)) if method in _READING else (f"{method} {bounded(path)}", "")


def tunnel_end(query: bytes) -> str:
    """Where a tunnel leads to: a port of a node, or a socket of a job there."""
    found = dict(parse_qsl(query.decode("ascii", "replace")))
    node, port = found.get("node", ""), found.get("port")
    return bounded(f"{node} port {port}" if port else f"{node} {found.get('socket')} of job {found.get('job')}")


def subject(rule: Rule, named: str, request: bytes, answer: bytes) -> str | None:
    """None: it turned out that nothing was done."""
    numbers = _numbers(answer)
    words = [named, *_fields(rule, request)]
    if rule.makes_jobs:
        if not numbers:
            return None
        jobs = numbers[0].decode() + (f" to {numbers[-1].decode()}" if len(numbers) > 1 else "")
        words.append(f"→ {jobs}" if named else jobs)
    return bounded(" ".join(word for word in words if word))


def _numbers(answer: bytes) -> list[bytes]:
    """The jobs in an answer: ``{"jobs": […]}``, ``{"job": …}``, a job, or ``{"id": …}``."""
    if answer.startswith(b'{"jobs"'):
        return _NUMBER.findall(answer)
    found = _NUMBER.search(answer) or _ID.match(answer)
    return [found[1]] if found else []


def refusal(status: int, answer: bytes) -> str:
    """In words of the agent, if it said why."""
    if status == 499:
        return "the client left"
    try:
        return bounded(f"refused: {without_passwords(str(json.loads(answer)['error']['message']))}")
    except (ValueError, KeyError, TypeError):
        return f"refused: {status}"


def bounded(text: str) -> str:
    printable = "".join(letter if letter.isprintable() else "�" for letter in text)
    return printable if len(printable) <= LONGEST else f"{printable[: LONGEST - 1]}…"


def _fields(rule: Rule, request: bytes) -> list[str]:
    if not rule.fields:
        return []
    try:
        body = foreign.parsed(request, len(request))
        return [_shown(body.get(name)) for name in rule.fields] if isinstance(body, dict) else []
    except ValueError:
        return []


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={HIDDEN if looks_secret(name) else _shown(part)}" for name, part in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return shlex.join(masked_command(str(part) for part in value))
    return "" if value is None else without_passwords(str(value))

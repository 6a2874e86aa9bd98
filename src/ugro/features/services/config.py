"""Every key of a service file, beside those of a job file that say what each replica gets.

This module reads no file by itself and resolves no names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ugro.features.services import model as service
from ugro.kernel.access.model import is_loopback
from ugro.kernel.config.document import Document, read_document
from ugro.kernel.config.kinds import BadValueError, Bool, Duration, Kind, Text, Whole, flow, shown
from ugro.kernel.config.section import KeyPath, Section, config_error, is_line, is_node_name, key, nested, section
from ugro.kernel.jobs.config.kinds import FILE_LIMITS
from ugro.kernel.jobs.config.options import OPTIONS
from ugro.kernel.jobs.config.schema import JobSection
from ugro.kernel.support.errors import ConfigError

MOST_REPLICAS = 1000
ALL = "all"
FILE = "service.yaml"
_OF_TRAININGS = frozenset(
    {
        *("script", "args", "launcher", "balance", "train_sync", "nan", "checkpoint", "retry", "after", "cache"),
        *("inputs", "time_limit"),
    }
)
_LONGEST_NAME = 48  # its jobs have longer ones
_PATH = Text("a path such as /health", lambda text: is_line(text) and text.startswith("/") and " " not in text)
_FILE = Text("a file on the door's node", is_line, expands_home=True, metavar="FILE")
_IS_ADDRESS = re.compile(r"[0-9a-zA-Z.:-]{1,64}")
_ADDRESS = Text("an address such as 127.0.0.1 or 0.0.0.0", lambda text: _IS_ADDRESS.fullmatch(text) is not None)


class Model(Kind):
    expected = "a job's name or id, or a folder"
    metavar = "JOB|DIR"

    def parse(self, value: object) -> str:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(text, str) or not is_line(text):
            raise self.refuse(value)
        return text


class Percent(Kind):
    """A share of requests, between 0 and 1."""

    expected = "a share such as 10%"
    metavar = "PERCENT"

    def parse(self, value: object) -> float:
        match = re.fullmatch(r"\s*([0-9]{1,2}(?:\.[0-9]{1,3})?)\s*%\s*", value) if isinstance(value, str) else None
        share = float(match[1]) / 100 if match else 0.0
        if not 0 < share < 1:
            raise self.refuse(value)
        return share

    def written(self, value: float) -> object:
        return f"{100 * value:g}%"


class Statuses(Kind):
    expected = "a status such as 200, or a range such as 200-299"
    metavar = "CODE|CODE-CODE"

    def parse(self, value: object) -> tuple[int, int]:
        if isinstance(value, tuple) and len(value) == 2:
            return value
        text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
        match = re.fullmatch(r"\s*([1-5][0-9]{2})\s*(?:-\s*([1-5][0-9]{2})\s*)?", text)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise self.refuse(value)
        return int(match[1]), int(match[2] or match[1])

    def written(self, value: tuple[int, int]) -> object:
        return value[0] if value[0] == value[1] else f"{value[0]}-{value[1]}"


@section
class ScaleSection(Section):
    """A number of replicas that follows the load."""

    min: int = key(1, Whole(0, MOST_REPLICAS), "The fewest. With 0, the last one goes when nobody asks.", example=0)
    max: int = key(1, Whole(1, MOST_REPLICAS), "The most.", example=4)
    queue: int = key(2, Whole(1, 10_000), "Requests, running and waiting, that one replica should have.")
    latency: float | None = key(None, Duration(), "The 90th percentile of answers to stay below.", example="2s")
    idle: float = key(300.0, Duration(), "How long nobody asks before the last replica goes, if `min` is 0.")

    def check(self) -> None:
        if self.min > self.max:
            raise BadValueError(f"min is {self.min} and max is {self.max}", hint="max: 4", at=("max",))


class Replicas(Kind):
    expected = f"{ALL}, a number from 0 to {MOST_REPLICAS}, or a map such as {{min: 1, max: 4}}"
    metavar = "all|N"
    choices = (ALL,)

    def parse(self, value: object) -> str | int | ScaleSection:
        if value == ALL or isinstance(value, ScaleSection):
            return value
        if isinstance(value, dict):
            return ScaleSection.read(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_REPLICAS:
            raise self.refuse(value)
        return value

    def from_text(self, text: str) -> object:
        ends = re.fullmatch(r"([0-9]{1,4})\.\.([0-9]{1,4})", text)
        if ends is not None:
            return {"min": int(ends[1]), "max": int(ends[2])}
        return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else text

    def written(self, value: Any) -> object:
        return value.written() if isinstance(value, ScaleSection) else value


@section
class ProbeSection(Section):
    """An HTTP request to the replica, made on its own node."""

    path: str | None = key(None, _PATH, "What to ask for. Null is the engine's own; of a command, whether its port "
                           "accepts connections.", example="/health")  # fmt: skip
    interval: float | None = key(None, Duration(), "How often.", example="2s")
    timeout: float | None = key(None, Duration(), "How long an answer may take; for start, how long all of the start "
                                "may take.", example="10s")  # fmt: skip
    failures: int | None = key(None, Whole(1, 1000), "How many failures in a row count.", example=3)
    status: tuple[int, int] | None = key(None, Statuses(), "The status codes that are good.", example="200-299")

    def over(self, usual: service.Probe) -> service.Probe:
        named: dict[str, Any] = {
            "path": self.path,
            "interval_s": self.interval,
            "timeout_s": self.timeout,
            "failures": self.failures,
            "status": self.status,
        }
        return replace(usual, **{name: value for name, value in named.items() if value is not None})


@section
class ProbesSection(Section):
    """When a replica has started, is ready for requests, and is alive."""

    start: ProbeSection = nested(ProbeSection)
    ready: ProbeSection = nested(ProbeSection)
    live: ProbeSection = nested(ProbeSection)

    def over(self, usual: service.Probes) -> service.Probes:
        return service.Probes(self.start.over(usual.start), self.ready.over(usual.ready), self.live.over(usual.live))


@section
class RestartSection(Section):
    """How often a replica's program may end by itself. Beyond that, the replica counts as failed."""

    makes = service.Restarts

    max: int = key(5, Whole(0, 1000), "So many times within `within`.", to="most")
    within: float = key(600.0, Duration(), "The time in which ends are counted.", to="within_s")


@section
class UpdateSection(Section):
    """How an update replaces replicas."""

    surge: int = key(1, Whole(0, 100), "Replicas beyond the wanted number while it runs, if there is room for them.")
    timeout: float = key(600.0, Duration(), "How long a new replica may take to be ready before the update is undone.")
    canary: float | None = key(
        None, Percent(), "The share of requests that the new revision gets until you decide.", example="10%"
    )


@section
class TlsSection(Section):
    """The certificate of the door."""

    cert: str | None = key(None, _FILE, "The certificate with its chain, in PEM.", example="/etc/ssl/chat.pem")
    key: str | None = key(None, _FILE, "Its private key, in PEM.", example="/etc/ssl/private/chat.key")

    def check(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise BadValueError("a certificate and its key belong together", hint="tls: {cert: FILE, key: FILE}")


@section
class ServiceSection(Section):
    """What is served, by how many replicas, and who may ask."""

    noun = "a service"

    model: str | None = key(
        None,
        Model(),
        "The job whose model is served, or a folder on this machine.",
        example="train",
    )
    path: str | None = key(
        None,
        Text("a folder inside the job's results", is_line, metavar="PATH"),
        "Where the model is in the job's results. Null finds it: a folder with ugro.json or config.json.",
        example="model",
    )
    engine: str | None = key(
        None,
        Text("the name of an engine", is_node_name, metavar="ENGINE"),
        "What runs the model. Null is UGRO's own server, or the `command`.",
        example="vllm",
    )
    replicas: Any = key(
        1,
        Replicas(),
        "How many: a number, all (one on each GPU, or on each node without GPUs), or a map of min and max.",
        example={"min": 1, "max": 4},
    )
    port: int = key(8000, Whole(1, 65535), "The port at which the service answers.")
    bind: str = key(
        service.LOOPBACK_BIND,
        _ADDRESS,
        "The address at which it answers. One that other machines reach needs `tls`, and keys unless it is `public`.",
        example="0.0.0.0",
    )
    tls: TlsSection = nested(TlsSection)
    keys: bool | None = key(
        None, Bool(), "Ask clients for an API key. Null is true where other machines reach it.", example=True
    )
    public: bool = key(False, Bool(), "Answer everybody who reaches it, without keys.", example=True)
    probes: ProbesSection = nested(ProbesSection)
    concurrency: int | None = key(
        None,
        Whole(0, 100_000),
        "Requests that one replica gets at once; the others wait at the door. 0 is no limit, null is the engine's own.",
        example=8,
    )
    drain: float = key(30.0, Duration(may_be_zero=True), "How long a replica that goes may finish what it has.")
    timeout: float = key(600.0, Duration(), "How long the answer to a request may take.")
    retry_posts: bool = key(
        True,
        Bool(),
        "Send a POST that a replica did not answer to another one. The first may have done its work.",
        example=False,
    )
    restart: RestartSection = nested(RestartSection)
    update: UpdateSection = nested(UpdateSection)
    door: str | None = key(
        None,
        Text("the name of a node", is_node_name, metavar="NODE"),
        "The node at which the service answers. Null is this machine if it is a node, else the master or the first.",
        example="gpu-master",
    )

    door_lost_after: float | None = key(
        service.ServiceSpec("").door_lost_after_s,
        Duration(),
        "How long the door's node may be unreachable before the door is started on another one. A door on another "
        "machine than the agent's ends by itself if it has heard of no agent for so long. Null: it waits for its node.",
        example="10m",
    )

    def check(self) -> None:
        if is_loopback(self.bind):
            return
        if self.tls.cert is None:
            hint = "tls: {cert: FILE, key: FILE}, or leave bind out and use: ssh -L 8000:localhost:8000 HOST"
            raise BadValueError("other machines reach this address: it needs tls", hint=hint, at=("bind",))
        if self.keys is False and not self.public:
            hint = "keys: true, or public: true if everybody may ask"
            raise BadValueError("other machines reach this address: it needs keys", hint=hint, at=("keys",))

    @property
    def tls_files(self) -> service.Tls | None:
        return service.Tls(self.tls.cert, self.tls.key) if self.tls.cert and self.tls.key else None

    @property
    def needs_keys(self) -> bool:
        return (not is_loopback(self.bind) and not self.public) if self.keys is None else self.keys


@dataclass(frozen=True, slots=True)
class ServiceDraft:
    """A service as it was written: its own keys, and the options of its replicas' jobs."""

    section: ServiceSection
    fields: Mapping[str, Any]


def read_service(
    text: str | None, file: str, options: Mapping[str, Any], fields: Mapping[str, Any]
) -> ServiceDraft:
    """``options``: keys of a service that override the file, as texts or values; ``fields``: of its jobs."""
    example = "for example: {model: train, port: 8000}"
    document = read_document(text, file, FILE_LIMITS, example=example) if text is not None else Document(tree={})
    if not isinstance(document.tree, dict):
        raise ConfigError(f"{file}:1: expected a map of keys to values", hint="model: train")
    own_keys = ServiceSection.known_keys()
    tree = {name: value for name, value in document.tree.items() if name not in _job_keys()}
    for path, value in _given(options).items():
        _put(tree, path, value)
    section = document.read(ServiceSection, tree)
    jobs = {name: value for name, value in document.tree.items() if name in _job_keys() and name not in own_keys}
    for name in _OF_TRAININGS & jobs.keys():
        document.note((name,), "a service has none", "give a command, an engine or a model")
    if document.problems:
        raise config_error(file, document.problems) if text is not None else _of_options(document)
    assert section is not None, "what is not valid has a problem"
    return ServiceDraft(section, {**_as_fields(jobs), **fields})


def name_problem(name: str) -> ConfigError | None:
    if is_node_name(name) and len(name) <= _LONGEST_NAME and not name.isdigit():
        return None
    hint = f"letters, digits, dots and dashes, at most {_LONGEST_NAME}, not a number: --name chat"
    return ConfigError(f"not a name for a service: {name!r:.60}", hint=hint)


def _of_options(document: Document) -> ConfigError:
    first = document.problems[0]
    return ConfigError(f"--{first.key.replace('.', '-').replace('_', '-')}: {first.message}", hint=first.hint)


def _job_keys() -> frozenset[str]:
    return frozenset(JobSection.known_keys()) - frozenset(ServiceSection.known_keys())


def _given(options: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """By path in the file; texts as a file would give them."""
    found: dict[KeyPath, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        path: KeyPath = tuple(name.split("."))
        kind = _kind(path)
        found[path] = kind.from_text(value) if isinstance(value, str) and kind is not None else value
    return found


def _kind(path: KeyPath) -> Kind | None:
    where: type[Section] = ServiceSection
    for part in path[:-1]:
        if (inner := where.sections().get(str(part))) is None:
            return None  # it is an unknown key, as it would be in a file
        where = inner
    declared = where.known_keys().get(str(path[-1]))
    return declared.kind if declared is not None else None


def _put(place: dict[str, Any], path: KeyPath, value: Any) -> None:
    key_, *rest = path
    if not rest:
        place[str(key_)] = value
        return
    inner = place.setdefault(str(key_), {})
    if isinstance(inner, dict):
        _put(inner, tuple(rest), value)


def _as_fields(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a job file as options, which the submission of jobs reads."""
    found: dict[str, Any] = {}
    used: set[KeyPath] = set()
    for option in OPTIONS.values():
        value = _at(tree, option.path)
        if value is not None:
            found[option.name] = value
            used.add(option.path)
    for path, value in _leaves(tree):
        if path not in used and not any(path[: len(one)] == one for one in used):
            key_ = ".".join(map(str, path))
            raise ConfigError(f"{key_}: a service cannot have {shown(flow(value))} here", hint="see: ugro serve --help")
    return found


def _at(tree: Any, path: KeyPath) -> Any:
    for part in path:
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    return tree


def _leaves(tree: Mapping[str, Any], base: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    found: list[tuple[KeyPath, Any]] = []
    for name, value in tree.items():
        inner = JobSection.sections().get(name) if not base else None
        if isinstance(value, dict) and (inner is not None or base):
            found += _leaves(value, (*base, name))
        elif value is not None:
            found.append(((*base, name), value))
    return found

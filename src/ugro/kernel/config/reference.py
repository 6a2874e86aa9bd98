"""The generated parts of the reference pages: tables of keys and full examples, rendered from the schemas.

``python -m ugro.kernel.config.reference PAGE...`` writes each part between ``<!-- generated: NAME -->`` and
``<!-- end -->``; with ``--check`` it only says whether the pages are up to date. The rest is written by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ugro.features.alerts.config import Channel
from ugro.features.discovery.config import Consul, ZooKeeper
from ugro.features.hooks.config import IdleHook, JobEndedHook, NodeLostHook, QueueHook
from ugro.features.quotas.config import GroupKeys, LimitKeys
from ugro.features.services.config import ProbeSection, ProbesSection, ScaleSection, ServiceSection
from ugro.features.trackers.config import InfluxKeys, OtlpKeys
from ugro.kernel.access.config import Tls
from ugro.kernel.config.kinds import OrNull, flow
from ugro.kernel.config.load import variables
from ugro.kernel.config.schema import NodeEntry, Settings
from ugro.kernel.config.section import Key, KeyPath, Section
from ugro.kernel.jobs.config.kinds import AlternativeSection
from ugro.kernel.jobs.config.options import OPTIONS
from ugro.kernel.jobs.config.schema import JobSection
from ugro.kernel.jobs.engine.rules.retry import FREE_RETRIES, INFRASTRUCTURE, LASTING, UNCOUNTED
from ugro.kernel.jobs.model import Cause

_PART = re.compile(r"(<!-- generated: ([a-z. -]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)

_NODES = """\
nodes:
  gpu-master:
    ip: 192.168.1.10
    user: ann
    port: 22
    role: master
    gpu: RTX 5070 Ti
    vram_gb: 12
    labels: [fast, lab2]
    python: ~/venv/bin/python
    remote_root: /data/ugro
    transport: ssh
    env: {CUDA_HOME: /usr/local/cuda}
    owner: {when: active, then: pause, quiet: 10m}
    power: {suspend_after: 30m, resume: wol}
  gpu1:
    host: gpu1.lan
    user: bob
    account: "{user}"
  gpu2: {transport: kubernetes, pod: gpu-0, container: trainer, namespace: training}
"""

_CAUSES = {
    Cause.RANK_FAILED: "a process failed, and its last lines do not say more",
    Cause.OOM: "the node ran out of memory, or the job reached its `memory`",
    Cause.CUDA_OOM: "a GPU ran out of memory",
    Cause.NCCL_TIMEOUT: "the processes lost contact with each other",
    Cause.PORT_IN_USE: "the port at which they meet was taken",
    Cause.DISK_FULL: "a node had no room for the code, or the program could write no more",
    Cause.IMPORT_ERROR: "Python does not find a module that the program imports",
    Cause.KILLED: "something other than UGRO killed a process",
    Cause.NODE_LOST: "a node could not be reached for too long",
    Cause.NODE_REBOOTED: "a node was rebooted",
    Cause.SUPERVISOR_LOST: "UGRO's own process on a node was killed",
    Cause.START_FAILED: "a process could not be started",
    Cause.GPU_UNAVAILABLE: "another agent has the GPU, or the node's GPUs have changed",
    Cause.SETUP_FAILED: "the job's set-up commands failed on a node, or its environment could not be made",
    Cause.MISMATCH: "the nodes' environments do not agree",
    Cause.TIME_LIMIT: "the job reached its time limit",
    Cause.PREEMPTED: "a more urgent job or the owner of a machine interrupted it",
}

# Keys that cannot be used together with others in one file: empty in the full example.
_ALONE: dict[str, object] = {"command": None, "any_of": [], "lock": None, "project": None, "existing": None}


def parts() -> dict[str, str]:
    return {
        "nodes": _table(NodeEntry.known_keys().values()),
        "settings": "\n".join(_settings()),
        "channels": f"{Channel.__doc__}\n\n{_table(Channel.known_keys().values())}",
        "zookeeper": _table(ZooKeeper.known_keys().values()),
        "consul": _table(Consul.known_keys().values()),
        "hooks": "\n".join(_hooks()),
        "tls": _table(Tls.known_keys().values()),
        "influxdb": _table(InfluxKeys.known_keys().values()),
        "otlp": _table(OtlpKeys.known_keys().values()),
        "limits": _table(LimitKeys.known_keys().values()),
        "groups": _table(one for name, one in GroupKeys.known_keys().items() if name not in LimitKeys.known_keys()),
        "cluster file": _yaml(cluster_example()),
        "job": _job_table((), JobSection),
        "job sections": "\n".join(_job_section(path, section) for path, section in job_sections() if path),
        "causes": _causes(),
        "job file": _yaml(job_example()),
        "service": _markdown(["Key", "Value", "Default", "Meaning"], list(_service_rows(ServiceSection))),
    }


def filled(page: str) -> str:
    found = parts()
    return _PART.sub(lambda part: f"{part[1]}{found[part[2]]}{part[3]}", page)


def cluster_example() -> str:
    """A cluster file with every key."""
    lines = [f"{one.name}: {flow(one.default)}" for one in Settings.known_keys().values() if one.section is None]
    for name, section in Settings.sections().items():
        lines += ["", f"{name}:", *(f"  {one.name}: {flow(one.default)}" for one in section.known_keys().values())]
    return _NODES + "\n" + "\n".join(lines) + "\n"


def job_example() -> str:
    """A job file with every key."""
    return "".join(f"{line}\n" for line in _job_lines(JobSection, ""))


def job_sections(section: type[Section] = JobSection, base: KeyPath = ()) -> Iterator[tuple[KeyPath, type[Section]]]:
    """The file itself first, at the empty path."""
    yield base, section
    for name, inner in section.sections().items():
        yield from job_sections(inner, (*base, name))


def _hooks() -> Iterator[str]:
    for name, hook in (
        ("queue_longer_than", QueueHook),
        ("idle", IdleHook),
        ("node_lost", NodeLostHook),
        ("job_ended", JobEndedHook),
    ):
        yield f"### {name}\n\n{hook.__doc__}\n\n{_table(hook.known_keys().values())}"


def _settings() -> Iterator[str]:
    names = {(variable.section, variable.key): variable.name for variable in variables().values()}
    top = [one for one in Settings.known_keys().values() if one.section is None]
    yield f"## Top level\n\n{_table(top, [names[None, one.name] for one in top])}"
    for name, section in Settings.sections().items():
        keys = section.known_keys().values()
        yield f"## {name}\n\n{section.__doc__}\n\n{_table(keys, [names[name, one.name] for one in keys])}"


def _table(keys: Iterable[Key], variables: Sequence[str] = ()) -> str:
    header = ["Key", "Value", "Default", *(["Variable"] if variables else []), "Meaning"]
    rows = [[f"`{one.name}`", _expected(one), f"`{flow(_default(one))}`", one.meaning] for one in keys]
    for row, variable in zip(rows, variables, strict=False):
        row.insert(3, f"`{variable}`")
    return _markdown(header, rows)


def _default(one: Key) -> object:
    return one.kind.written(one.default) if one.section is not None else one.default


def _service_rows(section: type[Section], base: str = "") -> Iterator[list[str]]:
    for name, one in section.known_keys().items():
        if one.section is not None:
            is_probes = one.section is ProbesSection  # three of a kind
            yield from _service_rows(ProbeSection if is_probes else one.section, f"{base}{name}{'.X' * is_probes}.")
            continue
        yield [f"`{base}{name}`", _expected(one), f"`{flow(one.kind.written(one.default))}`", one.meaning]
        if name == "replicas":
            yield from _service_rows(ScaleSection, "replicas.")


def _job_section(path: KeyPath, section: type[Section]) -> str:
    return f"## {'.'.join(map(str, path))}\n\n{section.__doc__}\n\n{_job_table(path, section)}"


def _job_table(path: KeyPath, section: type[Section]) -> str:
    flags = {option.path: f"`{option.flag}`" for option in OPTIONS.values()}
    rows = [
        [f"`{name}`", *_job_value(section, one), flags.get((*path, name), ""), one.meaning]
        for name, one in section.known_keys().items()
    ]
    return _markdown(["Key", "Value", "Default", "Option", "Meaning"], rows)


def _job_value(section: type[Section], one: Key) -> tuple[str, str]:
    if one.section is None:
        return _expected(one), f"`{flow(one.kind.written(one.default))}`"
    name = f"resources.{one.name}" if issubclass(section, AlternativeSection) else one.name
    return f"a map: [{name}](#{name.replace('.', '')})", ""


def _expected(one: Key) -> str:
    return f"{one.kind.expected}, or null" if isinstance(one.kind, OrNull) else one.kind.expected


def _causes() -> str:
    rows = [[f"`{cause}`", meaning, _consequence(cause)] for cause, meaning in _CAUSES.items()]
    free = f"The first {FREE_RETRIES} failures that are retried freely do not count against `retry.max`.\n"
    return f"{_markdown(['Cause', 'Meaning', 'Retried'], rows)}\n{free}"


def _consequence(cause: Cause) -> str:
    if cause in UNCOUNTED:
        return "yes, always"
    if cause in INFRASTRUCTURE:
        return "yes, freely"
    return "no" if cause in LASTING else "yes, within `retry.max`"


def _job_lines(section: type[Section], indent: str) -> Iterator[str]:
    for name, one in section.known_keys().items():
        if one.section is not None:
            yield f"{indent}{name}:"
            yield from _job_lines(one.section, f"{indent}  ")
        else:
            yield f"{indent}{name}: {flow(_ALONE.get(name, one.example))}"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, ["---"] * len(header), *rows])


def _yaml(text: str) -> str:
    return f"```yaml\n{text}```\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the generated parts of pages.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    options = parser.parse_args(arguments)
    for path in options.pages:
        page = path.read_text(encoding="utf-8")
        if options.check and filled(page) != page:
            parser.exit(1, f"{path} is out of date; write it with: make docs\n")
        path.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    main()

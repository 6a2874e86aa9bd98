"""The job file's reference page, rendered from the schema.

``python -m ugro.config.job.reference PATH`` writes it; with ``--check`` it only says whether PATH is up to date.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ugro.config.job.options import OPTIONS
from ugro.config.job.resources import AlternativeSection
from ugro.config.job.schema import JobSection
from ugro.config.problems import KeyPath
from ugro.config.reference import kind_in_words, table, write_page
from ugro.config.section import Key, Section
from ugro.config.yamltext import flow
from ugro.core.failure import Cause
from ugro.policy.lifecycle.retry import FREE_RETRIES, INFRASTRUCTURE, LASTING

_BEGINNING = """\
# Job files

<!-- Made by `python -m ugro.config.job.reference docs/jobs.md`: change the schema, not this page. -->

A job file says what to run and what it needs. It is submitted with `ugro launch -f job.yaml`; with `--dry-run`
the exact plan is shown, and nothing is submitted. The smallest one:

```yaml
script: train.py
```

This runs `train.py` as one process on one node, without a GPU. With GPUs, and on several nodes:

```yaml
script: train.py
args: --epochs 10 --lr 0.1
resources:
  nodes: 2..4
  gpus_per_node: all
```

Every GPU gets a process, with the environment that `torchrun` would give it. What is not Python is a command,
and runs on one node:

```yaml
command: [./prepare.sh, --all]
```

## Values

- A **duration** is a number of seconds, or has units: `90`, `30m`, `1h30m`, `2d`.
- A **size** has a unit: `8GB` is 8·10^9 bytes, `8GiB` is 8·2^30 bytes. A card that is sold with 24 GB may have a
  little less than `24GiB` to give: ask for `24GB`.
- A **range** has two dots: `2..4` is 2, 3 or 4; `8GB..` is 8 GB or more.
- `null` means: not set.
- A number or `on`, `off`, `yes`, `no` that is meant as a text needs quotes: `args: [--epochs, "10"]`. One text
  needs none: `args: --epochs 10` is split at its spaces, as a shell would do it, and nothing in it is expanded.
- Keys given twice, unknown keys and values of the wrong kind are errors; the message names the file, the line and
  the key.

An option that the tables below show goes over what the file says. `--env` adds to the file's variables; every
other option replaces. A file is UTF-8 text of at most 1 MiB.
"""

_ENVIRONMENT = """\
## Environment variables

A variable without a value must come with the submit. This keeps secrets out of the file:

```yaml
script: train.py
env:
  HF_HOME: /data/hf
  WANDB_API_KEY:
```

The value is taken from `--env WANDB_API_KEY=…`, or else from the environment of who submits; `--env WANDB_API_KEY`
does the same for a variable that is not in the file. If there is none, or an empty one, nothing is submitted. `""`
in the file is an empty value.
"""

_CAUSES = {
    Cause.RANK_FAILED: "a process failed, and its last lines do not say more",
    Cause.OOM: "the node ran out of memory",
    Cause.CUDA_OOM: "a GPU ran out of memory",
    Cause.NCCL_TIMEOUT: "the processes lost touch with each other",
    Cause.PORT_IN_USE: "the port at which they meet was taken",
    Cause.DISK_FULL: "a disk was full",
    Cause.IMPORT_ERROR: "Python did not find a module",
    Cause.KILLED: "something else than UGRO ended a process",
    Cause.NODE_LOST: "a node could not be reached for too long",
    Cause.NODE_REBOOTED: "a node was started again",
    Cause.SUPERVISOR_LOST: "UGRO's own process on a node was killed",
    Cause.START_FAILED: "a process could not be started",
    Cause.SETUP_FAILED: "the job's set-up script failed on a node",
    Cause.MISMATCH: "the nodes' environments do not agree",
    Cause.TIME_LIMIT: "it reached its time limit",
    Cause.PREEMPTED: "it made way for a more urgent job",
}

# Keys that cannot stand together with others in one file: the full example has them empty.
_ALONE: dict[str, object] = {"command": None, "any_of": []}


def render() -> str:
    more: dict[KeyPath, str] = {(): _ENVIRONMENT, ("retry",): _causes()}
    parts = [_BEGINNING]
    for path, section in sections():
        parts += [_section(path, section), *([more[path]] if path in more else [])]
    parts.append(f"## Full example\n\nEvery key. What is not needed is best left out.\n\n```yaml\n{example()}```\n")
    return "\n".join(parts)


def example() -> str:
    """A file with every key of the schema."""
    return "".join(f"{line}\n" for line in _lines(JobSection, ""))


def sections(section: type[Section] = JobSection, base: KeyPath = ()) -> Iterator[tuple[KeyPath, type[Section]]]:
    """The file itself first, at the empty path."""
    yield base, section
    for name, declared in section.known_keys().items():
        if declared.section is not None:
            yield from sections(declared.section, (*base, name))


def main(arguments: Sequence[str] | None = None) -> None:
    write_page("ugro.config.job.reference", render(), arguments)


def _section(path: KeyPath, section: type[Section]) -> str:
    title = ".".join(map(str, path)) or "Keys"
    flags = {option.path: f"`{option.flag}`" for option in OPTIONS.values()}
    rows = [
        [f"`{name}`", *_value(section, declared), flags.get((*path, name), ""), declared.meaning]
        for name, declared in section.known_keys().items()
    ]
    return f"## {title}\n\n{section.__doc__}\n\n{table(['Key', 'Value', 'Default', 'Option', 'Meaning'], rows)}"


def _value(section: type[Section], declared: Key) -> tuple[str, str]:
    if declared.section is not None:
        name = f"resources.{declared.name}" if issubclass(section, AlternativeSection) else declared.name
        return f"a map: [{name}](#{name.replace('.', '')})", ""
    return kind_in_words(declared), f"`{flow(declared.kind.written(declared.default))}`"


def _causes() -> str:
    rows = [[f"`{cause}`", meaning, _consequence(cause)] for cause, meaning in _CAUSES.items()]
    return (
        "The causes that `on` and `never_on` may name, and whether the job is tried again when both are empty:\n\n"
        f"{table(['Cause', 'Meaning', 'Tried again'], rows)}\n"
        f"What is free costs no retry, {FREE_RETRIES} times; from then on it does. `exit_code:3` names a failure by\n"
        "the exit code of the process that failed first.\n"
    )


def _consequence(cause: Cause) -> str:
    if cause in INFRASTRUCTURE:
        return "yes, free"
    return "no" if cause in LASTING else "yes, with a retry"


def _lines(section: type[Section], indent: str) -> Iterator[str]:
    for name, declared in section.known_keys().items():
        if declared.section is not None:
            yield f"{indent}{name}:"
            yield from _lines(declared.section, f"{indent}  ")
        else:
            yield f"{indent}{name}: {flow(_ALONE.get(name, declared.example))}"


if __name__ == "__main__":
    main()

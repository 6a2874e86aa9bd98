"""The configuration's reference page, rendered from the schema.

``python -m ugro.config.reference PATH`` writes it; with ``--check`` it only says whether PATH is up to date.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from ugro.config.channels import Channel
from ugro.config.environment import variables
from ugro.config.kinds import OrNull
from ugro.config.schema import NodeEntry, Settings
from ugro.config.section import Key, Section
from ugro.config.yamltext import flow
from ugro.core.support.state_dir import CLUSTER_VARIABLE

_BEGINNING = f"""\
# Configuration

<!-- Made by `python -m ugro.config.reference docs/configuration.md`: change the schema, not this page. -->

One file, `cluster.yaml`, says which nodes there are. Everything else has a default. Without a file, the
cluster is this machine alone, and everything still works.

## Where the file is looked for

The first of these that is there is used:

1. the file given with `--cluster FILE`;
2. the file that the environment variable `{CLUSTER_VARIABLE}` names;
3. `cluster.yaml` in the working directory;
4. `cluster.yaml` in UGRO's state directory, `~/.ugro` or the folder that `UGRO_HOME` names.

While a lab is up (`ugro lab up`), its file comes before 3. The variables below are read when the agent starts:
`ugro agent stop` and the next command takes new ones up.

A file named by the flag or the variable must exist. A file is UTF-8 text of at most 1 MiB.

## Values

- A **duration** is a number of seconds, or has units: `10`, `500ms`, `90s`, `1h30m`, `1d`.
- A **size** has a unit: `8GB` is 8·10^9 bytes, `8GiB` is 8·2^30 bytes.
- `null` means: not set.
- A number or `on`, `off`, `yes`, `no` that is meant as a text needs quotes: `gpu: "4070"`.
- A map with nothing in it (`ssh:`) means its defaults.
- Map keys given twice, unknown keys and values of the wrong kind are errors; the message names the file, the
  line and the key.

## Environment variables

Each key below that shows a variable can be set by it, over what the file says. An empty variable counts as
not set; `null` clears a key that may be null; commas separate a list:
`UGRO_SYNC_EXCLUDE_PATTERNS=.git,*.pyc`.

## nodes

Either a list of names, which ssh resolves with `~/.ssh/config`:

```yaml
nodes: [gpu-master, gpu1, gpu2]
```

or a map from names to fields, all of them optional:

```yaml
nodes:
  gpu-master: {{ip: 192.168.1.10, user: ann, role: master}}
  gpu1: {{host: gpu1.lan, user: bob}}
  gpu2:
```

There is at least one node. A name has letters, digits, `.`, `_` and `-`, starts with a letter or a digit, and
is at most 64 characters long. GPUs, memory and cores are detected; what the file says about them is a note.
"""

_CHANNELS = """\
`channels` is a map from names, which `alerts.channels` and a job's `notify` use, to these keys:

```yaml
nodes: [gpu-master, gpu1, gpu2]
channels:
  ops: {type: slack, url_file: ~/.ugro/slack_url}
  phone: {type: ntfy, url: "https://ntfy.sh/our-topic", token_file: ~/.ugro/ntfy_token}
  hook: {type: webhook, url: "http://127.0.0.1:9000/ugro"}
  mail: {type: email, host: smtp.example.org, user: ann, password_file: ~/.ugro/mail_password, to: [ann@example.org]}
```

The channel `log`, the agent's log, is always there. `ugro alerts test` tries them. In the variable it is JSON.
"""

_EXAMPLE_NODES = """\
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
  gpu1:
    host: gpu1.lan
    user: bob
  gpu2:
"""


def render() -> str:
    parts = [_BEGINNING, _table(NodeEntry, None), _top_level()]
    for name, section in sections().items():
        parts.append(f"## {name}\n\n{section.__doc__}\n\n{_table(section, name)}")
    parts.append(f"## channels\n\n{Channel.__doc__}\n\n{_CHANNELS}\n{_table(Channel, None)}")
    parts.append(f"## Full example\n\nEvery key; outside `nodes`, with its default.\n\n```yaml\n{example()}```\n")
    return "\n".join(parts)


def example() -> str:
    """A file with every key of the schema."""
    lines = [f"{one.name}: {flow(one.default)}" for one in Settings.known_keys().values() if one.section is None]
    for name, section in sections().items():
        lines += ["", f"{name}:", *(f"  {one.name}: {flow(one.default)}" for one in section.known_keys().values())]
    return _EXAMPLE_NODES + "\n" + "\n".join(lines) + "\n"


def sections() -> dict[str, type[Section]]:
    return {name: declared.section for name, declared in Settings.known_keys().items() if declared.section is not None}


def main(arguments: Sequence[str] | None = None) -> None:
    write_page("ugro.config.reference", render(), arguments)


def write_page(module: str, page: str, arguments: Sequence[str] | None) -> None:
    """What the module does as a command."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Write a generated page.")
    parser.add_argument("path", type=Path, help="the page")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    options = parser.parse_args(arguments)
    path: Path = options.path
    if not options.check:
        path.write_text(page, encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != page:
        parser.exit(1, f"{path} is out of date; write it with: python -m {module} {path}\n")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, ["---"] * len(header), *rows])


def kind_in_words(declared: Key) -> str:
    return f"{declared.kind.expected}, or null" if isinstance(declared.kind, OrNull) else declared.kind.expected


def _top_level() -> str:
    keys = [declared for declared in Settings.known_keys().values() if declared.section is None]
    return f"## Top level\n\n{_rows(keys, '')}"


def _table(section: type[Section], name: str | None) -> str:
    return _rows(section.known_keys().values(), name)


def _rows(keys: Iterable[Key], section: str | None) -> str:
    """``section`` is None where keys have no environment variables, and empty for the top level."""
    names = {(variable.section or "", variable.key): variable.name for variable in variables().values()}
    has_variables = section is not None
    header = ["Key", "Value", "Default", *(["Variable"] if has_variables else []), "Meaning"]
    rows = []
    for one in keys:
        variable = [f"`{names[section or '', one.name]}`"] if has_variables else []
        rows.append([f"`{one.name}`", kind_in_words(one), f"`{flow(one.default)}`", *variable, one.meaning])
    return table(header, rows)


if __name__ == "__main__":
    main()

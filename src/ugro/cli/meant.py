"""What somebody means by a command or an option of another tool that ``ugro`` does not have."""

from __future__ import annotations

from collections.abc import Sequence

_LIKE = 0.79  # a letter or two that are missing, too many or exchanged

_COMMANDS = {
    "help": "ugro --help, or of a command: ugro launch --help",
    "version": "ugro --version",
    "ls": "ugro status (jobs), ugro node ls (nodes)",
    "ps": "ugro status",
    "jobs": "ugro status",
    "queue": "ugro status",
    "nodes": "ugro node ls",
    "submit": "ugro launch train.py, or a command: ugro run -- ./prepare.sh",
    "stop": "ugro cancel JOB; the agent: ugro agent stop",
    "kill": "ugro cancel JOB",
    "rm": "ugro cancel JOB (a job), ugro node rm NODE (a node)",
    "resume": "ugro retry JOB (a job), ugro node resume NODE (a drained node)",
    "trust": "ugro node trust HOST",
    "drain": "ugro node drain NODE",
    "add": "ugro node add NODE",
    "setup": "ugro init (your SSH hosts), ugro node setup (what is installed on nodes)",
}
# The first of them that a command has.
_OPTIONS = {
    "--gpu": ("--gpus-per-node", "--gpus"),
    "--gpus": ("--gpus-per-node",),
    "--nproc-per-node": ("--gpus-per-node",),
    "--node": ("--nodes", "--only"),
    "--nnodes": ("--nodes",),
    "--num-nodes": ("--nodes",),
    "--host": ("--only",),
    "--hosts": ("--only",),
    "--nodelist": ("--only",),
    "--time": ("--time-limit",),
    "--timeout": ("--time-limit",),
    "--mem": ("--memory",),
}


def command_meant(word: str) -> str | None:
    return _COMMANDS.get(word)


def option_meant(name: str, options: Sequence[str]) -> str | None:
    """Which of a command's options somebody means; None for one that is like none of them."""
    import difflib  # only a mistake needs it

    for other in _OPTIONS.get(name.replace("_", "-"), ()):
        if other in options:
            return other
    known = {option.removeprefix("--"): option for option in options if option.startswith("--")}
    near = difflib.get_close_matches(name.removeprefix("--").replace("_", "-"), known, n=1, cutoff=_LIKE)
    return known[near[0]] if near else None

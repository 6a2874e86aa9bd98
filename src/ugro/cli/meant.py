"""What somebody means by a command or an option of another tool that ``ugro`` does not have."""

from __future__ import annotations

from collections.abc import Sequence

_LIKE = 0.79  # a letter or two that are missing or too many
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"  # also those that texts have instead

_LAUNCH = "ugro launch train.py, or a command: ugro run -- ./prepare.sh"
_COMMANDS = {
    "help": "ugro --help, or of a command: ugro launch --help",
    "version": "ugro --version",
    "ls": "ugro status (jobs), ugro node ls (nodes)",
    **dict.fromkeys(("list", "ps", "job", "jobs", "queue", "squeue"), "ugro status"),
    **dict.fromkeys(("show", "info", "describe"), "ugro status JOB, ugro node show NODE"),
    **dict.fromkeys(("nodes", "hosts", "sinfo"), "ugro node ls"),
    **dict.fromkeys(("submit", "sbatch", "srun", "start", "train", "torchrun"), _LAUNCH),
    **dict.fromkeys(("kill", "scancel"), "ugro cancel JOB"),
    **dict.fromkeys(("rm", "remove", "delete"), "ugro cancel JOB (a job), ugro node rm NODE (a node)"),
    **dict.fromkeys(("tail", "follow", "attach"), "ugro logs JOB -f"),
    **dict.fromkeys(("ssh", "shell"), "ugro exec NODE -- COMMAND"),
    "stop": "ugro cancel JOB; the agent: ugro agent stop",
    "restart": "ugro retry JOB; the agent: ugro agent restart",
    "resume": "ugro retry JOB (a job), ugro node resume NODE (a drained node)",
    "trust": "ugro node trust HOST",
    "drain": "ugro node drain NODE",
    "undrain": "ugro node resume NODE",
    "add": "ugro node add NODE",
    "setup": "ugro init (your SSH hosts), ugro node setup (what is installed on nodes)",
}
# The first of them that a command has.
_OPTIONS = {
    "gpu": ("--gpus-per-node", "--gpus"),
    "gpus": ("--gpus-per-node",),
    "ngpus": ("--gpus-per-node",),
    "num-gpus": ("--gpus-per-node",),
    "nproc-per-node": ("--gpus-per-node",),
    "node": ("--nodes", "--only"),
    "nnodes": ("--nodes",),
    "num-nodes": ("--nodes",),
    "host": ("--only",),
    "hosts": ("--only",),
    "nodelist": ("--only",),
    "time": ("--time-limit",),
    "timeout": ("--time-limit",),
    "mem": ("--memory",),
    "retry": ("--retries",),
}
_LETTERS = {"-n": "--nodes", "-N": "--nodes", "-c": "--cpus"}  # of other launchers


def command_meant(word: str) -> str | None:
    return _COMMANDS.get(word)


def option_meant(name: str, options: Sequence[str]) -> str | None:
    """Which of a command's options somebody means; None for one that is like none of them."""
    import difflib  # only a mistake needs it

    if name in _LETTERS:
        return _LETTERS[name] if _LETTERS[name] in options else None
    word = name.lstrip(_DASHES).replace("_", "-").lower()
    known = {option.removeprefix("--"): option for option in options if option.startswith("--")}
    for other, those in _OPTIONS.items():
        found = next((one for one in those if one in options), None)
        if found is not None:
            known.setdefault(other, found)
    if word in known or not name.startswith(("--", *_DASHES[1:])):
        return known.get(word)  # after one dash, letters may be a script's
    for other, option in known.items():
        if sorted(other) == sorted(word):
            return option
    near = difflib.get_close_matches(word, known, n=1, cutoff=_LIKE)
    return known[near[0]] if near else None


def is_option(word: str) -> bool:
    return word != "" and word[0] in _DASHES and not word[1:2].isdigit()

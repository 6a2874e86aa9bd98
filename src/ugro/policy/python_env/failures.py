"""What it means for a job that its environment cannot be made: the cause, which decides about a retry, and a hint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ugro.core.errors import EnvFailed
from ugro.core.failure import Cause, Failure
from ugro.core.login import node_of
from ugro.policy.lifecycle.postmortem import disk_hint
from ugro.policy.nodes.sdk import MODULE, TOO_OLD
from ugro.policy.wording import in_words, names

_HINTS = {
    "not-found": "is its name right, and is there a version for this Python?",
    "no-access": "give the index's password in its address: index_url: https://NAME:${PASSWORD}@…",
    "hash": "the index has other files than when it was resolved; resolve it again: --upgrade",
    "python-missing": "name a version that the nodes have: environment.python, or install that one there",
    "no-network": "is the index's address right? For nodes without internet: environment: {offline: true}",
    "server-failed": "it may pass; if it does not, name another index: environment.index_url",
    "unsafe-folder": "see: ugro doctor",
    "killed": "something on the node killed it: has it enough memory?",
}
_EXISTING = "every node of the job needs it at this path, or name packages instead: environment.packages"
# Another try, or another node, may do.
_OF_THE_NODE = frozenset({"no-network", "server-failed", "killed"})


def failure_of(error: EnvFailed, *, is_existing: bool = False) -> Failure:
    """``error.subject``: the node; None: this machine. ``is_existing``: it was only checked."""
    where = f" on {node_of(error.subject)}" if error.subject else ""
    done = "cannot be used" if is_existing else "was not made"
    reason = f"the Python environment {done}{where}: {error.message}"
    if error.cause == "no-space":
        hint = disk_hint(error.subject) if error.subject else "make room on this machine"
        return Failure(Cause.DISK_FULL, reason, node=error.subject, hint=hint, last_lines=error.tail)
    others = "its last lines say why; try it again with: ugro retry" if error.tail else "try it again with: ugro retry"
    hint = error.hint or (_EXISTING if is_existing else _HINTS.get(error.cause, others))
    # The same packages would not be found on another node either. A network may be back in a moment.
    cause = Cause.START_FAILED if error.cause in _OF_THE_NODE else Cause.SETUP_FAILED
    return Failure(cause, reason, node=error.subject, hint=hint, last_lines=error.tail)


def lack_of_packages(missing: Mapping[str, Sequence[str]], is_ours: bool) -> Failure | None:
    """Why ranks would end as they begin. ``missing``: by node, what the script imports and its environment lacks."""
    lacking = {node: modules for node, modules in missing.items() if modules}
    if not lacking:
        return None
    modules = sorted({name for some in lacking.values() for name in some})
    who = names(list(lacking))
    reason = f"not started: the Python environment on {who} lacks {in_words(modules)}, which the script imports"
    what = in_words(modules)
    hint = f"add the package of {what} to environment.packages" if is_ours else f"install the package of {what} into it"
    if MODULE in modules:  # it goes with the job
        hint = f"{TOO_OLD}, as environment.python" if is_ours else TOO_OLD
    return Failure(Cause.IMPORT_ERROR, reason, node=next(iter(lacking)), hint=hint)
